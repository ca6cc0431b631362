"""A plan that memory has proved wrong: the same run with a smaller micro-batch, and a range that holds what was seen.

Asked by train when an allocation fails, and at the start of a run in which one failed before.
"""

from __future__ import annotations

from dataclasses import replace

from duoka.config.schema import RunConfig
from duoka.plan.batch import spread_batch
from duoka.plan.memory import estimate_memory
from duoka.plan.report import Plan, judge
from duoka.units import Amount, format_bytes


def plan_with_less(plan: Plan, config: RunConfig, most_tokens: int, ran_out_at: int | None = None) -> Plan:
    """At most `most_tokens` at once, since `ran_out_at` tokens did not fit into what the plan took for available."""
    micro = Amount(most_tokens, "tokens")
    layout = replace(plan.layout, micro=micro)
    batch = spread_batch(config.train, micro, layout.dp, config.data.max_length, plan.task.length)

    def peak_bytes(tokens: int) -> int:
        return estimate_memory(plan.work, layout, tokens).peak_bytes

    memory = estimate_memory(
        plan.work, layout, batch.tokens_per_micro_batch, accumulates=batch.accumulation > 1,
        accumulation=batch.accumulation,
    )  # fmt: skip
    warnings = plan.warnings
    if ran_out_at is not None:
        least, planned = peak_bytes(1), peak_bytes(ran_out_at)
        # What does not grow with tokens is counted exactly; the rest took at least as much as there was.
        factor = max(1.0, (plan.available_bytes - least) / max(1, planned - least))
        seen = least + round(factor * (peak_bytes(batch.tokens_per_micro_batch) - least))
        memory = replace(memory, high_bytes=max(memory.high_bytes, seen))
        warnings += (
            f"memory ran out with {ran_out_at:,} tokens at once, for which {format_bytes(planned)} were planned and "
            f"{format_bytes(plan.available_bytes)} were there: at most {most_tokens:,} now",
        )
    return replace(
        plan, layout=layout, batch=batch, memory=memory, warnings=warnings,
        verdict=judge(memory, plan.available_bytes),
        reasons={**plan.reasons, "train.micro_batch": f"{most_tokens:,} tokens: memory was short with more"},
    )  # fmt: skip
