"""`duoka score RUN|MODEL DATA`: a reward model's score of each answer."""

from __future__ import annotations

from pathlib import Path

import click

from duoka.cli import options


@click.command("score")
@click.argument("target", metavar="RUN|MODEL")
@click.argument("data", metavar="DATA")
@click.option("-o", "output", type=click.Path(path_type=Path), help="Where to write; default: RUN/scores.jsonl.")
@click.option("--nproc", type=click.IntRange(min=1), metavar="N", help="Processes; default: one, or one per GPU.")
@click.option(
    "--max-length", type=click.IntRange(min=8), help="Tokens of an answer with its prompt; default: the run's."
)
@options.precision
def command(
    target: str, data: str, output: Path | None, nproc: int | None, max_length: int | None, precision: str
) -> int:
    """Write a JSON line with the score of each answer in DATA: a registered set or a file, of pairs or conversations.

    RUN is one of stage reward, or a folder of such a model. The score of an answer is the same whatever else is scored,
    on any number of processes.
    """
    from duoka.cli.chat import say
    from duoka.cli.worlds import find_part, run_same_command
    from duoka.cluster.launch import count_processes
    from duoka.errors import ConfigError
    from duoka.plan.hardware import read_machine
    from duoka.serve.load_run import find_trained
    from duoka.serve.score import read_answers, score

    part = find_part(nproc)
    speak = say if part.speaks else lambda text: None
    trained = find_trained(target, say=speak)
    path = output or (trained.run.path / "scores.jsonl" if trained.run is not None else Path("scores.jsonl"))
    if not path.parent.is_dir():
        raise ConfigError(f"there is no folder {path.parent}", fix="make it, or write -o elsewhere")
    prepared = read_answers(trained, data, max_length=max_length, say=speak)
    num_processes = count_processes(nproc, len(read_machine().gpus)) if part.place is None else 1
    if part.starts(num_processes):
        given = ["-o", str(path), f"--precision={precision}"]
        given += [] if max_length is None else [f"--max-length={max_length}"]
        return run_same_command(["score", target, data, *given], num_processes, part)
    done = score(trained, prepared, path, precision=precision)
    if done is not None:
        click.echo("\n".join(done.lines()))
    return 0
