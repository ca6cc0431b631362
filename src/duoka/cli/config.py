"""`duoka config`: show what a YAML means, and what may stand in one. Thin: the config room does the work.

Loaded by the lazy group in cli/__init__.py as `command`. Imports no torch, starts nothing; only `convert` writes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from duoka.config.dialects.rows import Start
    from duoka.config.schema import RunConfig


@click.group(name="config", help="Show a config with the origin of every value, or the schema of all configs.")
def command() -> None:
    pass


@command.command(help="Print every value of FILE, overrides applied, with where it came from.")
@click.argument("file", type=click.Path(dir_okay=True))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--nproc", type=click.IntRange(min=1), help="Processes that a batch per device is meant for.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of YAML.")
def show(file: str, overrides: tuple[str, ...], nproc: int | None, as_json: bool) -> None:
    from duoka.config.foreign_task import describe_task
    from duoka.config.load import config_hash, load_config, read_side_file, resolved_yaml

    start = _start(nproc)
    side = read_side_file(file, start)
    if side is not None:
        click.echo(side.text, nl=False)
        for note in side.notes:
            click.echo(f"note: {note}", err=True)
        return
    task = describe_task(file, overrides)
    if task is not None:
        click.echo(task)
        return
    loaded = load_config(file, overrides, start=start)
    if not as_json:
        click.echo(resolved_yaml(loaded), nl=False)
        for note in loaded.notes:
            click.echo(f"note: {note}", err=True)
        return
    from duoka.config.write import shown_values

    answer = {
        "file": str(loaded.path),
        "hash": config_hash(loaded.config),
        "config": shown_values(loaded),
        "origins": loaded.origins,
        "notes": list(loaded.notes),
    }
    click.echo(json.dumps(answer, indent=2, ensure_ascii=False))


def _start(nproc: int | None) -> Start:
    """This machine's start, as `duoka train` would make it."""
    from duoka.cluster.launch import count_processes
    from duoka.config.dialects.rows import Start
    from duoka.plan.hardware import read_machine

    gpus = read_machine().gpus
    return Start(count_processes(None, len(gpus)) if nproc is None else nproc, bool(gpus))


@command.command(
    help="Write FILE, of LLaMA-Factory or in the nested form, in duoka's own words, with comments. To a .json file: "
    "what DeepSpeed is told."
)
@click.argument("file", type=click.Path(dir_okay=True))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    help="A new YAML file, or ds_config.json; -: print.",
)
@click.option("--nproc", type=click.IntRange(min=1), help="Processes that a batch per device is meant for.")
def convert(file: str, overrides: tuple[str, ...], output: Path, nproc: int | None) -> None:
    from duoka.config.convert import READ_AS, converted_yaml
    from duoka.config.load import load_config
    from duoka.errors import typed

    start = _start(nproc)
    loaded = load_config(file, overrides, start=start)
    notes = list(loaded.notes)
    if output.suffix == ".json":
        text, more = _deepspeed_text(loaded.config, start.num_ranks)
        notes += more
    else:
        text = converted_yaml(loaded, output.parent)
    if str(output) != "-":
        _write_new(output, text)
    for note in notes:
        click.echo(f"note: {note.partition(READ_AS)[0]}", err=True)
    if str(output) == "-":
        click.echo(text, nl=False)
    elif output.suffix == ".json":
        click.echo(f"wrote {output}, for {start.num_ranks} processes")
    else:
        click.echo(f"wrote {output}; train it:   duoka train {typed(output)}")


def _write_new(path: Path, text: str) -> None:
    from duoka.errors import ConfigError, StorageError

    try:
        with path.open("x", encoding="utf-8") as new:
            new.write(text)
    except FileExistsError:
        raise ConfigError(f"{path} exists, and nothing is overwritten", fix="write another name after -o") from None
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror or error}") from None


def _deepspeed_text(config: RunConfig, num_processes: int) -> tuple[str, list[str]]:
    from duoka.config.deepspeed_json import file_json
    from duoka.plan.hardware import read_machine

    precision = config.train.precision
    if precision == "auto":
        precision = "bf16" if read_machine().has_native_bf16 else "fp32"
    facts, notes = file_json(config, num_processes, precision)
    return json.dumps(facts, indent=2) + "\n", notes


@command.command(help="Print the page docs/llamafactory.md: every key of other tools, and what becomes of it.")
def dialects() -> None:
    from duoka.config.dialects.page import dialects_markdown

    click.echo(dialects_markdown(), nl=False)


@command.command(help="Print the JSON Schema of the YAML, for editors.")
@click.option("--markdown", is_flag=True, help="Print the page docs/config.md instead.")
def schema(markdown: bool) -> None:
    from duoka.config.document import config_markdown, json_schema

    if markdown:
        click.echo(config_markdown(), nl=False)
    else:
        click.echo(json.dumps(json_schema(), indent=2, ensure_ascii=False))
