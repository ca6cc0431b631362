"""What stage rl does beside its steps, for a plan: answers that are drawn, and keys and values that are held for it."""

from __future__ import annotations

from duoka.config.schema import RunConfig
from duoka.plan.shape import ModelShape
from duoka.units import format_bytes, parse_amount


def value_head_parameters(config: RunConfig, shape: ModelShape) -> int:
    """Of the head that advantage gae trains beside the model: a row of the hidden size, and a bias."""
    return shape.hidden_size + 1 if config.stage.kind.draws and config.rl.row.has_values else 0


def num_judges(config: RunConfig) -> int:
    """Reward models that every rank holds beside the trained one."""
    return len(config.rl.judges) if config.stage.kind.draws else 0


def rollout_notes(config: RunConfig, shape: ModelShape, cache_bytes: int) -> tuple[str, ...]:
    """Said at a plan's end; none of another stage. `cache_bytes`: of keys and values on a rank."""
    if not config.stage.kind.draws:
        return ()
    rl, prompts = config.rl, parse_amount(config.train.global_batch).count
    values = (
        f"a value head of {value_head_parameters(config, shape):,} numbers is trained beside the model; one pass "
        "without gradients over each set of answers asks it before anything is learned",
    )
    judged = (f"{num_judges(config)} reward model, counted as large as the trained one, lies on every rank, frozen",)
    if rl.replay is not None:
        drawn: tuple[str, ...] = ()
    else:
        held = (
            f"; up to {rl.rows} rows at once hold {format_bytes(cache_bytes)} of keys and values, given back before "
            "anything is learned"
        )
        drawn = (
            f"each set of answers is drawn first: {prompts:,} prompts x {rl.samples} answers of up to "
            f"{rl.max_new_tokens:,} tokens, a pass a token, which the time of a step does not count"
            + (held if cache_bytes else ""),
        )
    return (
        *(judged if num_judges(config) else ()),
        *(values if rl.row.has_values else ()),
        *drawn,
    )
