"""The table of bad configs for test_config_faults.py: what is written, and the lines, sentences and advice expected."""

from __future__ import annotations

from dataclasses import dataclass

from bad_layouts import LAYOUT_CONTRADICTIONS
from bad_rollouts import ROLLOUT_CONTRADICTIONS

HEAD = "model: demo\ndata: {train: [identity]}\n"  # lines 1 and 2 of most cases
_PACKED = "data: {train: [identity]}\nstage: sft\nmodel: {name: demo, quantization: nf4}\n"


@dataclass(frozen=True)
class Bad:
    """A config that must be refused. Every fault: (line, part of the sentence, part of the advice)."""

    id: str
    text: str
    faults: tuple[tuple[int, str, str], ...]
    overrides: tuple[str, ...] = ()


def bad(id: str, text: str, *faults: tuple[int, str, str], overrides: tuple[str, ...] = ()) -> Bad:
    return Bad(id, text, faults, overrides)


YAML_ITSELF = [
    bad("empty", "", (0, "the file is empty", "duoka init")),
    bad("only comments", "# nothing\n\n", (0, "the file is empty", "duoka init")),
    bad("a null", "~\n", (0, "the file is empty", "duoka init")),
    bad("list on top", "- model: demo\n- stage: sft\n", (1, "holds a list, not keys", "model: demo")),
    bad("text on top", "hello there\n", (1, 'holds the text "hello there", not keys', "key: value")),
    bad(
        "tabs, every line of them",
        "model: demo\ntrain:\n\tepochs: 1\n\tseed: 2\n",
        (3, "a tab is no indentation", "use spaces"),
        (4, "a tab is no indentation", "use spaces"),
    ),
    bad("tab after the colon", "model: demo\noutput:\truns/x\n", (2, "a tab is no", "use spaces")),
    bad(
        "indentation",
        "lora:\n   rank: 8\n  alpha: 16\n",
        (3, "indentation fits no line above", "same number of spaces"),
    ),
    bad("deeper for no reason", "model: demo\n  stage: sft\n", (2, '": " where none can be', "indent this line")),
    bad("two colons", "model: demo\noutput: a: b\n", (2, '": " where none can be', "in quotes")),
    bad("full-width colon", "model：demo\nstage: sft\n", (1, "： is full-width", "write:   model: demo")),
    bad(
        "full-width comma", "model: demo\nlora: {rank: 8，alpha: 16}\n", (2, "， is full-width", "{rank: 8, alpha: 16}")
    ),
    bad("no space after the colon", "model: demo\nstage:sft\nlora: {}\n", (2, 'not "key: value"', "a space after :")),
    bad("brace left open", "model: demo\nlora: {rank: 8\nlog: {every: 1}\n", (2, "a { is not closed", "{key: value")),
    bad("bracket left open", "data:\n  train: [identity\nmodel: demo\n", (2, "a [ is not closed", "[one, two]")),
    bad("quote left open", 'model: "demo\nstage: sft\n', (1, "a quote is opened", "close it")),
    bad("backslash", 'model: "C:\\Users\\me"\n', (1, "a backslash", "single quotes")),
    bad("unknown alias", "model: *base\n", (1, "an alias (*name) comes before", "write it out")),
    bad(
        "alias of itself",
        HEAD + "lora: &x {targets: [*x]}\n",
        (3, "an alias stands inside its own anchor", "write the values"),
        (3, "lora.targets[0] must be a name", "targets:"),
    ),
    bad("two documents", HEAD + "---\nmodel: demo\n", (3, "two documents", "one file holds one run")),
    bad("reserved character", "model: @me/model\n", (1, "cannot start with this character", "in quotes")),
    bad("control character", "model: demo\nstage: s\x07ft\n", (2, "a control character", "delete it")),
    bad("a tag", HEAD + "output: !!python/object:os.system x\n", (3, "tags such as", "plain value")),
    bad("a list as a key", HEAD + "? [a, b]\n: 1\n", (3, "a key must be a word", "key: value")),
    bad("env in braces", "model: {name: ${env:X,y}}\n", (1, "needs quotes", '"${env:NAME}"')),
    bad(
        "the same key twice",
        HEAD + "optim:\n  lr: 1e-4\n  clip: 1\n  lr: 2e-4\n",
        (6, "the key lr is given twice in the same block, first in line 4", "keep one"),
    ),
    bad("the same block twice", HEAD + "log: {}\nlog: {}\n", (4, "the key log is given twice", "keep one")),
]

