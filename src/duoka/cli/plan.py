"""`duoka plan`: what a config needs and how it would run, here or elsewhere. Exit code 4: does not fit."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from duoka.cli import processes
from duoka.cli.model_facts import UNKNOWN_VOCABULARY, measured, read_model_facts, read_model_shape, shape_for_axes

if TYPE_CHECKING:
    from duoka.bench.dry_run import DryRun
    from duoka.config.schema import RunConfig
    from duoka.errors import Fault
    from duoka.plan.catalog import Cluster
    from duoka.plan.hardware import Machine
    from duoka.plan.layout import Layout
    from duoka.plan.lengths import Lengths
    from duoka.plan.report import Plan
    from duoka.plan.shape import ModelShape

# What --params and --depth are asked about, where nothing else is said.
_QUESTION = "model: {%s}\ndata: {train: [identity], max_length: 2048}\n"


@click.command("plan", help="Say whether CONFIG fits, how fast it will be, what limits it and what it costs.")
@click.argument("config", type=click.Path(dir_okay=True), required=False)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--on", "on", metavar="MACHINES", help='Other machines than this one, such as "2x8xH100-80G".')
@click.option(
    "--nproc", type=processes.nproc, metavar="N", help="Processes to plan for, or auto; default: one per GPU, or 1."
)
@click.option("--layout", "layout_name", metavar="LAYOUT", help="Ask about one, such as fsdp16, hsdp2x8, or tp4.pp12.")
@click.option("--params", metavar="COUNT", help="Without CONFIG: a model of so many parameters, such as 7e9 or 7B.")
@click.option("--depth", type=click.IntRange(min=1), help="Without CONFIG: a model of so many layers, from nothing.")
@click.option("--price", type=click.FloatRange(min=0), help="Of one device and hour, to print what the run costs.")
@click.option("--html", type=click.Path(dir_okay=False), help="Write the plan as a page, too.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--dry-run", is_flag=True, help="Check the arithmetic: two steps of the real code, on fake tensors (torch)."
)
@click.option("--validate", is_flag=True, help="Run the planner over published runs and print how far off it is.")
def command(
    config: str | None,
    overrides: tuple[str, ...],
    nproc: int | str | None,
    as_json: bool,
    on: str | None = None,
    layout_name: str | None = None,
    params: str | None = None,
    depth: int | None = None,
    price: float | None = None,
    html: str | None = None,
    dry_run: bool = False,
    validate: bool = False,
) -> int:
    from duoka.errors import DoesNotFit

    if validate:
        return _print_validation(as_json)
    place = _find_place(on, nproc if on is not None else processes.resolve(nproc, config, overrides))
    subject = _find_subject(config, overrides, params, depth, place)
    plan = _make_plan(subject, place, layout_name, price)
    if html is not None:
        from duoka.runs.folder import write_asked
        from duoka.watch.plan_page import plan_page

        write_asked(Path(html), plan_page(plan))
    checked = _dry_run(subject, plan) if dry_run else None
    if as_json:
        answer = plan.to_json() | ({"dry_run": checked.to_json()} if checked else {})
        click.echo(json.dumps(answer, indent=2, ensure_ascii=False))
    else:
        from duoka.plan.picture import plan_lines

        click.echo("\n".join([*plan_lines(plan), *(_dry_run_lines(plan, checked) if checked else [])]))
        is_open = nproc is None and place.is_here and layout_name is None and not place.machine.gpus
        if config is not None and is_open and (better := processes.hint(config, overrides, place.world_size)):
            click.echo(f"\nprocesses  {better}")
    return DoesNotFit.exit_code if plan.verdict == "does not fit" else 0


def plan_of(config: str, on: str | None) -> Plan:
    """What the command says of a file, here or on other machines."""
    place = _find_place(on, None)
    return _make_plan(_find_subject(config, (), None, None, place), place, None, None)


def plan_for_nodes(config: str, overrides: tuple[str, ...], num_nodes: int) -> Plan:
    """The same of so many machines like this one."""
    from duoka.plan.catalog import local_cluster

    here = _find_place(None, None)
    world_size = num_nodes * here.local_size
    cluster = local_cluster(here.machine, world_size, here.local_size)
    place = replace(here, cluster=cluster, world_size=world_size)
    return _make_plan(_find_subject(config, overrides, None, None, place), place, None, None)


@dataclass(frozen=True)
class _Place:
    """Where to plan for: one node as a machine, how many ranks in all and per node, and all of it with speeds."""

    machine: Machine
    cluster: Cluster
    world_size: int
    local_size: int
    is_here: bool = True  # this machine


@dataclass(frozen=True)
class _Subject:
    """What to plan: a config, its model's shape and config.json, and what is known of its samples."""

    config: RunConfig
    shape: ModelShape
    lengths: Lengths | None
    facts: dict[str, Any]


