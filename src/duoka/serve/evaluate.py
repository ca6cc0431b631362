"""Loss, perplexity and token accuracy of a model over a data set: every sample once, on any number of processes.

Called by `duoka eval` in each process of its world. Data is tokenized (or found in the cache) before the world meets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from duoka.config.schema import DataConfig, DataSource, ModelConfig, ParallelConfig, RunConfig, StageConfig
from duoka.errors import ConfigError
from duoka.serve.load_run import Say, Trained, agree_on_checkpoint, data_for, load_trained

if TYPE_CHECKING:
    import numpy as np

    from duoka.comm.world import World
    from duoka.data.feed.text_rows import TextRows
    from duoka.data.tokens.token_store import TokenStore
    from duoka.parallel.measure import Measured
    from duoka.plan.layout import Layout
    from duoka.plan.lengths import Lengths


@dataclass(frozen=True)
class EvalData:
    """The evaluation data: the config that says how it is read, its display name, and its tokens."""

    config: RunConfig
    label: str
    store: TokenStore | TextRows
    pad_id: int
    lengths: Lengths  # of the training data, or of the named sets
    text_bytes: np.ndarray | None = None  # of each token


@dataclass(frozen=True)
class Evaluation:
    """The answer: `measured` is global."""

    model: str
    data: str
    precision: str
    world_size: int
    measured: Measured

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "data": self.data,
            "loss": self.measured.loss,
            "perplexity": self.measured.perplexity,
            "bits_per_byte": self.measured.bits_per_byte,
            "accuracy": self.measured.accuracy,
            "num_samples": self.measured.num_samples,
            "num_targets": self.measured.num_targets,
            "precision": self.precision,
            "world_size": self.world_size,
        }

    def lines(self) -> list[str]:
        found = self.measured
        bits = "" if found.bits_per_byte is None else f"{found.bits_per_byte:.4f} bits per byte   "
        processes = "1 process" if self.world_size == 1 else f"{self.world_size} processes"
        return [
            f"{self.model} on {self.data}",
            f"  loss {found.loss:.4f}   perplexity {found.perplexity:.4g}   {bits}token accuracy {found.accuracy:.2%}",
            f"  {found.num_samples:,} samples, {found.num_targets:,} target tokens, {self.precision}, {processes}",
        ]


def read_eval_data(
    trained: Trained, names: Sequence[str], *, precision: str = "auto", say: Say, asked: DataConfig | None = None
) -> EvalData:
    """The named data sets, or without names the part that the run kept aside.

    `asked` says how a file of another tool wants its sets read; then `names` is its list. `precision` is the type that
    will compute; with auto, the run's.
    """
    from duoka.data.dataset_lengths import lengths_of
    from duoka.data.feed.answers import AnswerRows
    from duoka.data.feed.pairs import PairRows
    from duoka.data.feed.prompts import PromptRows
    from duoka.data.feed.stream_source import StreamSource
    from duoka.data.prepare import prepare_data, read_tokenizer

    sources = asked.train if asked else tuple(DataSource(name=name) for name in names or ("?",))
    model = ModelConfig(name=trained.name, template=trained.template, trust_remote_code=trained.trust_remote_code)
    config = trained.config or RunConfig(model=model, data=asked or data_for(trained, sources))
    if config.stage.kind.draws:  # data that is named has answers, and their likelihood is measured
        config = config.model_copy(update={"stage": StageConfig()})
    only = {"train": sources, "eval": 0.0, "stream": False, "streams": None}
    if asked is not None:
        # Masks and templates are the run's; where records lie and where they are cut is the file's.
        only |= {"folder": asked.folder, "max_length": asked.max_length}
    if asked is not None or names:
        config = config.model_copy(update={"data": config.data.model_copy(update=only)})
    elif trained.config is None:
        raise ConfigError(f"{trained.name} is a model, not a run: it has no evaluation data", fix="add --data NAME")
    elif not config.data.eval:
        raise ConfigError(
            f"{trained.name} kept no data aside (data.eval is 0)", fix="name what to measure on: --data NAME"
        )
    # The run's layout does not apply here: the evaluation has a world of its own.
    config = config.model_copy(update={"parallel": ParallelConfig(timeout=config.parallel.timeout)})
    if precision != "auto":
        config = config.model_copy(update={"train": config.train.model_copy(update={"precision": precision})})
    prepared = prepare_data(config, trained.config_base, trained.base, say=say)
    if isinstance(prepared.train, AnswerRows) or isinstance(prepared.eval, AnswerRows):
        what = "preference pairs" if isinstance(prepared.train, PairRows) else "labeled answers"
        raise ConfigError(
            f"{', '.join(names) or 'what it kept aside'} are {what}, and duoka eval measures answers to be learned",
            where=f"the loss of {what} is measured while a run trains, on its data.eval: duoka report RUN shows it",
            fix="name conversations: --data NAME",
        )
    pad_id = read_tokenizer(config.model, trained.config_base, trained.base).pad_id
    lengths = lengths_of(prepared, config)
    if names:
        assert not isinstance(prepared.train, StreamSource | PromptRows), "names are tokenized ahead"
        return EvalData(config, ", ".join(names), prepared.train, pad_id, lengths, prepared.text_bytes)
    if prepared.eval is None:
        raise ConfigError(f"{trained.name} has no evaluation data left", fix="name what to measure on: --data NAME")
    return EvalData(config, "the data it kept aside", prepared.eval, pad_id, lengths, prepared.text_bytes)


def choose_layout(data: EvalData, folder: Path, world_size: int, local_size: int | None = None) -> Layout:
    """The arithmetic and micro-batch that training would choose here, so that its eval lines can be compared."""
    from duoka.model.kept_bytes import read_measured_shape
    from duoka.model.row_choice import choose_rows
    from duoka.plan.catalog import local_cluster
    from duoka.plan.hardware import read_machine
    from duoka.plan.report import make_plan

    rows = choose_rows(data.config, folder)
    config = rows.applied_to(data.config)
    if world_size > 1:  # whole models side by side: nothing is learned that could be shared
        parallel = config.parallel.model_copy(update={"strategy": "ddp"})
        config = config.model_copy(update={"parallel": parallel})
    machine, local = read_machine(), local_size or world_size
    shape = rows.seen_in(read_measured_shape(folder, config))
    plan = make_plan(
        config, shape, machine, world_size, local_size=local, lengths=data.lengths,
        cluster=local_cluster(machine, world_size, local),
    )  # fmt: skip
    return plan.layout


def evaluate(trained: Trained, data: EvalData, *, base_only: bool = False) -> Evaluation | None:
    """Measure in the world that this process belongs to; the answer on rank 0, None on others."""
    from duoka.comm.world import end_world, start_world

    world = start_world(data.config.parallel)
    try:
        found = evaluate_in(world, trained, data, base_only=base_only)
    finally:
        end_world(world)
    return found if world.is_main else None


def evaluate_in(world: World, trained: Trained, data: EvalData, *, base_only: bool = False) -> Evaluation:
    """The same in an existing world; the answer on every rank."""
    trained = agree_on_checkpoint(world, trained)
    layout = world.agree(choose_layout(data, trained.base, world.size, world.local_size))
    measured = measure(trained, data, layout, world, base_only=base_only)
    label = f"{trained.name} before training" if base_only else trained.name
    return Evaluation(label, data.label, layout.precision, world.size, measured)


def measure(trained: Trained, data: EvalData, layout: Layout, world: World, *, base_only: bool = False) -> Measured:
    """This rank's part of the measurement; the answer is global and the same on all ranks."""
    import torch

    from duoka.data.feed.loader import eval_batches
    from duoka.model.build import LossModel
    from duoka.model.dtypes import BY_PRECISION
    from duoka.model.fp8 import apply_fp8
    from duoka.model.kernels import settle_sharing
    from duoka.model.row_choice import find_passes
    from duoka.parallel.measure import measure_loss
    from duoka.plan.prefixes import why_no_sharing

    passes = find_passes(data.config.model, trained.base, layout.packing)
    lm = load_trained(trained, dtype=BY_PRECISION[layout.precision], attention=passes.attention, base_only=base_only)
    if layout.precision == "fp8":  # as the run measured it
        apply_fp8(lm, again=False)
    batches = eval_batches(
        data.store, rank=world.rank, num_ranks=world.size, micro=layout.micro, packing=layout.packing,
        max_length=data.config.data.max_length, pad_id=data.pad_id,
    )  # fmt: skip
    sizes = None if data.text_bytes is None else torch.from_numpy(data.text_bytes)
    model = LossModel(lm, own_logits=passes.own_logits).to(world.device)
    model.no_sharing = why_no_sharing(data.config, layout) or passes.no_sharing
    settle_sharing(model, layout, world.device)
    measured = measure_loss(model, batches, world, layout.precision, token_bytes=sizes)
    assert measured is not None  # None is for a stop request, and none is polled here
    return measured
