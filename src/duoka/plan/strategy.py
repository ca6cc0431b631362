"""How the ranks of a run share the work: as its config says, or, where that is `auto`, as the plan's table has it best.

The table is search.py's, of what the config's other keys go with. Of rows that are as fast as the fastest, within what
an estimate can tell, the simplest is taken.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from duoka.config.rules import check_rules
from duoka.config.rules_parallel import ddp_settings, sharing_settings
from duoka.config.schema import RunConfig
from duoka.plan.axes import axes_of, check_pipeline, data_ranks
from duoka.plan.batch import spread_batch
from duoka.plan.catalog import Cluster
from duoka.plan.fill_in import fill_in
from duoka.plan.layout import SHARDED, Layout, Strategy
from duoka.plan.memory import FITS
from duoka.plan.search import NOT_TRAINED, Candidate, Ranking, alone, search
from duoka.plan.shape import ASSUMED
from duoka.plan.task import Task, memory_of
from duoka.units import format_bytes, parse_amount

# Model types that tests hold to one process under tensor and pipeline axes (tests/promises/test_together.py). Others
# may be asked for, and are tried on a tiny copy then: auto begins nothing that may be refused.
TRIED_WITH_AXES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "olmo2", ASSUMED)
_KINDS: dict[Strategy, str] = {
    "ddp": "{n} processes, each with a whole model",
    "zero1": "{n} processes share optimizer state",
    "zero2": "{n} processes share gradients and optimizer state",
    "fsdp": "{n} processes share one model",
    "hsdp": "the {s} processes of a node share one model",
}

_OF_CUT_MODELS: dict[Strategy, str] = {
    "ddp": "{n} groups of {b} processes, each group with a whole model",
    "fsdp": "{w} processes share one model",
}


def choose_strategy(
    config: RunConfig, task: Task, layout: Layout, cluster: Cluster, available_bytes: int
) -> tuple[Layout, str]:
    """`layout` with a strategy, and with axes where the config names none; and why, where auto chose."""
    parallel, size, adding = config.parallel, layout.dp, layout.dp * layout.sp
    if parallel.strategy == "ddp" and adding == 1:  # as an elastic run may become: nobody to exchange gradients with
        return layout, "single: one process, and ddp is for several"
    if parallel.strategy != "auto":
        return _as_asked(config, layout, data_ranks(parallel, cluster.per_node) or 1), ""
    if layout.world_size == 1 and layout.offload == "params":
        own = replace(layout, strategy=alone(layout), shard=1)
        return own, f"{own.strategy}: one process, which gathers the weights that parallel.offload puts elsewhere"
    if layout.world_size == 1:
        return layout, "single: one process"
    if adding == 1:
        return layout, f"single: one model over {layout.world_size} processes"
    if parallel.expert > 1:
        strategy: Strategy = "zero1" if layout.pp > 1 else "fsdp"  # a stage would gather for each micro-batch
        why = f"{strategy}: {adding} processes share all but the experts, which parallel.expert does"
        return replace(layout, strategy=strategy, shard=size), why
    ranking = rank_layouts(config, task, layout, cluster, available_bytes)
    best = ranking.best(layout.axes or None)
    if best is None:
        return _least(config, task, layout, cluster, available_bytes)
    return _shared_as(layout, best.layout), _reason(config, best, ranking, task, layout, available_bytes)


def rank_layouts(config: RunConfig, task: Task, start: Layout, cluster: Cluster, available_bytes: int) -> Ranking:
    """The table of a run: what its config leaves open is filled in, what its keys rule out is left out."""
    asked = {axis: size for axis, size in axes_of(config.parallel).items() if size > 1}
    broken, device = {rule.id for rule in check_rules(config)}, task.work.device
    wishes, sharing = ddp_settings(config), sharing_settings(config) if start.world_size > 1 else []

    def refused(one: Layout) -> str | None:
        if wishes and one.strategy not in ("single", "ddp"):
            return f"{', '.join(wishes)} is for ddp only"
        if sharing and one.strategy == "single":
            return f"{', '.join(sharing)} is for strategies that share state"
        changed = _with_parallel(config, one)
        found = [rule for rule in check_rules(changed) if not rule.is_note and rule.id not in broken]
        if found:
            return found[0].message.format(c=changed)
        own = config.train.micro_batch  # as it is written; what auto takes feeds a pipeline
        micro = one.micro if own == "auto" else parse_amount(own)
        batch = spread_batch(task.step, micro, one.dp, task.rows(one), task.lengths)
        if one.pp > 1 and check_pipeline(config, one, batch.accumulation, one.world_size):
            return f"fewer micro-batches than {one.pp} stages: most of them would wait"
        return None

    def mark(one: Layout) -> str:
        if not one.is_trainable:
            return NOT_TRAINED
        own = one.axes.keys() - asked.keys()
        if not own or one.axes == asked:
            return ""
        kind, model = config.stage.kind, task.work.shape.model_type
        if (
            asked
            or "sp" in own
            or device == "cpu"
            or kind.judges
            or kind.draws
            or kind.scores
            or config.parallel.engine == "deepspeed"
            or model not in TRIED_WITH_AXES
        ):
            return "when asked for"
        return ""

    return search(
        task,
        cluster,
        start,
        available_bytes,
        train=config.train,
        asked=asked,
        refused=refused,
        mark=mark,
    )


def _with_parallel(config: RunConfig, one: Layout) -> RunConfig:
    """The config of someone who asks for this layout by its keys."""
    keys: dict[str, Any] = {
        "layout": None, "strategy": "auto" if one.strategy == "single" else one.strategy, "tensor": one.tp,
        "pipeline": one.pp, "sequence": one.sp, "shard_ranks": one.shard if one.strategy == "hsdp" else None,
    }  # fmt: skip
    return config.model_copy(update={"parallel": config.parallel.model_copy(update=keys)})


def _as_asked(config: RunConfig, layout: Layout, local_size: int) -> Layout:
    asked, size = config.parallel.strategy, layout.dp
    strategy: Strategy = "fsdp" if asked in ("zero3", "auto") else asked  # type: ignore[assignment]
    if strategy == "hsdp":
        return replace(layout, strategy=strategy, shard=min(config.parallel.shard_ranks or local_size, size))
    if strategy == "dp":  # rows go to the GPUs: there must be several
        return replace(layout, strategy=strategy, packing=False)
    return replace(layout, strategy=strategy, shard=size if strategy in SHARDED else 1)


def _shared_as(layout: Layout, best: Layout) -> Layout:
    ranks = {"dp": best.dp, "strategy": best.strategy, "shard": best.shard, "tp": best.tp, "pp": best.pp, "sp": best.sp}
    return replace(layout, **ranks)  # type: ignore[arg-type]


def _reason(
    config: RunConfig, best: Candidate, ranking: Ranking, task: Task, layout: Layout, available_bytes: int
) -> str:
    how = best.layout
    kinds = _KINDS | _OF_CUT_MODELS if how.tp * how.pp > 1 else _KINDS
    words = kinds.get(how.strategy, "one model over {w} processes")
    words = words.format(n=how.dp * how.sp, s=how.shard * how.sp, w=how.world_size, b=how.tp * how.pp)
    name = how.strategy if not how.axes or how.axes == layout.axes else how.name.replace("·", ".")
    rows = [one for one in ranking.candidates if one.layout.axes == layout.axes]
    plain = next((one for one in rows if one.layout.strategy == "ddp"), None)
    if how.strategy in ("ddp", "single") and how.axes == layout.axes:
        return f"{name}: {words}"
    if plain is not None:
        times = best.speed.tokens_per_s / plain.speed.tokens_per_s
        return f"{name}: {words}, about {times:.2g} times as fast as ddp"
    if layout.tp > 1 or layout.pp > 1:
        return f"{name}: {words}"
    if wishes := sharing_settings(config):
        return f"{name}: {words}, as {' and '.join(wishes)} {'asks' if len(wishes) == 1 else 'ask'}"
    need = memory_of(task, replace(how, strategy="ddp", dp=layout.dp, shard=1, tp=1, pp=1, sp=1)).peak_bytes
    why = f"unsharded, it would need {format_bytes(need)} in each, and {format_bytes(available_bytes)} is available"
    return f"{name}: {words}; {why}"


def _least(config: RunConfig, task: Task, layout: Layout, cluster: Cluster, available_bytes: int) -> tuple[Layout, str]:
    """Where no row is left: ddp where it fits, else what needs least of what the config's keys go with."""
    broken = {rule.id for rule in check_rules(config)}
    found: list[tuple[int, Layout]] = []
    wishes = ddp_settings(config)
    for strategy in ("ddp",) if wishes else ("ddp", "zero1", "fsdp"):
        one = replace(layout, strategy=strategy, shard=1 if strategy == "ddp" else layout.dp)  # type: ignore[arg-type]
        rules = {rule.id for rule in check_rules(_with_parallel(config, one)) if not rule.is_note}
        if rules <= broken and one.is_trainable and not (one.pp > 1 and strategy == "fsdp"):
            need = memory_of(task, fill_in(config.train, task, one, cluster, available_bytes).layout).peak_bytes
            if not wishes and strategy == "ddp" and need <= FITS * available_bytes:
                return one, f"ddp: {_KINDS['ddp'].format(n=one.dp * one.sp)}"
            found.append((need, one))
    if not found:
        return layout, f"{layout.strategy}: what other keys ask for goes with nothing else"
    need, best = min(found, key=lambda pair: pair[0])
    if wishes:
        return best, f"ddp: {', '.join(wishes)} is for ddp only; without it the model would be shared"
    words = _KINDS[best.strategy].format(n=best.dp * best.sp, s=best.shard, w=best.world_size)
    return (
        best,
        f"{best.strategy}: {words}; it needs {format_bytes(need)}, and {format_bytes(available_bytes)} is available",
    )
