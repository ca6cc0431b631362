"""Contradictions in what is trained of which model: adapters, chosen layers, revisions.

A part of the table in rules.py, which evaluates it.
"""

from __future__ import annotations

from duoka.config.adapters import named_adapters
from duoka.config.derive import is_outside_what_was_tried
from duoka.config.paths import given_path
from duoka.config.rule import Rule
from duoka.config.schema import RunConfig

NO_PACKER = "model.quantization packs the base by bitsandbytes, which is not installed here"
GET_PACKER = "install it: pip install 'duoka[quant]'"


def _is_path(name: str) -> bool:
    return name.startswith(("/", "./", "../", "~"))


def _lora_scale_is_odd(c: RunConfig) -> bool:
    return c.lora is not None and not 1e-3 <= c.lora.alpha / c.lora.rank <= 1e3


def _same_place(one: str, other: str) -> bool:
    """Whether a path is a run's folder, or lies in it."""
    first, second = given_path(one).absolute(), given_path(other).absolute()
    return first == second or second in first.parents


def _adapters(c: RunConfig) -> list[str]:
    return [name for _, name in named_adapters(c.lora)]


def _lora_names(c: RunConfig) -> tuple[str, ...]:
    return c.lora.targets if c.lora is not None and isinstance(c.lora.targets, tuple) else ()


_NO_RATE = ("lamb", "lars", "adafactor")
_OF_NEW_MODELS = ("width", "head_dim", "kv_heads", "mlp_width", "context")


def _sizes_of_new_models(c: RunConfig) -> bool:
    return any(getattr(c.model, name) is not None for name in _OF_NEW_MODELS)


