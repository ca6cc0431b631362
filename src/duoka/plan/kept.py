"""The plan of a run that goes on with the layout it began with, whatever this day's free memory would have chosen."""

from __future__ import annotations

from dataclasses import replace

from duoka.config.schema import RunConfig
from duoka.plan.batch import spread_batch
from duoka.plan.costs import estimate_costs
from duoka.plan.kernels import choose_kernels, expected
from duoka.plan.layout import Layout
from duoka.plan.recipe import static_table
from duoka.plan.recompute import in_words
from duoka.plan.report import Plan, judge, rooms
from duoka.plan.room import VERDICTS
from duoka.plan.speed import estimate_speed
from duoka.plan.task import load_of, memory_of

_SAID = "as when the run began"


def with_layout(plan: Plan, config: RunConfig, layout: Layout) -> Plan:
    """The same run with that layout: every figure of the plan is of it, and reasons of what it changes go."""
    if layout == plan.layout:
        return plan
    task, work, cluster = plan.task, plan.work, plan.cluster
    memory = memory_of(task, layout)
    host, disk = rooms(memory, plan.machine, cluster.per_node)
    speed = estimate_speed(work, layout, cluster, load_of(task, layout))
    price = plan.costs.price_per_hour
    return replace(
        plan,
        layout=layout,
        reasons=plan.reasons | _reasons(plan.layout, layout),
        memory=memory,
        at_most_bytes=memory_of(replace(task, lengths=None), layout).peak_bytes,
        table=static_table(work, layout),
        batch=spread_batch(task.step, layout.micro, layout.dp, task.rows(layout), plan.lengths),
        verdict=max(judge(memory, plan.available_bytes), host.verdict, disk.verdict, key=VERDICTS.index),
        host=host,
        disk=disk,
        speed=speed,
        costs=estimate_costs(work, layout, cluster, speed, plan.costs.num_steps, config.checkpoint, price),
        kernels=choose_kernels(expected(config, work, layout, plan.machine)),
        smaller=(),
    )


def _reasons(chosen: Layout, kept: Layout) -> dict[str, str]:
    """Of each key in which the two differ, by its name in a config."""
    words = {
        "parallel.strategy": (chosen.name, kept.name),
        "train.precision": (chosen.precision, kept.precision),
        "train.recompute": (in_words(chosen.recompute), in_words(kept.recompute)),
        "train.micro_batch": (str(chosen.micro), str(kept.micro)),
    }
    return {key: f"{now}: {_SAID}" for key, (before, now) in words.items() if before != now}
