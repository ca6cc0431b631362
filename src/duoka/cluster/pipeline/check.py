"""All stages before any of them trains: data, model, memory, disk, chat template, one example through each.

The fourth stage's typo is found in the first second and not in the ninth hour. What a stage cannot show before another
has run (a tokenizer that is yet to be made) is looked at when that one is done.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from duoka.cluster.pipeline.nodes import Node, Nodes
from duoka.config.schema import ModelConfig, RunConfig
from duoka.data.dataset_lengths import find_lengths
from duoka.data.read.dataset_info import ResolvedSet, first_record
from duoka.data.read.example import BadRecord
from duoka.data.read.record_kinds import read_record
from duoka.data.read.registry import check_data, find_sets
from duoka.data.tokens.encode import encode_example
from duoka.data.tokens.tokenizer import ChatTokenizer, load_tokenizer
from duoka.errors import ConfigError, DuokaError, Fault
from duoka.hub.models import check_model, model_folder
from duoka.plan.catalog import local_cluster
from duoka.plan.choose import check_machine, check_packages
from duoka.plan.hardware import Machine
from duoka.plan.offload import with_disk
from duoka.plan.report import make_plan
from duoka.plan.shape import read_facts, read_shape
from duoka.runs.kept import with_kept
from duoka.tasks.check import check_tasks
from duoka.units import format_bytes


@dataclass(frozen=True)
class Place:
    """Where the stages will run."""

    machine: Machine
    num_processes: int
    output: Path


@dataclass(frozen=True)
class Looked:
    """What a look at a stage found; `waits_for` names the stage without which more cannot be seen."""

    faults: list[Fault]
    disk_bytes: int = 0
    waits_for: str = ""


def check_stages(nodes: Nodes, place: Place, is_done: Callable[[Node], bool]) -> tuple[list[Fault], list[str]]:
    """All faults of all stages, each at its line; and what could not be looked at yet."""
    faults, notes, disk_bytes = list[Fault](), list[str](), 0
    for node in nodes.all():
        if node.loaded is None or is_done(node):
            continue
        found = _look(nodes, node, place, is_done)
        faults += [nodes.pipeline.place(fault, node.spec) for fault in found.faults]
        disk_bytes += found.disk_bytes
        if found.waits_for:
            notes.append(f"{node.name}: memory, disk and template are checked when {found.waits_for} is made")
    free = shutil.disk_usage(next(one for one in (place.output, *place.output.absolute().parents) if one.exists())).free
    if disk_bytes > free:
        what = f"the stages will write about {format_bytes(disk_bytes)}, and {format_bytes(free)} are free"
        fix = "make room, set output: elsewhere, or keep fewer checkpoints"
        faults.append(Fault(f"{what} where {place.output} is", fix=fix))
    return faults, notes


def _look(nodes: Nodes, node: Node, place: Place, is_done: Callable[[Node], bool]) -> Looked:
    assert node.loaded is not None
    config, base = node.loaded.config, node.loaded.base
    faults = [*check_data(config, base), *check_tasks(config, base), *check_packages(config)]
    faults += check_machine(config, place.machine, place.num_processes, place.num_processes)
    first = _first_model(nodes, node)
    tokenizer_stage = nodes.by_name[first.name].spec.references.get(("model", "tokenizer"))
    model, first_base = _model_of(nodes, first, place)
    if tokenizer_stage and not is_done(nodes.by_name[tokenizer_stage]):
        return Looked(faults, waits_for=tokenizer_stage)
    assert first.loaded is not None
    faults += [] if first is not node else check_model(config.model_copy(update={"model": model}), base)
    if faults:
        return Looked(faults)
    try:
        folder = model_folder(model, first_base)
        faults += _check_examples(config, base, load_tokenizer(folder, config.model.template))
        machine = with_disk(place.machine, config.parallel.offloads, place.output)
        # What was not measured yet is, when its stage begins.
        shape = with_kept(read_shape(folder), read_facts(folder), config, lambda *_: None)
        plan = make_plan(
            config, shape, machine, place.num_processes, local_size=place.num_processes,
            cluster=local_cluster(place.machine, place.num_processes, place.num_processes),
            lengths=find_lengths(config, base),
        )  # fmt: skip
    except ConfigError as error:
        return Looked([*faults, Fault(error.what, fix=error.fix or "")])
    refusal: DuokaError | None = plan.refusal()
    if refusal is not None:
        faults.append(Fault(refusal.what, fix="\n".join(filter(None, [refusal.where, refusal.fix]))))
    return Looked(faults, plan.costs.disk_bytes or 0)


def _first_model(nodes: Nodes, node: Node) -> Node:
    """The stage whose model this one's is made of, through all that lie between."""
    here = node
    while here.spec.source is not None and here.spec.source in nodes.by_name:
        here = nodes.by_name[here.spec.source]
        if here.spec.kind == "export":
            here = nodes.by_name[here.spec.of[0]]
    return here


def _model_of(nodes: Nodes, first: Node, place: Place) -> tuple[ModelConfig, Path]:
    """The first stage's model; its tokenizer, when a stage makes it, in the folder that it is really in."""
    assert first.loaded is not None
    model = first.loaded.config.model
    stage = first.spec.references.get(("model", "tokenizer"))
    if stage is not None:
        model = model.model_copy(update={"tokenizer": str((place.output / nodes.by_name[stage].folder).absolute())})
    return model, first.loaded.base


def _check_examples(config: RunConfig, base: Path, tokenizer: ChatTokenizer) -> list[Fault]:
    """The first record of each set, as training will see it."""
    return [fault for found in find_sets(config, base) for fault in _check_example(found, config, tokenizer)]


def _check_example(found: ResolvedSet, config: RunConfig, tokenizer: ChatTokenizer) -> list[Fault]:
    record, _ = first_record(found.files[0])
    if record is None:
        return []
    try:
        encode_example(read_record(record.value, found.form), tokenizer, targets=config.data.targets)
    except BadRecord as error:
        what = f"the first record of {found.name} cannot be learned: {error.rule}"
        return [Fault(what, key=f"data.{found.split}", fix=error.fix)]
    return []
