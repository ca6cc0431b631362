"""The blocks of the YAML that say how a run is carried out: layout, checkpoints, faults, machines, logs.

Nearly all of it changes speed, memory and safety, never results; what does is said at the key.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, create_model

from duoka.config.fields import (
    LayoutText,
    Number,
    Often,
    Patience,
    SampleChoice,
    Seconds,
    Section,
    Whole,
    step_as_text,
)
from duoka.config.hosts import HostText
from duoka.config.trackers import TrackerName
from duoka.units import parse_seconds

AlertKind = Literal["done", "failed", "stalled", "spike"]
# Each is an engine of parallel/apply.py; a layout has one of them.
Strategy = Literal["single", "dp", "ddp", "zero1", "zero2", "fsdp", "hsdp"]

# In which order a pipeline's ranks compute (plan/pipeline.py).
Schedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"]
SPLIT: tuple[Schedule, ...] = ("zero-bubble", "zbv")
# Their ranks have gradients of weights when the last backward pass is over, or of some of their stages only.
ADDS_ONCE: tuple[Schedule, ...] = ("interleaved", *SPLIT)


class OffloadConfig(Section):
    """What lies elsewhere than where the model computes. `optimizer` and `params` alone are short for host memory."""

    optimizer: Literal["none", "host", "disk"] = Field(
        "none", description="AdamW's moments: in host memory, or in a file that is read ahead and written behind."
    )
    params: Literal["none", "host", "disk"] = Field(
        "none", description="Weights and gradients of a sharded strategy; the optimizer's state goes along."
    )
    activations: Literal["none", "host", "disk"] = Field(
        "none",
        description="What layers keep for their backward passes: in host memory (of a GPU's rank), or in files.",
    )
    folder: str | None = Field(
        None, description="Where files of offload: disk lie; a fast local disk. Left out: the run folder."
    )

    share: float = Field(
        1.0, gt=0, le=1,
        description="How much of the optimizer's state is moved; the rest stays where the model computes (Twin-Flow).",
    )  # fmt: skip

    @property
    def uses_disk(self) -> bool:
        return "disk" in (self.optimizer, self.params, self.activations)

    @property
    def moves_anything(self) -> bool:
        """Of weights and their state."""
        return (self.optimizer, self.params) != ("none", "none")

    def __str__(self) -> str:
        return ", ".join(f"{name}: {value}" for name, value in self.model_dump(exclude_defaults=True).items())


_SHORT_OFFLOADS: dict[str, dict[str, str]] = {
    "none": {},
    "optimizer": {"optimizer": "host"},
    "params": {"params": "host"},
}


def _shortest_offload(value: Any) -> Any:
    """A block that says what a word says is that word: both are one setting, and compare as one."""
    if isinstance(value, OffloadConfig):
        said = value.model_dump(exclude_defaults=True)
        return next((word for word, block in _SHORT_OFFLOADS.items() if block == said), value)
    return value


class CompressConfig(Section):
    """How weights and gradients travel. A word alone is short for gradients."""

    weights: Literal["none", "int8", "int4"] = Field(
        "none", description="Sharded strategies: layers compute with weights that were gathered in so many bits."
    )
    gradients: Literal["none", "bf16", "fp16", "powersgd", "int8", "int4"] = Field(
        "none",
        description="int8 and int4 are for sharded strategies, and add inside each node first; fp16 and powersgd "
        "are for ddp.",
    )

    @property
    def weight_bits(self) -> int:
        """0: as they are."""
        return _BITS.get(self.weights, 0)

    @property
    def gradient_bits(self) -> int:
        """Of blocks that share a scale; 0: of none."""
        return _BITS.get(self.gradients, 0)

    @property
    def changes_anything(self) -> bool:
        return (self.weights, self.gradients) != ("none", "none")

    def __str__(self) -> str:
        return ", ".join(f"{name}: {value}" for name, value in self.model_dump().items() if value != "none")


_BITS = {"int8": 8, "int4": 4}
_SHORT_COMPRESS = ("none", "bf16", "fp16", "powersgd")


def _shortest_compress(value: Any) -> Any:
    if isinstance(value, CompressConfig) and value.weights == "none" and value.gradients in _SHORT_COMPRESS:
        return value.gradients
    return value


class DeepSpeedConfig(Section):
    """DeepSpeed's own switches, by its own names: they change its speed and memory, no result."""

    reduce_bucket_size: Annotated[Whole, Field(ge=1)] = Field(
        50_000_000, description="Elements of gradients that are exchanged at once."
    )
    allgather_bucket_size: Annotated[Whole, Field(ge=2, multiple_of=2)] = Field(
        500_000_000, description="Stages 1 and 2: elements of new weights that are gathered at once, an even number."
    )
    stage3_prefetch_bucket_size: Annotated[Whole, Field(ge=0)] = Field(
        50_000_000, description="Stage 3: elements of weights that are gathered ahead of their use; from a disk none."
    )
    stage3_param_persistence_threshold: Annotated[Whole, Field(ge=0)] = Field(
        100_000, description="Stage 3: smaller parameters stay gathered on every rank."
    )
    stage3_max_live_parameters: Annotated[Whole, Field(ge=0)] = Field(
        100_000_000, description="Stage 3: so many gathered elements may stay after their use; 0, as from a disk: none."
    )
    stage3_max_reuse_distance: Annotated[Whole, Field(ge=0)] = Field(
        100_000_000,
        description="Stage 3: weights that are used again within so many elements stay gathered; from a disk none.",
    )
    sub_group_size: Annotated[Whole, Field(ge=1)] = Field(
        1_000_000_000, description="Stage 3: elements that the optimizer updates at once; 20 million of a disk's."
    )
    overlap_comm: bool = Field(
        False, description="Exchange gradients beside the backward pass; on GPUs faster, with a second bucket."
    )


