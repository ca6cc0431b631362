"""`duoka embed RUN|MODEL FILE`: a vector for each line of a text file."""

from __future__ import annotations

from pathlib import Path

import click

from duoka.cli import options


@click.command("embed")
@click.argument("target", metavar="RUN|MODEL")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("-o", "output", type=click.Path(path_type=Path), help="Where to write; default: FILE.npy.")
@click.option("--nproc", type=click.IntRange(min=1), metavar="N", help="Processes; default: one, or one per GPU.")
@click.option("--base", is_flag=True, help="The model as it was before training.")
@options.precision
@click.option("--max-length", type=click.IntRange(min=1), default=512, show_default=True, help="Tokens of a text.")
def command(
    target: str, file: Path, output: Path | None, nproc: int | None, base: bool, precision: str, max_length: int
) -> int:
    """Write a vector for each line of FILE as a NumPy file: float32, length 1, in the same order.

    A line is a text; of a .jsonl it is a record with the key `text`.

    A vector is the mean of the model's last hidden states over the text's tokens. Each process holds the model once.
    """
    from duoka.cli.chat import say
    from duoka.cli.worlds import find_part, run_same_command
    from duoka.cluster.launch import count_processes
    from duoka.errors import ConfigError
    from duoka.plan.hardware import read_machine
    from duoka.serve.embed import embed, read_texts
    from duoka.serve.load_run import find_trained

    part = find_part(nproc)
    texts = read_texts(file)
    path = output or file.with_name(file.name + ".npy")
    if path.suffix != ".npy":
        raise ConfigError(f"-o is {path}; a NumPy file is written", fix="write a name that ends in .npy")
    if not path.parent.is_dir():
        raise ConfigError(f"there is no folder {path.parent}", fix="make it, or write -o elsewhere")
    trained = find_trained(target, say=say if part.speaks else lambda text: None)
    num_processes = count_processes(nproc, len(read_machine().gpus)) if part.place is None else 1
    if part.starts(num_processes):
        given = ["-o", str(path), f"--max-length={max_length}", f"--precision={precision}"]
        given += ["--base"] if base else []
        return run_same_command(["embed", target, str(file), *given], num_processes, part)
    done = embed(trained, texts, path, max_length=max_length, precision=precision, base_only=base)
    if done is not None:
        click.echo("\n".join(done.lines()))
    return 0
