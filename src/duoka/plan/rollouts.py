"""What stage rl does beside its steps, for a plan: answers that are drawn, and keys and values that are held for it."""

from __future__ import annotations

from duoka.config.schema import RunConfig
from duoka.plan.layout import Layout
from duoka.plan.shape import ModelShape
from duoka.units import format_bytes, parse_amount


def cache_bytes(config: RunConfig, shape: ModelShape, layout: Layout) -> int:
    """The most that keys and values take on a rank while it draws: they are gone when it learns."""
    answers = parse_amount(config.train.global_batch).count * config.rl.samples
    rows = min(config.rl.rows, -(-answers // layout.dp))
    width = 4 if layout.precision == "fp32" else 2
    return rows * config.data.max_length * shape.num_layers * 2 * shape.num_kv_heads * shape.head_dim * width


def rollout_notes(config: RunConfig, shape: ModelShape, layout: Layout) -> tuple[str, ...]:
    """Said at a plan's end; none of another stage."""
    if not config.stage.kind.draws:
        return ()
    rl, prompts = config.rl, parse_amount(config.train.global_batch).count
    return (
        f"each set of answers is drawn first: {prompts:,} prompts x {rl.samples} answers of up to "
        f"{rl.max_new_tokens:,} tokens, a pass a token, which the time of a step does not count; up to {rl.rows} rows "
        f"at once hold {format_bytes(cache_bytes(config, shape, layout))} of keys and values, given back before "
        "anything is learned",
    )