class ParallelConfig(Section):
    """How processes share the work. Changes speed and memory, never results."""

    engine: Literal["native", "deepspeed"] = Field(
        "native",
        description="Who carries the strategy out: duoka on torch's own parts, or DeepSpeed, as ZeRO stage 0 (ddp), 1 "
        "(zero1), 2 (zero2) or 3 (zero3, fsdp).",
    )
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()

    layout: LayoutText | None = Field(
        None,
        description="The layout in one word, in place of strategy, tensor, pipeline, sequence and shard_ranks; with a "
        "number of data ranks it takes that many processes and no others.",
    )
    strategy: Literal["auto", Strategy, "zero3"] = Field(
        "auto", description="How ranks share the work; fsdp is another name for zero3."
    )
    shard_ranks: Annotated[Whole, Field(ge=1)] | None = Field(
        None, description="HSDP: how many ranks share one copy of the model; left out: those of a node."
    )
    tensor: Annotated[Whole, Field(ge=1)] = Field(
        1, description="Tensor parallelism: how many ranks share each matrix of a layer."
    )
    pipeline: Annotated[Whole, Field(ge=1)] = Field(
        1, description="Pipeline parallelism: how many stages the stack of layers is cut into."
    )
    schedule: Schedule = Field(
        "1f1b",
        description="Pipeline: all forward passes first (gpipe), or one backward after each as soon as it can be "
        "(1f1b), which keeps fewer micro-batches; interleaved: several stages on each rank, and a shorter wait; "
        "zero-bubble: as 1f1b, with weights' gradients computed while a rank would wait; zbv: so too, with two stages "
        "on each rank, the first and the last on the first.",
    )
    virtual_stages: Annotated[Whole, Field(ge=2)] | None = Field(
        None, description="Pipeline: how many stages each rank has where the schedule is interleaved; left out: 2."
    )
    sequence: Annotated[Whole, Field(ge=1)] = Field(
        1, description="Sequence (context) parallelism: how many ranks share each sequence."
    )
    expert: Annotated[Whole, Field(ge=1)] = Field(
        1,
        description="Expert parallelism: how many of the ranks that add gradients, or share layers (tensor), share the "
        "experts of a mixture; tokens travel to the ranks that have theirs. It takes no ranks more.",
    )
    reshard: bool | Literal["node"] = Field(
        True,
        description="FSDP, HSDP: give gathered weights back after each layer's forward pass, gather them again. node: "
        "the processes of a node share a copy of them until the backward pass, which gathers inside the node.",
    )
    offload: Annotated[Literal["none", "optimizer", "params"] | OffloadConfig, AfterValidator(_shortest_offload)] = (
        Field(
            "none",
            description="What lies in host memory: the optimizer's state, or with it weights and gradients too; "
            "a block says it part by part, and may put the optimizer's state on a disk.",
        )
    )
    compress: Annotated[
        Literal["none", "bf16", "fp16", "powersgd"] | CompressConfig, AfterValidator(_shortest_compress)
    ] = Field(
        "none",
        description="How gradients travel, and in a block weights too; all but none lose a little, and so change "
        "results. What powersgd left out so far is part of each checkpoint.",
    )
    backend: Literal["auto", "gloo", "nccl"] = Field("auto", description="auto: nccl with CUDA, else gloo.")
    timeout: Seconds = Field("10min", description="A collective that takes longer ends the run.")
    find_unused_parameters: bool = Field(
        False,
        description="DDP: look for parameters that got no gradient. Micro-batches of a "
        "step add up beside its buckets then, which takes the memory of the gradients twice.",
    )
    static_graph: bool = Field(False, description="DDP: every step uses the same parameters; it learns which.")
    bucket_mb: Annotated[Number, Field(gt=0.0)] = Field(25.0, description="DDP: MiB of gradients exchanged at once.")
    bucket_view: bool = Field(True, description="DDP: gradients are views of the communication buckets.")
    check_replicas: Annotated[Whole, Field(ge=0)] = Field(
        50, description="Compare a checksum of all trained tensors across ranks every so many steps; 0: never."
    )

    @property
    def offloads(self) -> OffloadConfig:
        """`offload` in its long form."""
        if isinstance(self.offload, OffloadConfig):
            return self.offload
        return OffloadConfig(**_SHORT_OFFLOADS[self.offload])

    @property
    def compression(self) -> CompressConfig:
        """`compress` in its long form."""
        return self.compress if isinstance(self.compress, CompressConfig) else CompressConfig(gradients=self.compress)

    @property
    def may_be_unused(self) -> bool:
        """Trained parameters may have no part in a loss: DDP finds by itself which."""
        return self.find_unused_parameters or self.static_graph


