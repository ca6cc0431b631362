"""From a config to the numbers of a run, and the banner that says them before the first step."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from duoka import __version__
from duoka.config.derive import rules_kept
from duoka.config.rates import batch_factor, warmup_steps
from duoka.config.schema import LoraConfig, RunConfig
from duoka.errors import ConfigError, typed
from duoka.optim.schedule import learning_rate, lost_peak, tokens_per_step
from duoka.plan.heap import describe_allocator
from duoka.plan.kept import with_layout
from duoka.plan.layout import Layout
from duoka.plan.shortfall import plan_with_less
from duoka.runs.events import global_log
from duoka.runs.manifest import read_manifest
from duoka.units import Every, format_count, parse_amount, parse_every

if TYPE_CHECKING:
    from duoka.data.build_feed import Feed
    from duoka.data.prepare import PreparedData
    from duoka.plan.batch import Horizon
    from duoka.plan.report import Plan
    from duoka.runs.folder import RunFolder
    from duoka.store.state import TrainState

MANY_PASSES = 4  # from here on, repeated text teaches much less than new text


@dataclass(frozen=True)
class RunSettings:
    """What the loop needs to know about a run, computed once."""

    config: RunConfig
    num_epochs: float
    steps_per_epoch: int | None  # None: a stream, whose length is not known before it is read
    total_steps: int
    save_every: Every
    eval_every: Every
    check_every: int
    tokens_per_step: float  # on average

    def notes(self) -> list[str]:
        """What a user should know about the length of the run."""
        optim, notes = self.config.optim, list[str]()
        passes = self.total_steps / self.steps_per_epoch if self.steps_per_epoch else 0.0
        if self.config.train.tokens is not None and passes > MANY_PASSES:
            notes.append(
                f"train.tokens is {self.config.train.tokens}, and the text is learned {passes:.3g} times over for it: "
                "more text, or fewer tokens, would teach more"
            )
        if (peak := lost_peak(optim, self.total_steps, self.tokens_per_step)) is not None:
            warm = warmup_steps(optim, self.total_steps, self.tokens_per_step)
            notes.append(
                f"the warm-up takes {warm:,} of {self.total_steps:,} steps, and schedule wsd falls in the last "
                f"{optim.decay:.3g} of them: the rate turns at {peak * self.batch_factor:.3g} and never reaches "
                "optim.lr; a shorter warmup or decay would"
            )
        return notes

    def rate_of(self, step: int) -> float:
        """The learning rate of an optimizer step, the first of which is 1."""
        rate = learning_rate(self.config.optim, step, self.total_steps, self.tokens_per_step)
        return rate * self.batch_factor

    def warmup_sentence(self) -> str:
        """As in "warm-up 0.03", "warm-up 2M tokens (977 steps)"."""
        warm = self.config.optim.warmup
        if isinstance(warm, str):
            return f"warm-up {warm} ({warmup_steps(self.config.optim, self.total_steps, self.tokens_per_step):,} steps)"
        return f"warm-up {warm:g}" if warm else "no warm-up"

    @property
    def batch_factor(self) -> float:
        return batch_factor(self.config.optim, parse_amount(self.config.train.global_batch))


def build_settings(
    config: RunConfig, feed: Feed, state: TrainState, mean_length: float, horizon: Horizon | None = None
) -> RunSettings:
    """The numbers of a run that stands at `state`; refuses to end before the steps that it has done.

    Samples have `mean_length` tokens on average; `horizon` is what train.tokens comes to.
    """
    per_epoch = feed.steps_per_epoch
    ends = [steps for steps in (config.train.max_steps, horizon.steps if horizon else None) if steps]
    done = state.epoch * per_epoch + state.index if per_epoch else 0
    if config.train.epochs is None:
        # As often as it takes, counted from the cursor.
        num_epochs = math.ceil((min(ends) - state.step + done) / per_epoch) if ends and per_epoch else math.inf
    else:
        num_epochs = float(config.train.epochs)
        all_steps = feed.num_steps(num_epochs)
        if all_steps is not None:
            # Counted from the cursor: with an allowed change of the batch, earlier epochs had another number of steps.
            # More steps than the epochs have are not made up: the data is seen as often as asked.
            ends.append(state.step + all_steps - done)
    if not ends:
        raise ConfigError("nothing says when the run ends", fix="set train.max_steps")
    total_steps = min(ends)
    if total_steps < state.step:
        raise ConfigError(
            f"the run has done {state.step:,} steps, and train.epochs, max_steps and tokens end it after "
            f"{total_steps:,}",
            fix="write more of them, or go on from an earlier checkpoint:   checkpoint.resume=STEP",
        )
    return RunSettings(
        config=config,
        num_epochs=num_epochs,
        steps_per_epoch=per_epoch,
        total_steps=total_steps,
        save_every=parse_every(config.checkpoint.every),
        eval_every=parse_every(config.train.eval_every),
        check_every=config.parallel.check_replicas,
        tokens_per_step=tokens_per_step(parse_amount(config.train.global_batch), mean_length),
    )


def describe_rest(found: Path, settings: RunSettings, feed: Feed, state: TrainState) -> str:
    """Where a run goes on and what is left of it: the end of the banner's first line."""
    per_epoch = settings.steps_per_epoch
    place = state.epoch * (per_epoch or 0) + state.index
    steps = settings.total_steps - state.step
    samples = feed.num_samples_between(place, place + steps)
    ahead = f"{steps:,} steps and {samples:,} samples left" if steps else "nothing left to learn"
    if not state.index or not steps or per_epoch is None:
        return f"going on from {found.name}, {ahead}"
    of_epoch = feed.num_samples_between(place, min(place + steps, (state.epoch + 1) * per_epoch))
    return f"going on from {found.name}, {ahead}, {of_epoch:,} of them in epoch {state.epoch + 1}"