UNKNOWN_KEYS = [
    bad("a pipeline", HEAD + "pipeline: {base: {}, sft: {}}\n", (3, "several stages", "duoka run ")),
    bad("a list of stages", HEAD + "pipeline: [base, sft]\n", (3, "several stages", "duoka run ")),
    bad("misspelled", HEAD + "lora: {rnak: 8}\n", (3, "unknown key lora.rnak; did you mean rank?", "write:   rank: 8")),
    bad("letters swapped", HEAD + "optim: {rl: 1e-4}\n", (3, "unknown key optim.rl; did you mean lr?", "lr: 0.0001")),
    bad(
        "a path",
        "model: {path: demo}\ndata: {path: identity}\n",
        (1, "calls it model.name", "name: demo"),
        (2, "duoka calls it data.train", "train: [identity]"),
    ),
    bad("capitals", HEAD + "optim: {LR: 1e-4}\n", (3, "unknown key optim.LR; did you mean lr?", "lr: 0.0001")),
    bad(
        "another block's",
        HEAD + "train: {lr: 3e-4}\n",
        (3, "train.lr; it belongs to optim", "under optim:   lr: 0.0003"),
    ),
    bad("left outside its block", HEAD + "max_length: 99\n", (3, "it belongs to data", "under data:   max_length: 99")),
    bad("in two blocks", HEAD + "every: 10\n", (3, "it belongs to checkpoint or log", "every: 10")),
    bad(
        "top key in a block",
        HEAD + "train: {output: x}\n",
        (3, "it belongs to the top of the file", "at the top:   output"),
    ),
    bad("dots in a file", HEAD + "optim.lr: 1e-4\n", (3, "dots do not open blocks", "under optim:   lr: 0.0001")),
    bad("nothing near", HEAD + "log: {zzz: 1}\n", (3, "unknown key log.zzz", "known in log: every, samples, to")),
    bad(
        "in a data set",
        "model: demo\ndata:\n  train:\n  - {nme: identity, path: a.jsonl, format: text}\n  - {weight: 2}\n",
        (4, "unknown key data.train[0].nme; did you mean name?", "name: identity"),
        (4, "unknown key data.train[0].path; duoka calls it data.train.name", "write:   name: a.jsonl"),
        (4, "data.train[0].format; duoka sees a record's format by its fields", "delete it"),
        (5, "data.train[1].name is missing", "name: identity"),
    ),
    bad(
        "flat foreign keys",
        HEAD + "learning_rate: 2e-4\nnum_train_epochs: 3\ncutoff_len: 64\nlora_rank: 4\noutput_dir: x\nval_size: 0.1\n",
        (3, "duoka calls it optim.lr", "under optim:   lr: 0.0002"),
        (4, "duoka calls it train.epochs", "under train:   epochs: 3"),
        (5, "duoka calls it data.max_length", "under data:   max_length: 64"),
        (6, "duoka calls it lora.rank", "under lora:   rank: 4"),
        (7, "duoka calls it output", "write:   output: x"),
        (8, "duoka calls it data.eval", "under data:   eval: 0.1"),
    ),
    bad(
        "foreign, misspelled",
        HEAD + "learnig_rate: 1e-4\n",
        (3, "duoka calls it optim.lr", "under optim:   lr: 0.0001"),
    ),
    bad(
        "per-device batch",
        HEAD + "train: {per_device_train_batch_size: 4, gradient_accumulation_steps: 2}\n",
        (3, "duoka calls it train.global_batch and train.micro_batch", "all ranks"),
        (3, "duoka calls it train.global_batch", "accumulation follows"),
    ),
    bad(
        "fp16 and bf16",
        HEAD + "train:\n  fp16: true\n  bf16: true\n",
        (4, "unknown key train.fp16; duoka calls it train.precision", "precision: fp16"),
        (5, "unknown key train.bf16; duoka calls it train.precision", "precision: bf16"),
    ),
    bad("fp16 off", HEAD + "fp16: false\n", (3, "duoka calls it train.precision", "under train:   precision: auto")),
    bad("gradient checkpointing", HEAD + "gradient_checkpointing: true\n", (3, "train.recompute", "recompute: full")),
    bad("processes", HEAD + "train: {nproc: 4}\n", (3, "no part of the config", "delete it")),
    bad("overwrite", HEAD + "overwrite_output_dir: true\n", (3, "never overwritten", "delete it")),
    bad(
        "foreign block",
        HEAD + "trainer:\n  max_epochs: 3\n  type: x\n",
        (3, "unknown key trainer; duoka's block is train", "write:   train:"),
        (4, "unknown key trainer.max_epochs; duoka calls it train.epochs", "epochs: 3"),
        (5, "unknown key trainer.type; duoka calls it parallel.strategy", "under parallel:   strategy: auto"),
    ),
    bad("a password", HEAD + "hf_token: abc123\n", (3, "unknown key hf_token", "known at the top")),
]

