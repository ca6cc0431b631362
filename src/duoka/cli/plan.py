"""`duoka plan`: what a config needs and how it would run here, before anything starts. Exit code 4: does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from duoka.config.schema import ModelConfig, RunConfig
    from duoka.errors import Fault
    from duoka.plan.shape import ModelShape

# Enough for a good guess at the number of steps, little enough to read in a fraction of a second.
_READ_BYTES = 16 * 2**20


@click.command("plan", help="Print parameters, memory per rank and the batch arithmetic of CONFIG. Starts nothing.")
@click.argument("config", type=click.Path(dir_okay=True))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--nproc", type=click.IntRange(min=1), help="Processes to plan for; default: one per GPU, or 1.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(config: str, overrides: tuple[str, ...], nproc: int | None, as_json: bool) -> int:
    from duoka.config.load import Start, load_config
    from duoka.errors import DoesNotFit
    from duoka.plan.choose import check_machine
    from duoka.plan.hardware import read_machine
    from duoka.plan.report import make_plan

    machine = read_machine()
    world_size = nproc or max(1, len(machine.gpus))

    def check_here(config: RunConfig, base: Path) -> list[Fault]:
        return check_machine(config, machine, world_size)

    start = Start(world_size, bool(machine.gpus))
    loaded = load_config(config, overrides, checks=(_check_shape, check_here), start=start)
    for note in loaded.notes:
        click.echo(f"note: {note}", err=True)
    shape = _read_shape(loaded.config.model, loaded.base)
    num_samples = _count_samples(loaded.config, loaded.base)
    plan = make_plan(loaded.config, shape, machine, world_size, num_samples=num_samples, is_data_measured=False)
    if as_json:
        click.echo(json.dumps(plan.to_json(), indent=2, ensure_ascii=False))
    else:
        click.echo("\n".join(plan.lines()))
    return DoesNotFit.exit_code if plan.verdict == "does not fit" else 0


def _check_shape(config: RunConfig, base: Path) -> list[Fault]:
    """A plan needs no weights and no tokenizer: a folder with a config.json is enough."""
    from duoka.errors import ConfigError, Fault
    from duoka.model.source import find_model
    from duoka.plan.shape import adapted_linears

    try:
        source = find_model(config.model, base)
        if source.hub_id is not None:
            return []
        shape = _read_shape(config.model, base)
    except ConfigError as error:
        what = f"{error.what} ({error.where})" if error.where and error.where not in error.what else error.what
        return [Fault(what, key="model.name", fix=error.fix or "")]
    try:
        if config.lora is not None:
            adapted_linears(shape, config.lora)
    except ConfigError as error:
        return [Fault(error.what, key="lora.targets", fix=error.fix or "")]
    return []


def _read_shape(model: ModelConfig, base: Path) -> ModelShape:
    from duoka.model.source import fetch_config, find_model
    from duoka.plan.shape import demo_shape, read_shape

    source = find_model(model, base)
    if source.is_demo:
        return demo_shape()
    if source.folder is not None:
        return read_shape(source.folder)
    assert source.hub_id is not None
    return read_shape(fetch_config(source.hub_id, model.revision))


def _count_samples(config: RunConfig, base: Path) -> int | None:
    """About how many samples there are to train on, or None where that is not quick to know."""
    from duoka.data.records import find_pieces, read_piece
    from duoka.data.registry import find_sets
    from duoka.errors import Fault, Faults

    if config.stage == "pretrain":
        return None  # rows, whose number the tokenizer decides
    try:
        sets = [found for found in find_sets(config, base) if found.split == "train"]
    except Faults:
        return None  # the data may lie on another machine; the plan needs only their number
    files = [path for found in sets for path in found.files]
    if any(found.weight is not None for found in sets) or sum(path.stat().st_size for path in files) > _READ_BYTES:
        return None
    total = 0
    for found in sets:
        pieces = (piece for path in found.files for piece in find_pieces(path, _READ_BYTES))
        records = (record for piece in pieces if not isinstance(piece, Fault) for record in read_piece(piece))
        count = sum(not isinstance(record, Fault) for record in records)
        total += min(count, found.max_samples or count)
    if isinstance(config.data.eval, float):
        total -= round(config.data.eval * total)
    return total or None