def keep_choices(plan: Plan, config: RunConfig, found: Path | None, short: tuple[int, int | None] | None) -> Plan:
    """A resumed run keeps what `auto` chose when it began: free memory differs from day to day, results must not.

    `short`: what a micro-batch may hold at most since memory was short in this run, and with how many tokens it was.
    """
    if found is not None:
        plan = _as_before(plan, config, found)
    micro = plan.layout.micro
    if short is None or config.train.micro_batch != "auto" or micro.count <= short[0]:
        return plan
    return plan_with_less(plan, *short)


def _as_before(plan: Plan, config: RunConfig, found: Path) -> Plan:
    before, train = Layout.from_json(read_manifest(found).layout), config.train
    kept: dict[str, Any] = {}
    if train.precision == "auto":
        kept["precision"] = before.precision
    if (before.dp, before.axes) == (plan.layout.dp, plan.layout.axes):
        kept |= {"micro": before.micro} if train.micro_batch == "auto" else {}
        kept |= {"recompute": before.recompute} if train.recompute == "auto" else {}
        if config.parallel.strategy == "auto" and plan.layout.dp > 1:
            kept |= {"strategy": before.strategy, "shard": before.shard}
    return with_layout(plan, config, replace(plan.layout, **kept))


def banner(
    settings: RunSettings,
    plan: Plan,
    prepared: PreparedData,
    run: RunFolder,
    parameters: tuple[int, int],
    optimizer: str,
    resumed: str,
) -> list[str]:
    """The run in eight lines."""
    config, layout = settings.config, plan.layout
    total, trainable = parameters
    kind = _describe_lora(config.lora) if config.lora else "full fine-tuning"
    kind = "some layers only" if config.train_only else kind
    kind = "from nothing" if config.model.depth else kind
    others = [name for name in config.log.to if name != "tensorboard"]
    board = "tensorboard" in config.log.to
    watch = f"tensorboard --logdir {typed(_shown(run.tensorboard))}" if board else _shown(global_log(run))
    watch += f"; {', '.join(others)}" if others else ""
    engine = f", by {plan.reasons['parallel.engine']}" if "parallel.engine" in plan.reasons else ""
    recompute = f"; recompute {plan.reasons.get('train.recompute', layout.recompute)}"
    heap = f"; heap {name}" if (name := describe_allocator()) else ""
    per_epoch = f" ({settings.steps_per_epoch:,} an epoch)" if settings.steps_per_epoch else ""
    rates = f"{optimizer}, {config.optim.schedule}, {settings.warmup_sentence()}"
    return [
        f"duoka {__version__}  {config.stage.name}  {_shown(run.path)}{resumed}",
        f"  model       {config.model.title}: {format_count(total)} parameters, "
        f"{format_count(trainable)} trained ({kind})",
        *_from_depth(config),
        f"  data        {prepared.report.sentence()}",
        f"  batch       {plan.batch.sentence()}{_why(plan, 'train.micro_batch')}",
        f"  layout      {plan.reasons.get('parallel.strategy', layout.name)}{engine}; "
        f"{plan.reasons.get('train.precision', layout.precision)}"
        + (f"; sequence cut in {plan.reasons['parallel.sequence']}" if layout.sp > 1 else "")
        + (f"; offload {offloads}" if (offloads := str(config.parallel.offloads)) else ""),
        f"  memory      {plan.memory_sentence()}{recompute}{heap}",
        f"  steps       {settings.total_steps:,}{per_epoch}, {rates}; "
        f"saved every {settings.save_every}, newest {config.checkpoint.keep} kept",
        *([f"  tokens      {plan.horizon.sentence()}"] if plan.horizon else []),
        f"  watch       {watch}",
    ]


def _describe_lora(lora: LoraConfig) -> str:
    from_where = f", going on from {lora.adapter}" if lora.adapter else ""
    return f"LoRA rank {lora.rank}{from_where}" + (f", above {' and '.join(lora.merge)}" if lora.merge else "")


_SHOWN_OF_DEPTH = {
    "model.width": "width {}", "model.head_dim": "heads of {}", "model.kv_heads": "{} heads of keys and values",
    "model.mlp_width": "MLP {}", "data.max_length": "rows of {}", "train.global_batch": "batch {}",
    "train.tokens": "{} tokens", "optim.name": "{}", "optim.lr": "lr {}", "optim.embedding_lr": "embedding {}",
    "optim.head_lr": "head {}", "optim.adamw_lr": "norms {}", "optim.schedule": "{}",
}  # fmt: skip


def _from_depth(config: RunConfig) -> list[str]:
    """What follows from the depth, and what was written in its place."""
    own, other = rules_kept(config)
    lines = []
    for head, found in (("from depth", own), ("written", other)):
        words = [text.format(found[key]) for key, text in _SHOWN_OF_DEPTH.items() if key in found]
        lines += [f"  {head:<10}  {', '.join(words)}"] if words else []
    return lines


def _why(plan: Plan, key: str) -> str:
    """The reason of a choice whose value stands in the same line."""
    reason = plan.reasons.get(key, "")
    return f" (auto: {reason.split(': ', 1)[-1]})" if reason else ""


def _shown(path: Path) -> str:
    """A path as short as it can be typed from here."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
