"""`duoka run p.yaml`: the stages of one file, in their order; what is done is kept, and the same command goes on."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from duoka.cluster.pipeline.check import Place
    from duoka.cluster.pipeline.manifest import Manifest
    from duoka.cluster.pipeline.nodes import Nodes
    from duoka.config.pipeline import Pipeline


@click.command("run")
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE|STAGE.KEY=VALUE]...")
@click.option("--from", "begin", metavar="STAGE", help="Run this stage again, and all that depend on it.")
@click.option("--until", metavar="STAGE", help="Stop after this stage.")
@click.option("--only", metavar="STAGE", help="Run no other stage.")
@click.option("--dry-run", is_flag=True, help="Check all stages, say what would run, start nothing.")
@click.option("--status", is_flag=True, help="Print each stage's state, why it would run, and what it took.")
@click.option("--nproc", type=click.IntRange(min=1), help="Processes; default: one per GPU, on a CPU one.")
def command(
    config: Path,
    overrides: tuple[str, ...],
    begin: str | None,
    until: str | None,
    only: str | None,
    dry_run: bool,
    status: bool,
    nproc: int | None,
) -> int:
    """Run the stages of CONFIG: pretraining, mid, SFT, evaluation, export, as they stand under pipeline:.

    All of them are checked before anything trains. A stage whose settings, data and parents are as they were is kept.
    """
    from duoka.cluster.pipeline.manifest import hold_pipeline
    from duoka.config.pipeline import read_pipeline
    from duoka.errors import ConfigError

    pipeline = read_pipeline(config, overrides)
    names = [stage.name for stage in pipeline.stages]
    for flag, name in (("--from", begin), ("--until", until), ("--only", only)):
        if name is not None and name not in names:
            raise ConfigError(f"{flag} names {name}, which is no stage", fix=f"stages: {', '.join(names)}")
    if only and (begin or until):
        raise ConfigError("--only names one stage, --from and --until name many", fix="leave one of them out")
    chosen = _choose(pipeline, until, only)
    if dry_run or status:
        return _show(pipeline, begin, chosen, nproc, checks=dry_run)
    with hold_pipeline(pipeline.output):
        return _run(pipeline, begin, chosen, nproc)


def _choose(pipeline: Pipeline, until: str | None, only: str | None) -> list[str]:
    names = [stage.name for stage in pipeline.stages]
    if only:
        return [only]
    return names[: names.index(until) + 1] if until else names


def _generations(pipeline: Pipeline, manifest: Manifest, begin: str | None) -> dict[str, int]:
    """Of a stage that is run again, the next; of one whose second run was interrupted, that one."""
    found = {stage.name: manifest.generations.get(stage.name, 0) for stage in pipeline.stages}
    if begin is not None and manifest.forcing != begin:
        found[begin] += 1
    return found


def _show(pipeline: Pipeline, begin: str | None, chosen: list[str], nproc: int | None, *, checks: bool) -> int:
    from duoka.cluster.pipeline.execute import status_lines
    from duoka.cluster.pipeline.manifest import Manifest

    manifest = Manifest(pipeline.output)
    with tempfile.TemporaryDirectory(prefix="duoka-stages-") as draft:
        nodes = _make(pipeline, Path(draft), _generations(pipeline, manifest, begin))
        if checks:
            _check(nodes, manifest, _place(pipeline, nproc))
        shown = zip(nodes.all(), status_lines(nodes, manifest), strict=True)
    click.echo("\n".join(line for node, line in shown if not checks or node.name in chosen))
    if checks:
        click.echo(f"no fault in {len(nodes.all())} stages; nothing was started")
    return 0


def _run(pipeline: Pipeline, begin: str | None, chosen: list[str], nproc: int | None) -> int:
    from duoka.cluster.pipeline.execute import Executor
    from duoka.cluster.pipeline.manifest import Manifest
    from duoka.errors import typed
    from duoka.watch.score_card import write_card

    manifest, place = Manifest(pipeline.output), _place(pipeline, nproc)
    generations = _generations(pipeline, manifest, begin)
    with tempfile.TemporaryDirectory(prefix="duoka-stages-") as draft:
        nodes = _make(pipeline, Path(draft), generations)
        early = [node.name for node in nodes.all() if node.spec.kind == "tokenizer" and node.name in chosen]
        _check(nodes, manifest, place)
        manifest.generations, manifest.forcing = generations, begin
        manifest.order = [node.name for node in nodes.all()]
        manifest.write()
        executor = Executor(nodes, pipeline.output, manifest, place.num_processes, _say)
        code = executor.run(early)
        if code == 0 and early:
            _check(nodes, manifest, place)  # what waited for a tokenizer
        code = code or executor.run([name for name in chosen if name not in early])
        if code == 0:
            manifest.forcing = None
            manifest.write()
            folders = {node.name: pipeline.output / node.folder for node in nodes.all() if node.spec.kind == "train"}
            results = [manifest.result(node) for node in nodes.all() if node.spec.kind == "eval"]
            answers = [manifest.result(node) for node in nodes.all() if node.spec.kind == "chat"]
            card = write_card(pipeline.output, folders, results, answers)
            if card:
                click.echo("\n".join(card))
                talk = f"duoka chat {typed(pipeline.output)}"
                click.echo(f"as a page: {pipeline.output / 'card.html'}; talk to it:   {talk}")
    return code


def _make(pipeline: Pipeline, draft: Path, generations: dict[str, int]) -> Nodes:
    from duoka.cluster.pipeline.nodes import Nodes
    from duoka.errors import Faults

    nodes = Nodes(pipeline, draft.resolve(), generations)
    if nodes.faults:
        raise Faults(nodes.faults)
    return nodes


def _place(pipeline: Pipeline, nproc: int | None) -> Place:
    from duoka.cluster.launch import count_processes
    from duoka.cluster.pipeline.check import Place
    from duoka.plan.hardware import read_machine

    machine = read_machine()
    return Place(machine, count_processes(nproc, len(machine.gpus)), pipeline.output)


def _check(nodes: Nodes, manifest: Manifest, place: Place) -> None:
    from duoka.cluster.pipeline.check import check_stages
    from duoka.errors import Faults

    faults, notes = check_stages(nodes, place, manifest.is_done)
    if faults:
        raise Faults(faults)
    for note in notes:
        _say(f"note: {note}")


def _say(text: str) -> None:
    click.echo(text, err=True)