def _print_validation(as_json: bool) -> int:
    from duoka.plan.validate import validate

    found = validate()
    click.echo(json.dumps(found.to_json(), indent=2) if as_json else "\n".join(found.lines()))
    for text in found.broken:
        click.echo(f"a promise does not hold: {text}", err=True)
    return 1 if found.broken else 0


def _find_place(on: str | None, nproc: int | str | None) -> _Place:
    from duoka.plan.catalog import local_cluster, parse_cluster
    from duoka.plan.hardware import read_machine

    if on is not None:
        if nproc is not None:
            raise click.UsageError('--on says how many devices there are: leave --nproc out, or write --on "4xH100"')
        cluster = parse_cluster(on)
        return _Place(cluster.machine(), cluster, cluster.num_devices, cluster.per_node, is_here=False)
    machine = read_machine()
    world_size = max(1, len(machine.gpus)) if nproc is None else int(nproc)
    if world_size < 1:
        raise click.UsageError(f"--nproc is {world_size}; at least 1 process is needed")
    return _Place(machine, local_cluster(machine, world_size, world_size), world_size, world_size)


def _find_subject(
    path: str | None, overrides: tuple[str, ...], params: str | None, depth: int | None, place: _Place
) -> _Subject:
    if path is None or params is not None or depth is not None:
        return _made_up_subject(path, overrides, params, depth)
    from duoka.config.adapters import check_adapters
    from duoka.config.load import Start, load_config
    from duoka.data.dataset_lengths import find_lengths
    from duoka.plan.choose import check_machine
    from duoka.plan.own_attention import as_computed

    def check_here(config: RunConfig, base: Path) -> list[Fault]:
        shape = shape_for_axes(config, base)
        return check_machine(config, place.machine, place.world_size, place.local_size, shape)

    start = Start(place.world_size, bool(place.machine.gpus))
    loaded = load_config(path, overrides, checks=(_check_shape, check_adapters, check_here), start=start)
    for note in loaded.notes:
        click.echo(f"note: {note}", err=True)
    facts = read_model_facts(loaded.config.model, loaded.base)
    shape = measured(read_model_shape(loaded.config.model, loaded.base, facts), facts, loaded.config)
    config, shape, note = as_computed(loaded.config, shape)
    if note:
        click.echo(f"note: {note}", err=True)
    return _Subject(config, shape, find_lengths(loaded.config, loaded.base), facts)


def _made_up_subject(path: str | None, overrides: tuple[str, ...], params: str | None, depth: int | None) -> _Subject:
    """A first question, before there is a model: sizes from --params or --depth, the rest from overrides."""
    import tempfile

    from duoka.config.load import load_config
    from duoka.plan.shape import ASSUMED, facts_from_parameters, facts_of_new, shape_from_config
    from duoka.units import parse_amount

    if (params is None) == (depth is None):
        raise click.UsageError("name a CONFIG, or one of --params and --depth")
    if path is not None:
        overrides = (path, *overrides)
    try:
        count = None if params is None else parse_amount(_plain_number(params)).count
    except ValueError as error:
        raise click.UsageError(f"--params: {error}; write for example --params 7e9 or --params 7B") from None
    with tempfile.TemporaryDirectory() as folder:
        made_up = Path(folder) / "question.yaml"
        asked = "name: demo" if depth is None else f"depth: {depth}, tokenizer: demo"
        batch = "train: {global_batch: 512k tokens}\n" if depth is None else ""
        made_up.write_text(_QUESTION % asked + batch, encoding="utf-8")
        config = load_config(str(made_up), overrides).config
    facts = facts_from_parameters(count) if count is not None else facts_of_new(config.model, UNKNOWN_VOCABULARY)
    shape = shape_from_config(facts)
    return _Subject(config, replace(shape, exact=False, model_type=ASSUMED) if count else shape, None, facts)