VALUES = [
    bad(
        "warm-up in samples",
        HEAD + "optim: {warmup: 300 samples}\n",
        (3, 'must be a share below 1, a number of steps, or of tokens such as "2M tokens"', ""),
    ),
    bad("no model", "data: {train: [identity]}\n", (0, "model is missing", "add for example   model: demo")),
    bad(
        "no data set",
        "model: demo\ndata:\n  eval: 0.1\n",
        (2, "data.train is missing", "under data:   train: [identity]"),
    ),
    bad(
        "word for a number",
        HEAD + "lora:\n  rank: eight\n",
        (4, 'lora.rank must be a whole number of at least 1, got "eight"', "write for example:   rank: 8"),
    ),
    bad("fraction of a whole", HEAD + "lora: {rank: 3.5}\n", (3, "whole number of at least 1, got 3.5", "rank: 8")),
    bad(
        "true for a number",
        HEAD + "optim: {lr: true}\n",
        (3, "optim.lr must be a number above 0, got true", "lr: 2.0e-05"),
    ),
    bad("true for a whole number", HEAD + "train: {seed: true}\n", (3, "of at least 0, got true", "seed: 42")),
    bad("negative", HEAD + "optim: {lr: -1e-4}\n", (3, "must be a number above 0, got -0.0001", "lr: 2.0e-05")),
    bad("infinite", HEAD + "optim: {lr: .inf}\n", (3, "must be a number above 0, got .inf", "lr: 2.0e-05")),
    bad("not a number", HEAD + "optim: {lr: nan}\n", (3, 'must be a number above 0, got "nan"', "lr: 2.0e-05")),
    bad("a share of 1", HEAD + "lora: {dropout: 1}\n", (3, "at least 0 and below 1, got 1", "dropout: 0")),
    bad("choice", HEAD + "optim: {schedule: cosin}\n", (3, "one of constant, linear, cosine", "did you mean cosine?")),
    bad(
        "choice, far off",
        HEAD + "train: {precision: 8}\n",
        (3, "one of auto, fp32, bf16, fp16, fp8, got 8", "precision: fp8"),
    ),
    bad("precision as bits", HEAD + "train: {precision: 16}\n", (3, "got 16", "precision: bf16")),
    bad("precision, long", HEAD + "train: {precision: bfloat16}\n", (3, 'got "bfloat16"', "write:   precision: bf16")),
    bad("all-linear", HEAD + "lora: {targets: all-linear}\n", (3, 'got "all-linear"', "write:   targets: all")),
    bad("stage", HEAD + "stage: distill\n", (3, "stage must be one of sft, ", "stage: sft")),
    bad(
        "switch",
        HEAD + "parallel: {bucket_view: maybe}\n",
        (3, 'must be true or false, got "maybe"', "bucket_view: true"),
    ),
    bad(
        "batch unit",
        HEAD + "train: {global_batch: 8 apples}\n",
        (3, 'train.global_batch must be a number of samples, or of tokens such as "8k tokens", got "8 apples"', "16"),
    ),
    bad("batch of none", HEAD + "train: {global_batch: 0}\n", (3, "train.global_batch must be", "global_batch: 16")),
    bad("batch as a list", HEAD + "train: {global_batch: [16]}\n", (3, "got [16]", "global_batch: 16")),
    bad("endless batch", HEAD + "train: {global_batch: .inf}\n", (3, "got .inf", "global_batch: 16")),
    bad("time", HEAD + "parallel: {timeout: soon}\n", (3, 'a time such as "10min"', 'timeout: "10min"')),
    bad("interval", HEAD + "checkpoint: {every: 1.5}\n", (3, "a number of steps", "every: 50")),
    bad("number for text", HEAD + "output: 5\n", (3, "output must be text, got 5", "quotes")),
    bad(
        "block for text", HEAD + "output: {dir: x}\n", (3, "output must be text, got {dir: x}", "output: runs/identity")
    ),
    bad(
        "text for a block",
        "model: demo\ndata: identity\n",
        (2, "data must be a block of keys", "data: {train: [identity]}"),
    ),
    bad("list for a block", HEAD + "train: [1]\n", (3, "train must be a block of keys, got [1]", "train: {")),
    bad("text for a list", HEAD + "log: {to: tensorboard}\n", (3, "a list of tensorboard", "to: [tensorboard]")),
    bad(
        "modules with commas",
        HEAD + 'lora: {targets: "q_proj,v_proj"}\n',
        (3, "lora.targets must be all, or a list of names", "targets: [q_proj, v_proj]"),
    ),
    bad("one beta", HEAD + "optim: {betas: [0.9]}\n", (3, "a list of two numbers", "betas: [0.9, 0.999]")),
    bad("unknown tracker", HEAD + "log: {to: [tensorbord]}\n", (3, "log.to[0] must be", "did you mean tensorboard?")),
    bad(
        "nothing to learn", "model: demo\ndata: {train: []}\n", (2, "data.train is an empty list", "train: [identity]")
    ),
    bad(
        "data set as a number",
        "model: demo\ndata:\n  train: [identity, 5]\n",
        (3, "data.train[1] must be a data set's name, or a block of keys, got 5", "train: [identity]"),
    ),
    bad(
        "a set's weight",
        "model: demo\ndata:\n  train:\n  - {name: a, weight: 1}\n  - {name: b, weight: -1}\n",
        (5, "data.train[1].weight must be a number above 0, got -1", "weight: 0.5"),
    ),
    bad("no value", HEAD + "optim:\n  lr:\n", (4, "optim.lr has no value", "delete lr")),
    bad("lora without a value", HEAD + "lora:\n  # rank: 8\n", (3, "lora has no value", "lora: null")),
    bad("lora: true", HEAD + "lora: true\n", (3, "lora must be a block of keys, got true", "lora: {rank: 8}")),
    bad("lora: no", HEAD + "lora: no\n", (3, "lora must be a block of keys", "lora: null")),
    bad("eval: no", "model: demo\ndata: {train: [identity], eval: no}\n", (2, "data.eval must be", "write:   eval: 0")),
    bad("eval too much", "model: demo\ndata: {train: [identity], eval: 1.5}\n", (2, "below 1, or a list of", "0.1")),
    bad(
        "resume as a switch",
        HEAD,
        (0, "checkpoint.resume must be text, got false", "checkpoint.resume=never"),
        overrides=("checkpoint.resume=false",),
    ),
    bad(
        "environment",
        HEAD + "optim:\n  lr: ${env:DUOKA_TEST_ABSENT}\n",
        (4, "the environment variable DUOKA_TEST_ABSENT is not set", "export DUOKA_TEST_ABSENT="),
    ),
]

