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


def value_head_parameters(config: RunConfig, shape: ModelShape) -> int:
    """Of the head that advantage gae trains beside the model: a row of the hidden size, and a bias."""
    return shape.hidden_size + 1 if config.stage.kind.draws and config.rl.row.has_values else 0


def num_judges(config: RunConfig) -> int:
    """Reward models that every rank holds beside the trained one."""
    return len(config.rl.judges) if config.stage.kind.draws else 0


def rollout_notes(config: RunConfig, shape: ModelShape, layout: Layout) -> tuple[str, ...]:
    """Said at a plan's end; none of another stage."""
    if not config.stage.kind.draws:
        return ()
    rl, prompts = config.rl, parse_amount(config.train.global_batch).count
    values = (
        f"a value head of {value_head_parameters(config, shape):,} numbers is trained beside the model; one pass "
        "without gradients over each set of answers asks it before anything is learned",
    )
    judged = (f"{num_judges(config)} reward model, counted as large as the trained one, lies on every rank, frozen",)
    return (
        *(judged if num_judges(config) else ()),
        *(values if rl.row.has_values else ()),
        f"each set of answers is drawn first: {prompts:,} prompts x {rl.samples} answers of up to "
        f"{rl.max_new_tokens:,} tokens, a pass a token, which the time of a step does not count; up to {rl.rows} rows "
        f"at once hold {format_bytes(cache_bytes(config, shape, layout))} of keys and values, given back before "
        "anything is learned",
    )
