"""`duoka export RUN -o DIR`: a run's weights as a folder that transformers, vLLM and others open."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from duoka.config.foreign_task import AskedFile


@click.command("export")
@click.argument("target", metavar="RUN|FILE")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="A new folder to write to.")
@click.option("--checkpoint", type=int, metavar="STEP", help="Export the run as it was after this step.")
@click.option(
    "--dtype", type=click.Choice(["fp32", "bf16", "fp16"]), help="Type of the weights; default: the base model's."
)
@click.option("--adapter", is_flag=True, help="Write the adapter alone (a PEFT folder), not merged.")
@click.option(
    "--gguf",
    type=click.Choice(["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]),
    help="Write a GGUF file of that type too, for llama.cpp and Ollama, with a Modelfile.",
)
@click.option(
    "--to",
    "destination",
    type=click.Choice(["folder", "ollama"]),
    default="folder",
    help="ollama: a folder with a GGUF file (q8_0, or as --gguf says) and its Modelfile alone.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the facts as JSON.")
def command(
    target: str,
    overrides: tuple[str, ...],
    output: Path | None,
    checkpoint: int | None,
    dtype: str | None,
    adapter: bool,
    gguf: str | None,
    destination: str,
    as_json: bool,
) -> None:
    """Merge a run's adapter into its base model and write one plain transformers folder.

    The folder is read back and its answers on real text are compared with those of base + adapter; the largest
    difference of logits is printed. Nothing is ever overwritten.
    FILE is a config: its run, or what a LLaMA-Factory file merges, into its export_dir.
    """
    from duoka.cli.chat import say
    from duoka.cli.target import find_target
    from duoka.errors import ConfigError, typed
    from duoka.model.export import check_target

    if output is not None:
        check_target(output)
    trained, asked = find_target(target, overrides, "export", checkpoint, say)
    shard_gb = None
    if asked is not None:
        output = output or (Path(asked.get("export_dir")) if asked.get("export_dir") else None)
        dtype, shard_gb = dtype or _dtype_of(asked), asked.whole("export_size")
    if output is None:
        fix = f"write:   duoka export {typed(target)} -o NEW_FOLDER"
        raise ConfigError("-o is not given (the new folder)", fix=fix)
    check_target(output)
    is_ollama = destination == "ollama"
    gguf = gguf or ("q8_0" if is_ollama else None)
    if shard_gb is not None and (is_ollama or adapter):
        _refuse_shards(shard_gb, "--to ollama" if is_ollama else "--adapter")
    if gguf is not None:
        _check_gguf(trained, adapter)
    if is_ollama and gguf is not None:
        facts, lines = _export_ollama(trained, output, dtype, gguf)
    elif adapter:
        facts, lines = _export_adapter(trained, output, dtype)
    else:
        facts, lines = _export_full(trained, output, dtype, shard_gb)
    if gguf is not None and not is_ollama:
        with _gone_where_it_fails(output):
            more, line = _write_gguf(output, gguf)
        facts, lines = facts | more, [*lines, line]
    if as_json:
        import json

        click.echo(json.dumps(facts, ensure_ascii=False))
    else:
        click.echo("\n".join(lines))


def _refuse_shards(shard_gb: int, flag: str) -> None:
    from duoka.errors import ConfigError

    raise ConfigError(
        f"export_size is {shard_gb}, which cuts a whole model into files, and {flag} writes one file",
        fix=f"leave export_size out of the file, or {flag} out of the line",
    )


def _check_gguf(trained: Any, adapter: bool) -> None:
    from duoka.errors import ConfigError
    from duoka.model.gguf import check_gguf

    if adapter:
        raise ConfigError("GGUF files are of merged models", fix="leave --adapter out")
    check_gguf(trained.full or trained.base, trained.tokenizer_folder)


def _write_gguf(output: Path, kind: str) -> tuple[dict[str, Any], str]:
    from duoka.model.gguf import write_gguf
    from duoka.units import format_bytes

    done = write_gguf(output, kind, output.resolve().name)
    size, error = format_bytes(done.size_bytes), f"{done.largest_error:.2g}"
    line = f"  wrote {done.path} ({size}); read back, no matrix is off by more than {error}"
    return {"gguf": str(done.path), "gguf_bytes": done.size_bytes, "gguf_error": done.largest_error}, line


@contextlib.contextmanager
def _gone_where_it_fails(folder: Path) -> Iterator[None]:
    """Half of what was asked for would be there, and the same command would refuse its own folder."""
    import shutil

    try:
        yield
    except BaseException:  # a Ctrl-C too must leave no half of it; goes on upwards
        shutil.rmtree(folder.resolve(), ignore_errors=True)
        raise


def _export_ollama(trained: Any, output: Path, dtype: str | None, kind: str) -> tuple[dict[str, Any], list[str]]:
    """The whole model is written beside it and goes again: Ollama reads the GGUF file and nothing else."""
    import shlex
    import tempfile

    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".ollama-", dir=output.parent) as name:
        whole = Path(name) / output.resolve().name
        facts, _ = _export_full(trained, whole, dtype, None)
        more, _ = _write_gguf(whole, kind)
        output.mkdir(exist_ok=True)
        path = output / Path(more["gguf"]).name
        Path(more["gguf"]).rename(path)
        (whole / "Modelfile").rename(output / "Modelfile")
    more["gguf"] = str(path)
    said = f"wrote {path.name} and a Modelfile into {output}; read back, no matrix is off by more than"
    create = f"ollama create {shlex.quote(output.resolve().name)} -f {shlex.quote(str(output / 'Modelfile'))}"
    facts = {key: facts[key] for key in ("max_difference", "same_top_share", "num_positions")} | {"folder": str(output)}
    return facts | more, [f"{said} {more['gguf_error']:.2g}", f"  next:   {create}"]


def _dtype_of(asked: AskedFile) -> str | None:
    """What infer_dtype means here; auto is the base's own."""
    from duoka.errors import ConfigError

    names = {"auto": None, "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    word = str(asked.get("infer_dtype", "auto"))
    if word not in names:
        raise ConfigError(f"infer_dtype {word} is not known here", fix=f"known: {', '.join(names)}")
    return names[word]


def _sources(trained: Any) -> tuple[Any, Any]:
    from duoka.model.export import Sources
    from duoka.serve.load_run import load_chat_tokenizer

    tokenizer = load_chat_tokenizer(trained)
    other = tokenizer.template if tokenizer.template_name != "model" else None
    return tokenizer, Sources(trained.base, trained.tokenizer_folder, trained.trust_remote_code, other)


def _export_full(
    trained: Any, output: Path, dtype: str | None, shard_gb: int | None
) -> tuple[dict[str, Any], list[str]]:
    import torch

    from duoka.errors import typed
    from duoka.model.answer import end_of_turn
    from duoka.model.export import export_model
    from duoka.serve.load_run import load_trained
    from duoka.units import format_bytes

    tokenizer, sources = _sources(trained)
    lm = load_trained(trained, dtype=torch.float32, unpacked=True)
    done = export_model(lm, tokenizer, sources, output, sources.dtype(dtype), end_of_turn(tokenizer), shard_gb=shard_gb)
    kind = str(done.dtype).removeprefix("torch.")
    what, other = ("merged", "base + adapter") if trained.is_adapted else ("written", "the run's")
    lines = [
        f"{what} {trained.name} into {output}: {kind}, {format_bytes(done.size_bytes)}",
        f"  logits differ by at most {done.max_difference:.2g} from {other} "
        f"(largest logit {done.max_logit:.3g}); same likeliest token at {done.same_top_share:.1%} of "
        f"{done.num_positions} positions",
        f"  try it: duoka chat {typed(output)}",
    ]
    facts = {
        "folder": str(output), "dtype": kind, "size_bytes": done.size_bytes, "max_difference": done.max_difference,
        "max_logit": done.max_logit, "same_top_share": done.same_top_share, "num_positions": done.num_positions,
    }  # fmt: skip
    return facts, lines


def _export_adapter(trained: Any, output: Path, dtype: str | None) -> tuple[dict[str, Any], list[str]]:
    import torch

    from duoka.errors import ConfigError
    from duoka.model.export import export_adapter
    from duoka.serve.load_run import load_trained
    from duoka.units import format_bytes

    if dtype is not None:
        raise ConfigError("--dtype is for merged models; an adapter keeps its own type", fix="leave one of them out")
    if not trained.is_adapted:
        raise ConfigError(f"{trained.name} has no adapter: it was trained in full", fix="leave --adapter out")
    _, sources = _sources(trained)
    base_name = trained.base_name
    size_bytes = export_adapter(load_trained(trained, dtype=torch.float32), sources, base_name, output)
    facts = {"folder": str(output), "base": base_name, "size_bytes": size_bytes}
    return facts, [
        f"wrote the adapter of {trained.name} to {output} ({format_bytes(size_bytes)}); its base is {base_name}"
    ]