OVERRIDES = [
    bad(
        "no equals sign", HEAD, (0, '"optim.lr" is not of the form key=value', "optim.lr=1e-4"), overrides=("optim.lr",)
    ),
    bad("empty key", HEAD, (0, "is not of the form key=value", "optim.lr"), overrides=("optim.=3",)),
    bad("unknown", HEAD, (0, "unknown key optim.lrr; did you mean lr?", "optim.lr=3"), overrides=("optim.lrr=3",)),
    bad("without its block", HEAD, (0, "lr; it belongs to optim", "write:   optim.lr=3"), overrides=("lr=3",)),
    bad("foreign", HEAD, (0, "duoka calls it optim.lr", "optim.lr=3"), overrides=("learning_rate=3",)),
    bad(
        "value", HEAD, (0, 'optim.lr must be a number above 0, got "x"', "optim.lr=2.0e-05"), overrides=("optim.lr=x",)
    ),
    bad("no YAML", HEAD, (0, "a [ is not closed", "[one, two]"), overrides=("data.train=[a",)),
    bad("empty value", HEAD, (0, "optim.lr has no value", "optim.lr=2.0e-05"), overrides=("optim.lr=",)),
    bad("extends", HEAD, (0, "extends works inside a file only", "leave it out"), overrides=("extends=a.yaml",)),
    bad(
        "beside faults of the file",
        "model: demo\nlora: {rnak: 8}\ndata: {train: [identity]}\n",
        (2, "did you mean rank?", "rank: 8"),
        (0, 'got "x"', "optim.lr="),
        overrides=("optim.lr=x",),
    ),
    bad(
        "beside a broken file",
        "model: [demo\n",
        (1, "a [ is not closed", "[one"),
        (0, "did you mean lr?", "optim.lr=3"),
        overrides=("optim.lrr=3",),
    ),
]