def _heads_do_not_fit(c: RunConfig) -> bool:
    """One of two: the width in heads, and these in groups that share keys and values."""
    width, head, shared = c.model.width, c.model.head_dim, c.model.kv_heads
    if c.model.depth is None or not (width and head and shared):
        return False
    return bool(width % head or (width // head) % shared)


NEW_MODEL_RULES: tuple[Rule, ...] = (
    Rule(
        "model-of-no-name",
        ("model.name", "model"),
        lambda c: not c.model.name and c.model.depth is None,
        "model.name is missing",
        "add for example under model:   name: demo   or, for a new model from nothing,   depth: 12",
    ),
    Rule(
        "model-named-and-new",
        ("model.depth", "model.name"),
        lambda c: bool(c.model.name) and c.model.depth is not None,
        "model.name is {c.model.name}, and model.depth asks for a new model with random weights",
        "delete one of the two",
    ),
    Rule(
        "new-model-without-tokenizer",
        ("model.tokenizer", "model.depth"),
        lambda c: c.model.depth is not None and not c.model.name and not c.model.tokenizer,
        "model.depth asks for a new model, and model.tokenizer names no tokenizer: how many tokens it knows is open",
        "make one from your text (duoka data tokenizer FILES --out tok) and write:   tokenizer: tok   "
        "or take another model's:   tokenizer: demo",
    ),
    Rule(
        "sizes-of-no-new-model",
        tuple(f"model.{name}" for name in _OF_NEW_MODELS),
        lambda c: c.model.depth is None and _sizes_of_new_models(c),
        "width, head_dim, kv_heads, mlp_width and context are sizes of a new model, and model.depth is not given",
        "delete them, or write for example:   depth: 12   in place of name",
    ),
    Rule(
        "odd-heads",
        ("model.head_dim", "model.depth"),
        lambda c: c.model.depth is not None and bool((c.model.head_dim or 0) % 2),
        "model.head_dim is {c.model.head_dim}: positions turn pairs of numbers, so a head holds an even number of them",
        "write for example:   head_dim: 64",
    ),
    Rule(
        "heads-do-not-fit",
        ("model.width", "model.head_dim", "model.kv_heads", "model.depth"),
        _heads_do_not_fit,
        "model.width {c.model.width} in heads of {c.model.head_dim}, with {c.model.kv_heads} of keys and values, "
        "leaves a remainder",
        "make width a multiple of head_dim, and the number of heads one of kv_heads",
    ),
    Rule(
        "rows-beyond-the-context",
        ("model.context", "data.max_length", "model.depth"),
        lambda c: c.model.depth is not None and (c.model.context or c.data.max_length) < c.data.max_length,
        "model.context is {c.model.context}, and the new model would learn from rows of {c.data.max_length} tokens "
        "(data.max_length)",
        "delete context (it is max_length then), or write a smaller max_length",
    ),
    Rule(
        "optimizer-without-a-known-rate",
        ("optim.name", "model.depth"),
        lambda c: c.model.depth is not None and c.optim.name in _NO_RATE and "lr" not in c.optim.model_fields_set,
        "optim.name is {c.optim.name}, for which no rule makes a learning rate of model.depth, and {c.optim.lr:g} is "
        "one for fine-tuning",
        "write optim.lr, for example:   lr: 0.001   or   name: muon   or adamw, whose rates follow from depth",
    ),
    Rule(
        "revision-of-a-new-model",
        ("model.revision", "model.depth"),
        lambda c: c.model.depth is not None and c.model.revision is not None,
        "model.revision is {c.model.revision}, but model.depth begins a new model, which has no revisions",
        "delete revision",
    ),
    Rule(
        "adapters-on-noise",
        ("lora", "train_only", "model.quantization", "model.depth", "model.from_scratch"),
        lambda c: c.model.is_new and bool(c.lora or c.train_only or c.model.quantization != "none"),
        "the model begins from random weights ({c.model.how_new}), and lora, train_only or quantization would leave "
        "most of them as they are",
        "delete lora, train_only and quantization",
    ),
    Rule(
        "new-model-learns-text-first",
        ("stage", "model.depth"),
        lambda c: c.model.depth is not None and not c.stage.kind.reads_text,
        "stage is {c.stage.name}, but model.depth begins from random weights, which know no language yet",
        "write:   stage: pretrain   and afterwards begin from its result:   model: runs/NAME/final",
    ),
    Rule(
        "scratch-of-no-name",
        ("model.from_scratch", "model.depth"),
        lambda c: c.model.from_scratch and c.model.depth is not None,
        "model.from_scratch draws weights for the model that model.name names, and model.depth is a new model already",
        "delete one of the two",
    ),
    Rule(
        "code-of-a-model-from-scratch",
        ("model.from_scratch", "model.trust_remote_code"),
        lambda c: c.model.from_scratch and c.model.trust_remote_code,
        "model.from_scratch draws weights as transformers' own classes do, and model.trust_remote_code runs others",
        "delete one of the two",
    ),
    Rule(
        "answers-before-language",
        ("stage", "model.from_scratch"),
        lambda c: c.model.from_scratch and not c.stage.kind.reads_text,
        "stage is {c.stage.name}, and model.from_scratch begins from random weights, which know no language yet",
        "stage: pretrain teaches one first; its result begins the next run:   model: runs/NAME/final",
        is_note=True,
    ),
    Rule(
        "depth-beyond-what-was-tried",
        ("model.depth",),
        lambda c: c.model.depth is not None and is_outside_what_was_tried(c.model.depth),
        "model.depth is {c.model.depth}, and the rules that make sizes and rates of it were found for 12 to 26",
        "look at the loss early, and write what you know better (docs/pretrain.md)",
        is_note=True,
    ),
)

MODEL_RULES: tuple[Rule, ...] = (
    *NEW_MODEL_RULES,
    Rule(
        "lora-without-targets",
        ("lora.targets",),
        lambda c: c.lora is not None and c.lora.targets == (),
        "lora.targets is empty: nothing would be trained",
        "write:   targets: all   or for example   targets: [q_proj, v_proj]",
    ),
    Rule(
        "lora-all-in-a-list",
        ("lora.targets",),
        lambda c: "all" in _lora_names(c),
        "lora.targets lists all beside or as a module's name",
        "write:   targets: all   without brackets",
    ),
    Rule(
        "lora-target-twice",
        ("lora.targets",),
        lambda c: len(set(_lora_names(c))) < len(_lora_names(c)),
        "lora.targets names a module twice",
        "name it once",
    ),
    Rule(
        "lora-target-is-no-name",
        ("lora.targets",),
        lambda c: any(not name.strip() or "," in name or name != name.strip() for name in _lora_names(c)),
        "lora.targets has an entry that is no module's name",
        "write for example:   targets: [q_proj, v_proj]",
    ),
    Rule(
        "pissa-of-a-trained-adapter",
        ("lora.init", "lora.adapter", "lora.merge"),
        lambda c: c.lora is not None and c.lora.init != "random" and bool(_adapters(c)),
        "lora.init {c.lora.init} begins adapters from the base's own weights, and a trained one is named to begin with",
        "delete init, or merge the other one first (duoka export) and name the result as the model",
    ),
    Rule(
        "merge-into-packed",
        ("model.quantization", "lora.merge"),
        lambda c: c.lora is not None and bool(c.lora.merge) and c.model.quantization != "none",
        "lora.merge adds adapters to the base's weights, and model.quantization {c.model.quantization} packs these: "
        "nothing can be added to packed weights",
        "merge first:   duoka export ADAPTER -o DIR   and name the result as the model",
    ),
    Rule(
        "adapter-twice",
        ("lora.adapter", "lora.merge"),
        lambda c: len(set(_adapters(c))) < len(_adapters(c)),
        "an adapter is named twice under lora.adapter and lora.merge: it would count twice",
        "name it once: under adapter to train it further, under merge to train a new one beside it",
    ),
    Rule(
        "adapter-of-this-very-run",
        ("lora.adapter", "lora.merge", "output"),
        lambda c: any(_same_place(name, c.output) for name in _adapters(c)),
        "output is {c.output}, and the run would begin with an adapter that lies in it: its own result",
        "write another output; to go on with that run itself, start it with its own config",
    ),
    Rule(
        "lora-scale",
        ("lora.alpha", "lora.rank"),
        _lora_scale_is_odd,
        "lora.alpha is {c.lora.alpha:g} with lora.rank {c.lora.rank}: adapters count alpha / rank, "
        "and that is no useful number here",
        "alpha is usually one or two times the rank:   alpha: 16",
    ),
    Rule(
        "pissa-iterations-without-pissa",
        ("lora.pissa_iterations", "lora.init"),
        lambda c: c.lora is not None and c.lora.init != "pissa" and c.lora.pissa_iterations != 16,
        "lora.pissa_iterations is {c.lora.pissa_iterations}, but lora.init is {c.lora.init}: nothing is searched",
        "write   init: pissa   or delete pissa_iterations",
    ),
    Rule(
        "quantized-base-is-frozen",
        ("model.quantization", "lora"),
        lambda c: c.model.quantization != "none" and c.lora is None and c.model.depth is None,
        "model.quantization is {c.model.quantization}, and there is no lora block: packed weights cannot be trained, "
        "only adapters beside them",
        "write for example:   lora: {rank: 8}   or delete quantization",
    ),
    Rule(
        "quantized-base-with-dp",
        ("model.quantization", "parallel.strategy"),
        lambda c: c.model.quantization != "none" and c.parallel.strategy == "dp",
        "model.quantization is {c.model.quantization}, and parallel.strategy dp copies weights to each GPU anew in "
        "every pass, which packed ones do not survive",
        "write   strategy: ddp   (a packed 7B model is about 4 GB in each process), or   strategy: fsdp   (shared out)",
    ),
    Rule(
        "quantized-base-as-it-is",
        ("model.quantization", "lora.init"),
        lambda c: c.model.quantization != "none" and c.lora is not None and c.lora.init != "random",
        "model.quantization packs the base into 4 bits, and lora.init {c.lora.init} takes parts out of it unpacked",
        "write   init: random   or delete quantization",
    ),
    Rule(
        "quantized-base-is-not-compiled",
        ("model.quantization", "train.compile"),
        lambda c: c.model.quantization != "none" and bool(c.train.compile),
        "train.compile is on, and model.quantization packs the base by kernels that it cannot look into",
        "write   compile: false   or delete quantization",
    ),
    Rule(
        "double-quantization-of-nothing",
        ("model.double_quantization", "model.quantization"),
        lambda c: c.model.quantization == "none" and not c.model.double_quantization,
        "model.double_quantization is about packed weights, and model.quantization is none",
        "write   quantization: nf4   or delete double_quantization",
    ),
    Rule(
        "lora-and-train-only",
        ("train_only", "lora"),
        lambda c: c.train_only is not None and c.lora is not None,
        "lora and train_only are both given: one trains adapters beside frozen weights, the other some of the weights",
        "delete one of the two blocks",
    ),
    Rule(
        "train-only-nothing",
        ("train_only.layers", "train_only"),
        lambda c: c.train_only is not None and c.train_only.layers in (0, ()) and not c.train_only.extra,
        "train_only names no layer and no module: nothing would be trained",
        "write for example:   layers: 2",
    ),
    Rule(
        "spread-of-named-layers",
        ("train_only.spread", "train_only.layers"),
        lambda c: (
            c.train_only is not None
            and c.train_only.spread
            and not (isinstance(c.train_only.layers, int) and c.train_only.layers > 0)
        ),
        "train_only.spread needs a number of layers to spread, and layers is {c.train_only.layers}",
        "write for example:   layers: 8",
    ),
    Rule(
        "revision-of-no-hub-model",
        ("model.revision", "model.name"),
        lambda c: c.model.revision is not None and (c.model.name == "demo" or _is_path(c.model.name)),
        "model.revision is {c.model.revision}, but {c.model.name} comes from no Hub and has no revisions",
        "delete revision",
    ),
)