def _plain_number(text: str) -> str:
    try:
        return str(int(float(text)))
    except (ValueError, OverflowError):
        return text


def _make_plan(subject: _Subject, place: _Place, layout_name: str | None, price: float | None) -> Plan:
    from duoka.plan.offload import with_disk
    from duoka.plan.report import make_plan

    layout = None if layout_name is None else _find_layout(layout_name, place.world_size)
    config, machine = subject.config, place.machine
    if place.is_here:
        machine = with_disk(machine, config.parallel.offloads, Path(config.output))
    return make_plan(
        config, subject.shape, machine, place.world_size, lengths=subject.lengths,
        local_size=place.local_size, cluster=place.cluster, layout=layout, price=price, is_ranked=True,
    )  # fmt: skip


def _find_layout(name: str, world_size: int) -> Layout:
    """The layout that was asked for; of `tp4.pp12` alone, the data ranks are what is left."""
    from duoka.errors import ConfigError
    from duoka.plan.layout import complete_layout

    try:
        return complete_layout(name, world_size)
    except ValueError as error:
        raise ConfigError(f"--layout: {error}") from None


def _check_shape(config: RunConfig, base: Path) -> list[Fault]:
    """A plan needs no weights and no tokenizer: a folder with a config.json is enough."""
    from duoka.errors import ConfigError, Fault
    from duoka.hub.models import find_model
    from duoka.plan.shape import adapted_linears

    try:
        source = find_model(config.model, base)
        if source.hub_id is not None:
            return []
        shape = read_model_shape(config.model, base)
    except ConfigError as error:
        what = f"{error.what} ({error.where})" if error.where and error.where not in error.what else error.what
        return [Fault(what, key="model.name", fix=error.fix or "")]
    try:
        if config.lora is not None:
            adapted_linears(shape, config.lora)
    except ConfigError as error:
        return [Fault(error.what, key="lora.targets", fix=error.fix or "")]
    return []


def _dry_run(subject: _Subject, plan: Plan) -> DryRun:
    from duoka.bench.dry_run import dry_run
    from duoka.errors import ConfigError

    try:
        tokens = plan.memory.tokens, plan.memory.later
        return dry_run(subject.config, subject.facts, plan.layout, tokens, plan.batch.accumulation)
    except ValueError as error:
        raise ConfigError(f"--dry-run: {error}") from None


def _dry_run_lines(plan: Plan, found: DryRun) -> list[str]:
    """What the real code would allocate, beside the arithmetic, without what no code of ours allocates."""
    from duoka.plan.task import memory_of
    from duoka.units import format_bytes, format_seconds

    # Fake tensors are computed by torch's operators of a CPU, whatever the plan is for.
    plain = replace(plan.task.work, device="cpu", has_kernels=False)
    memory = memory_of(replace(plan.task, work=plain), plan.layout)
    parts = memory.parts
    arithmetic = memory.peak_bytes - sum(parts.get(name, 0) for name in ("framework", "heap", "checkpoint copy"))
    off = arithmetic / found.peak_bytes - 1
    pp = plan.layout.pp
    layers = " and ".join(map(str, found.probed)) if pp == 1 else f"the larger of the ends of {pp} stages of"
    out = [
        "",
        f"dry run  {format_bytes(found.peak_bytes)} at the peak of two steps of the real code on fake tensors of a CPU "
        f"({format_seconds(found.seconds)};",
        f"         {layers} of {found.num_layers} layers run); by arithmetic {format_bytes(arithmetic)} ({off:+.1%})",
    ]
    out += [f"           {name:<16}{format_bytes(size):>10}" for name, size in found.phases.items()]
    out += [
        f"           {kind:<16}{format_bytes(one.sent_bytes):>10} sent in {one.num_calls:,} calls of a last micro-batch"
        for kind, one in found.traffic.items()
    ]
    return out + ([f"         {found.note}"] if found.note else [])