DPO = "model: demo\nstage: dpo\n"
TEXT = "model: demo\nstage: pretrain\n"
NEW = "data: {train: [a]}\n\nmodel: {depth: 4, tokenizer: t"
CONTRADICTIONS = {
    "model-of-no-name": "data: {train: [a]}\n\nmodel: {template: chatml}\n",
    "model-named-and-new": NEW + ", name: demo}\n",
    "new-model-without-tokenizer": "data: {train: [a]}\n\nmodel: {depth: 4}\n",
    "sizes-of-no-new-model": "data: {train: [a]}\n\nmodel: {name: demo, width: 64}\n",
    "odd-heads": NEW + ", head_dim: 33}\n",
    "heads-do-not-fit": NEW + ", width: 200}\n",
    "rows-beyond-the-context": NEW + ", context: 64}\n",
    "optimizer-without-a-known-rate": "data: {train: [a]}\nmodel: {depth: 4, tokenizer: t}\noptim: {name: lamb}\n",
    "revision-of-a-new-model": NEW + ", revision: v1}\n",
    "adapters-on-noise": "model: {depth: 4, tokenizer: t}\ndata: {train: [a]}\nlora: {}\n",
    "new-model-learns-text-first": "model: {depth: 4, tokenizer: t}\ndata: {train: [a]}\nstage: sft\n",
    "scratch-of-no-name": NEW + ", from_scratch: true}\n",
    "code-of-a-model-from-scratch": "data: {train: [a]}\nstage: pretrain\n"
    "model: {name: m, from_scratch: true, trust_remote_code: true}\n",
    "tokens-of-no-text": HEAD + "train: {tokens: 20x}\n",
    "tokens-below-a-batch": TEXT + "train: {tokens: 20, global_batch: 4}\ndata: {train: [a]}\n",
    "samples-that-begin-with-nothing": TEXT + 'log: {samples: [""]}\ndata: {train: [a], eval: 0.1}\n',
    "samples-of-no-text": HEAD + "log: {samples: 2}\n",
    "nothing-ends-the-run": HEAD + "train: {epochs: null}\n",
    "fixed-rows-are-packed": "model: demo\n\ndata: {train: [a], fixed_rows: true, packing: false}\n",
    "stage-does-not-read-it": "model: demo\ndata: {train: [a]}\nstage: {name: dpo, loss: hinge, gamma: 1}\n",
    "robust-needs-a-share": "model: demo\ndata: {train: [a]}\nstage: {name: dpo, loss: robust}\n",
    "pairs-have-their-own-loss": DPO + "train: {label_smoothing: 0.1}\ndata: {train: [a]}\n",
    "pairs-mark-the-last-answer": DPO + "data: {train: [a], targets: all}\n",
    "pairs-are-not-cut": DPO + "parallel: {sequence: 2}\ndata: {train: [a]}\n",
    "no-dropout-beside-a-reference": DPO + "lora: {dropout: 0.1}\ndata: {train: [a]}\n",
    "scores-have-a-head-of-their-own": "model: demo\nstage: reward\nlora: {init: pissa}\ndata: {train: [a]}\n",
    "pretrain-rows-are-packed": TEXT + "data: {train: [a], packing: false}\n",
    "pretrain-learns-every-token": TEXT + "data: {train: [a], on_long: drop}\n",
    "stream-of-text-only": "model: demo\ntrain: {max_steps: 5}\ndata: {train: [a], stream: true}\n",
    "streams-without-stream": TEXT + "data: {train: [a], streams: 2}\n",
    "stream-has-no-known-end": TEXT + "data: {train: [a], stream: true}\n",
    "stream-counts-no-epochs": TEXT
    + "checkpoint: {every: 1 epoch}\ndata: {train: [a], stream: true}\ntrain: {max_steps: 5}\n",
    "stream-is-not-split": TEXT + "data: {train: [a], stream: true, eval: 0.1}\ntrain: {max_steps: 5, eval_every: 5}\n",
    "last-file-of-no-stream": TEXT + "data: {train: [a], eval: last_file}\n",
    "stream-takes-all": TEXT + "data: {train: [{name: a, max_samples: 3}], stream: true}\ntrain: {max_steps: 5}\n",
    "warmup-eats-the-run": HEAD + "optim: {warmup: 9k tokens}\ntrain: {max_steps: 4, global_batch: 2048 tokens}\n",
    "warmup-is-not-whole": HEAD + "optim: {warmup: 2.5}\n",
    "min-lr-without-decay": HEAD + "optim: {schedule: constant, min_lr: 0.1}\n",
    "lr-scaling-without-a-batch": HEAD + "optim: {lr_scaling: sqrt}\n",
    "lr-batch-in-another-unit": HEAD + "optim: {lr_scaling: sqrt, lr_batch: 64k tokens}\n",
    "muon-knows-no-rate-for-the-rest": HEAD + "optim: {name: muon, lr: 0.02}\n",
    "adamw-lr-without-muon": HEAD + "optim: {adamw_lr: 3e-4}\n",
    "muon-scale-without-muon": HEAD + "optim: {muon_scale: adamw}\n",
    "dft-with-smoothing": HEAD + "train: {loss: dft, label_smoothing: 0.1}\n",
    "pissa-iterations-without-pissa": HEAD + "lora: {pissa_iterations: 4}\n",
    "pissa-of-a-trained-adapter": HEAD + "lora: {init: pissa, adapter: a}\n",
    "merge-into-packed": f"{_PACKED}lora: {{merge: [a]}}\n",
    "adapter-twice": HEAD + "lora: {adapter: a, merge: [a]}\n",
    "adapter-of-this-very-run": HEAD + "lora: {adapter: runs/a/final}\noutput: runs/a\n",
    "quantized-base-is-frozen": _PACKED,
    "quantized-base-with-dp": f"{_PACKED}lora: {{rank: 4}}\nparallel: {{strategy: dp}}\n",
    "quantized-base-as-it-is": f"{_PACKED}lora: {{init: pissa}}\n",
    "quantized-base-is-not-compiled": f"{_PACKED}lora: {{rank: 4}}\ntrain: {{compile: true}}\n",
    "double-quantization-of-nothing": _PACKED.replace("quantization: nf4", "double_quantization: false"),
    "muon-in-fp16": HEAD + "optim: {name: muon, adamw_lr: 3e-4}\ntrain: {precision: fp16}\n",
    "optimizer-is-not-offloaded": HEAD + "optim: {name: lamb}\nparallel: {offload: optimizer}\n",
    "optimizer-needs-whole-weights": HEAD + "optim: {name: adamw8bit}\nparallel: {strategy: fsdp}\n",
    "state-of-new-weights": HEAD + "optim: {state: runs/base}\nlora: {rank: 4}\n",
    "lr-is-no-rate": HEAD + "optim: {lr: 2}\n",
    "betas-diverge": HEAD + "optim: {betas: [0.999, 0.9]}\n",
    "batch-below-one-sample": HEAD + "train: {global_batch: 512 tokens}\n",
    "micro-above-global": HEAD + "train: {global_batch: 8, micro_batch: 16}\n",
    "eval-every-without-eval": HEAD + "train: {eval_every: 20}\n",
    "train-set-twice": "model: demo\n\ndata: {train: [identity, identity]}\n",
    "eval-set-twice": "model: demo\n\ndata: {train: [identity], eval: [a, a]}\n",
    "eval-on-train": "model: demo\n\ndata: {train: [identity], eval: [identity]}\n",
    "eval-weight": "model: demo\n\ndata: {train: [identity], eval: [{name: a, weight: 2}]}\n",
    "lora-without-targets": HEAD + "lora: {targets: []}\n",
    "lora-all-in-a-list": HEAD + "lora: {targets: [all]}\n",
    "lora-target-twice": HEAD + "lora: {targets: [q_proj, q_proj]}\n",
    "lora-target-is-no-name": HEAD + 'lora: {targets: ["q_proj,v_proj"]}\n',
    "lora-scale": HEAD + "lora: {rank: 4096, alpha: 0.1}\n",
    "lora-and-train-only": HEAD + "train_only: {layers: 2}\nlora: {rank: 4}\n",
    "train-only-nothing": HEAD + "train_only: {layers: 0}\n",
    "spread-of-named-layers": HEAD + "train_only: {layers: [1, 2], spread: true}\n",
    "ddp-settings-without-ddp": HEAD + "parallel: {strategy: single, find_unused_parameters: true}\n",
    "static-graph-looks-for-unused": HEAD + "parallel: {static_graph: true, find_unused_parameters: true}\n",
    "shard-ranks-without-hsdp": HEAD + "parallel: {strategy: fsdp, shard_ranks: 2}\n",
    "mixture-in-two-measures": "model: demo\n\ndata: {train: [{name: a, weight: 2}, {name: b, epochs: 2}]}\n",
    "set-with-share-and-epochs": "model: demo\n\ndata: {train: [a, {name: b, share: 0.5, epochs: 2}]}\n",
    "shares-of-more-than-all": "model: demo\n\ndata: {train: [a, {name: b, share: 0.5}, {name: c, share: 0.5}]}\n",
    "shares-of-nothing-else": "model: demo\n\ndata: {train: [{name: b, share: 0.5}]}\n",
    **LAYOUT_CONTRADICTIONS,
    **ROLLOUT_CONTRADICTIONS,
    "compile-with-sequence": HEAD + "parallel: {sequence: 2}\ntrain: {compile: true}\n",
    "reshard-without-fsdp": HEAD + "parallel: {strategy: zero2, reshard: false}\n",
    "offload-params-of-whole-models": HEAD + "parallel: {strategy: ddp, offload: params}\n",
    "compress-without-exchange": HEAD + "parallel: {strategy: single, compress: bf16}\n",
    "compress-of-ddp-only": HEAD + "parallel: {strategy: fsdp, compress: powersgd}\n",
    "powersgd-in-fp16": HEAD + "parallel: {strategy: ddp, compress: powersgd}\ntrain: {precision: fp16}\n",
    "pipeline-with-compile": HEAD + "train: {compile: true}\nparallel: {pipeline: 2}\n",
    "pipeline-with-one-process": HEAD + "parallel: {strategy: single, pipeline: 2}\n",
    "pipeline-with-compress": HEAD + "parallel: {pipeline: 2, compress: bf16}\n",
    "pipeline-with-ddp-settings": HEAD + "parallel: {pipeline: 2, bucket_mb: 50}\n",
    "pipeline-with-offload": HEAD + "parallel: {strategy: zero1, pipeline: 2, offload: params}\n",
    "pipeline-in-fp16": HEAD + "train: {precision: fp16}\nparallel: {pipeline: 2}\n",
    "pipeline-of-packed-weights": "data: {train: [identity]}\n\nmodel: {name: demo, quantization: nf4}\nlora: {}\n"
    "parallel: {pipeline: 2}\n",
    "interleaved-with-zero": HEAD + "parallel: {strategy: zero1, pipeline: 2, schedule: interleaved}\n",
    "virtual-stages-of-one": HEAD + "parallel: {pipeline: 2, virtual_stages: 2}\n",
    "schedule-without-pipeline": HEAD + "parallel: {schedule: gpipe}\n",
    "single-with-backend": HEAD + "parallel: {strategy: single, backend: gloo}\n",
    "revision-of-no-hub-model": "data: {train: [identity]}\n\nmodel: {name: ./mine, revision: main}\n",
    "resume-is-a-switch": HEAD + "checkpoint: {resume: no}\n",
    "keep-best-of-nothing": HEAD + "checkpoint: {keep_best: true}\n",
    "allowed-change-of-no-key": HEAD + "checkpoint: {allow_changes: [lr]}\n",
    "output-is-no-path": HEAD + f"output: runs/{'x' * 300}\n",
    "output-is-a-shared-folder": HEAD + "output: ./\n",
}