# A class body cannot say `async`, which is Python's word; people's YAML should.
_WithAsync = create_model(
    "_WithAsync",
    __base__=Section,
    **{
        "async": (
            bool,
            Field(True, description="Written while training goes on; false: training waits for the disk."),
        )
    },  # type: ignore[call-overload]
)


class CheckpointConfig(_WithAsync):
    """What is saved on the way, and where a run goes on."""

    every: Often = Field(50, description='How often to save: steps, "10min" or "1 epoch". The end is always saved.')
    keep: Annotated[Whole, Field(ge=1)] = Field(2, description="How many of the newest checkpoints stay.")
    keep_every: Annotated[Whole, Field(ge=1)] | None = Field(
        None, description="Beside the newest, those of every so many steps stay for good."
    )
    keep_best: bool = Field(
        False, description="The step with the best evaluation (best_by) is saved, and stays until a better one."
    )
    best_by: str = Field(
        "loss", description="What the best is measured by: the evaluation loss, or a task of train.eval_tasks."
    )
    resume: Annotated[str, BeforeValidator(step_as_text)] = Field(
        "auto", description="auto: go on from the newest valid one; never; or a checkpoint's folder or step, or a run."
    )
    allow_changes: tuple[str, ...] = Field(
        (), description="Keys that may differ from the run's own when it goes on, though results change with them."
    )
    on_error: Literal["stop", "wait", "skip"] = Field(
        "stop", description="When a checkpoint cannot be written: end the run, wait until it can, or train on without."
    )

    @property
    def is_async(self) -> bool:
        return bool(getattr(self, "async"))


class FaultsConfig(Section):
    """What to do when something goes wrong on the way (docs/faults.md)."""

    hang_after: Patience = Field(
        "auto", description="Silence of all ranks that ends a run as hanging; auto: 5min, or 10 times the slowest step."
    )
    stop_within: Patience = Field(
        "auto",
        description="Time from a request to stop (SIGTERM, Ctrl-C) until ranks are killed; auto: as long as they move, "
        "and 1min of silence, or 3 times the slowest part of a step or save.",
    )
    nonfinite: Literal["stop", "skip", "rollback"] = Field(
        "stop",
        description="NaN or Inf in loss or gradients: stop, leave the batch out, or go back to the newest checkpoint, "
        "try again, and leave it out if it happens again. The weights are never touched.",
    )

    @property
    def patience_s(self) -> float | None:
        """`hang_after` in seconds; None: auto."""
        return _patience_s(self.hang_after)

    @property
    def stop_within_s(self) -> float | None:
        """`stop_within` in seconds; None: auto."""
        return _patience_s(self.stop_within)


def _patience_s(value: float | str) -> float | None:
    if value == "auto":
        return None
    return math.inf if value == "never" else parse_seconds(value)


class AlertConfig(Section):
    """Who is told what becomes of a run: each is tried once, from a process of its own, and no step waits for it."""

    command: str = Field(
        "",
        description="A shell command, told what happened by DUOKA_ALERT, DUOKA_RUN and DUOKA_TEXT; ended after 30 s.",
    )
    webhook: str = Field("", description="An http or https address that gets a POST with JSON; given up after 30 s.")
    events: tuple[AlertKind, ...] = Field(
        ("done", "failed", "stalled", "spike"), description="What is told: the end, a silence, a loss that jumps."
    )

    @property
    def is_on(self) -> bool:
        return bool((self.command or self.webhook) and self.events)


class ClusterConfig(Section):
    """Machines that one command starts (docs/cluster.md)."""

    hosts: tuple[HostText, ...] = Field(
        (), description="Machines that take part, by the names that ssh knows; left out: this one alone."
    )


class LogConfig(Section):
    """What is printed, and who else gets the numbers."""

    every: Annotated[Whole, Field(ge=1)] = Field(10, description="Print a line every so many steps (all are recorded).")
    samples: SampleChoice = Field(
        0,
        description="Texts that the model continues after each evaluation, by the likeliest tokens: beginnings, or how "
        "many of the evaluation data's (stage pretrain).",
    )
    to: tuple[TrackerName, ...] = Field(
        ("tensorboard",),
        description="Trackers beside the event log; each reads its own variables, such as WANDB_MODE or SWANLAB_MODE.",
    )
    alert: AlertConfig = AlertConfig()
