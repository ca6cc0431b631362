"""Config files, broken in ways that people and programs break them: what tests/unit/test_config_fuzz.py feeds duoka.

Seeds are files in every form that duoka reads. A mutation changes their tree (values, keys, blocks) or their text
(letters, lines, brackets); a number decides which, so that a find is made again by its number.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from guides import NESTED

Tree = Any  # pairs of (key, tree) in a list for a block, a plain list, or text that is written as it stands


@dataclass(frozen=True)
class Case:
    """A broken file, what is typed behind it, and how it was broken."""

    name: str
    content: bytes
    overrides: tuple[str, ...]
    how: str


class Block(list[tuple[str, Any]]):
    """A mapping whose keys may stand in it twice."""


class Raw(str):
    """Text that is written as it stands."""


OWN = """\
model: {name: demo, revision: main}
stage: sft
data:
  train: [identity, {name: other, max_samples: 5, weight: 2}]
  eval: 0.1
  max_length: 512
  packing: true
lora: {rank: 8, alpha: 16, targets: [q_proj, v_proj], adapter: runs/a}
optim: {name: adamw, lr: 2.0e-5, betas: [0.9, 0.95], schedule: cosine, warmup: 0.03, clip: 1.0}
train: {epochs: 3, global_batch: 16, micro_batch: auto, precision: auto, seed: 42, max_steps: 50}
parallel: {strategy: auto, timeout: 10min, bucket_mb: 25}
checkpoint: {every: 50, keep: 2, resume: auto, allow_changes: [optim.lr]}
faults: {hang_after: 5min, nonfinite: stop}
log: {every: 10, to: [tensorboard]}
output: runs/x
"""
NEW = """\
model: {depth: 4, tokenizer: demo, width: 128}
data: {train: [{name: text, path: a.txt, format: text}]}
train: {tokens: 20x, global_batch: 8k tokens}
optim: {decay: 0.5, muon_scale: adamw}
output: "${env:HOME,runs}/x"
"""
NUMBERS = (
    ".inf", "-.inf", ".nan", "1e400", "-1e400", "9" * 400, "-" + "9" * 400, "9" * 4300, "9" * 5000, "0." + "1" * 5000,
    "-1", "-5", "0", "-0.0", "1e-400", "0x10", "0o17", "1_000", "12:30", "2.5", "1e999999999", "--5", "5 GB", "20x",
)  # fmt: skip
TEXTS = (
    '""', "~", "null", "true", "ture", "no", "off", '"true"', "auto", "none", "all", '"\\0"', '"a\\0b/c"',
    '"a\\nb"', '"\\ud800"', '"\\U0001f600"', "a/" * 150 + "b", "x" * 300, "/" + "y" * 5000, '"~/x"', '"~nobody/x"',
    '"${env:NO_SUCH_VARIABLE}"', '"${env:"', '"${env:}"', '"${env:PATH}"', '"$${env:X}"', "!!python/object:os.system",
    "*nothing", "&x [*x]", "<<", '"{c}"', '"{0.__class__}"', "%s%n", "2026-11-22", "\u202eabc", '"\\t"', "[", "{", "'",
    "../../../../etc", "/dev/zero", "/dev/stdin", "/proc/self/mem", "C:\\\\x", "|\n        text", "zero3", "CON", "-",
    "a, b, , c", "step 3", "10min", "-3min", "1e9 epochs", "2B tokens", "-5 tokens", "9" * 50 + " tokens",
)  # fmt: skip
SHAPES = (
    "[]", "{}", "[[]]", "[1, 2, 3]", "{a: 1}", "[{name: a}]", "[null]", "{null: null}", "{1: 2}", "{[a]: b}",
    "{a: {b: {c: 1}}}", "[" * 30 + "]" * 30, "{a: " * 400 + "1" + "}" * 400, "[" * 3000 + "]" * 3000,
    "{a: " * 3000 + "1" + "}" * 3000, "[" * 200_000, "{" + ", ".join(f"k{n}: {n}" for n in range(400)) + "}",
    "[" + ", ".join(["x"] * 5000) + "]", "{" + "k" * 300 + ": " + "v" * 300 + "}", "[true, false]", "[.nan, .inf]",
    '{name: "' + "d" * 300 + '"}', '{name: "a\\0b"}', "{enabled: ture}", "{device: [cpu]}", "{device: {a: b}}",
)  # fmt: skip
KEYS = (
    "", "learning_rate", "bf16", "extends", "base", "model", "data", "lora_rank", "deepspeed", "<<", "?", "1", "a b",
    "k" * 5000, "x.y", ".", "..", "optim.lr", "{c}", "token", "password", "zero_optimization", "distributed_type",
    "trainer", "model_name_or_path", "per_device_train_batch_size", "\u202e", "fsdp_config",
)  # fmt: skip
BYTES = (b"\0", b"\xff", b"\xef\xbb\xbf", b"\t", b"\r", b"\x1b[31m", b"\xe2\x80\xa8", b"\xed\xa0\x80", b"\x85", b"\n")
WORDS = ("[", "]", "{", "}", ":", ": ", ",", "- ", "? ", "&a ", "*a", "!!", "|", ">", "'", '"', "#", "%", "---\n", "@")
OVERRIDES = (
    "train.epochs", "optim.lr", "data.train", "model", "model.name", "output", "lora", "bf16", "learning_rate",
    "trainer.max_steps", "deepspeed", "", ".", "a.b.c.d.e", "extends", "lora.rank", "data.eval", "max_steps", "a..b",
)  # fmt: skip


def seeds() -> dict[str, str]:
    """Name -> text of a file that is right, in every form."""
    corpus = json.loads((Path(__file__).parent / "unit/llamafactory_corpus.json").read_text("utf-8"))
    out = {"own.yaml": OWN, "new.yaml": NEW, "nested.yaml": NESTED.format(model="some/model")}
    for name, file in corpus["train"].items():
        out[f"{name.replace('/', '_')}.yaml"] = yaml.safe_dump(file["keys"], sort_keys=False)
    for name, content in corpus["side"].items():
        text = json.dumps(content, indent=1) if name.endswith("json") else yaml.safe_dump(content, sort_keys=False)
        out[name.replace("/", "_")] = text
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    inline = {"train_batch_size": 8, "zero_optimization": zero, "fp16": {"enabled": True, "loss_scale": 0}}
    flat = {"model_name_or_path": "m", "dataset": "a,b", "learning_rate": 1e-4, "lora_rank": 8, "deepspeed": inline}
    flat |= {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-6}, "use_rslora": True}
    flat |= {"adapter_name_or_path": "a", "freeze_trainable_layers": 2, "max_steps": 9, "save_strategy": "best"}
    out["inline.yaml"] = yaml.safe_dump(flat, sort_keys=False)
    optimizer = {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8}}
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}
    out["ds_all.json"] = json.dumps({**inline, "optimizer": optimizer, "scheduler": schedule}, indent=1)
    talks = {"model_name_or_path": "m", "adapter_name_or_path": "a", "template": "qwen", "temperature": 0.5}
    out["chat.yaml"] = yaml.safe_dump({**talks, "do_sample": True, "top_p": 0.9, "max_new_tokens": 9, "seed": 1})
    out["export.yaml"] = yaml.safe_dump({**talks, "export_dir": "out", "export_size": 5})
    out["predict.yaml"] = yaml.safe_dump({**talks, "do_predict": True, "eval_dataset": "a", "cutoff_len": 99})
    return out


def make_case(number: int, files: dict[str, str]) -> Case:
    """The case of that number."""
    rng = random.Random(number)
    name = rng.choice(sorted(files))
    tree = copy.deepcopy(_seed_tree(files[name]))
    done = []
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        change = rng.choice(_TREE_CHANGES)
        change(rng, tree)
        done.append(change.__name__)
    text = _written(tree, flow=name.endswith(".json"))
    content = text.encode("utf-8", "surrogatepass")
    if rng.random() < 0.35:
        mend = rng.choice(_TEXT_CHANGES)
        content = mend(rng, content)
        done.append(mend.__name__)
    overrides = tuple(
        f"{rng.choice(OVERRIDES)}={rng.choice(NUMBERS + TEXTS + SHAPES)}" if rng.random() < 0.9 else rng.choice(KEYS)
        for _ in range(rng.choice((0, 0, 0, 0, 1, 2)))
    )
    return Case(name, content, overrides, ", ".join(done))


# --------------------------------------------------------------------------------------------- trees


@cache
def _seed_tree(text: str) -> Tree:
    return _tree_of(yaml.safe_load(text))


def _tree_of(value: Any) -> Tree:
    if isinstance(value, dict):
        return Block((str(key), _tree_of(item)) for key, item in value.items())
    if isinstance(value, list):
        return [_tree_of(item) for item in value]
    return Raw(json.dumps(value, ensure_ascii=False))


def _written(tree: Tree, depth: int = 0, *, flow: bool) -> str:
    if isinstance(tree, Raw):
        return str(tree)
    if not isinstance(tree, Block):
        return "[" + ", ".join(_written(item, flow=True) for item in tree) + "]"
    if flow:
        return "{" + ", ".join(f"{json.dumps(key)}: {_written(item, flow=True)}" for key, item in tree) + "}"
    lines = []
    for key, item in tree:
        shown = key if key.replace("_", "").isalnum() else json.dumps(key)
        if isinstance(item, Block) and item:
            lines.append(f"{'  ' * depth}{shown}:\n{_written(item, depth + 1, flow=False)}")
        else:
            lines.append(f"{'  ' * depth}{shown}: {_written(item, flow=True)}\n")
    return "".join(lines)


def _blocks(tree: Tree) -> list[Block]:
    out = [tree] if isinstance(tree, Block) else []
    for item in [value for _, value in tree] if isinstance(tree, Block) else tree if isinstance(tree, list) else []:
        out += _blocks(item)
    return out


def _some_entry(rng: random.Random, tree: Tree) -> tuple[Block, int]:
    filled = [block for block in _blocks(tree) if block]
    if not filled:
        tree.append(("model", Raw("demo")))
        filled = [tree]
    block = rng.choice(filled)
    return block, rng.randrange(len(block))


def _with_a_number(rng: random.Random, tree: Tree) -> None:
    block, place = _some_entry(rng, tree)
    block[place] = (block[place][0], Raw(rng.choice(NUMBERS)))


def _with_a_text(rng: random.Random, tree: Tree) -> None:
    block, place = _some_entry(rng, tree)
    block[place] = (block[place][0], Raw(rng.choice(TEXTS)))


def _with_a_shape(rng: random.Random, tree: Tree) -> None:
    block, place = _some_entry(rng, tree)
    block[place] = (block[place][0], Raw(rng.choice(SHAPES)))


def _without_a_key(rng: random.Random, tree: Tree) -> None:
    block, place = _some_entry(rng, tree)
    del block[place]


def _misspelled_key(rng: random.Random, tree: Tree) -> None:
    block, place = _some_entry(rng, tree)
    key, value = block[place]
    at = rng.randrange(len(key) + 1)
    block[place] = (rng.choice((key[:at] + key[at + 1 :], key[:at] + "x" + key[at:], key.upper(), key[::-1])), value)


def _another_key(rng: random.Random, tree: Tree) -> None:
    block, place = _some_entry(rng, tree)
    block[place] = (rng.choice(KEYS), block[place][1])


def _key_twice(rng: random.Random, tree: Tree) -> None:
    block, place = _some_entry(rng, tree)
    other, value = rng.choice(_blocks(tree)), copy.deepcopy(block[place][1])
    other.append((block[place][0], rng.choice((value, Raw(rng.choice(NUMBERS + TEXTS))))))


def _two_swapped(rng: random.Random, tree: Tree) -> None:
    (one, first), (two, second) = _some_entry(rng, tree), _some_entry(rng, tree)
    value = one[first][1]
    if not isinstance(value, Raw) or not isinstance(two[second][1], Raw):
        return
    one[first], two[second] = (one[first][0], two[second][1]), (two[second][0], value)


def _in_a_list(rng: random.Random, tree: Tree) -> None:
    block, place = _some_entry(rng, tree)
    key, value = block[place]
    block[place] = (key, rng.choice(([value], [value, value], Block([("name", value)]), Block([(key, value)]))))


def _moved(rng: random.Random, tree: Tree) -> None:
    block, place = _some_entry(rng, tree)
    entry = block.pop(place)
    rng.choice(_blocks(tree) or [tree]).append(entry)


_TREE_CHANGES: tuple[Callable[[random.Random, Tree], None], ...] = (
    _with_a_number, _with_a_number, _with_a_text, _with_a_text, _with_a_shape, _without_a_key, _misspelled_key,
    _another_key, _key_twice, _two_swapped, _in_a_list, _moved,
)  # fmt: skip


# --------------------------------------------------------------------------------------------- text


def _with_bytes(rng: random.Random, content: bytes) -> bytes:
    at = rng.randrange(len(content) + 1)
    return content[:at] + rng.choice((*BYTES, *(word.encode() for word in WORDS))) + content[at:]


def _without_bytes(rng: random.Random, content: bytes) -> bytes:
    at = rng.randrange(len(content) + 1)
    return content[:at] + content[at + rng.choice((1, 1, 2, 20)) :]


def _cut_off(rng: random.Random, content: bytes) -> bytes:
    return content[: rng.randrange(len(content) + 1)]


def _with_a_line(rng: random.Random, content: bytes) -> bytes:
    lines = content.split(b"\n")
    line = rng.choice(
        (*lines, b"\t x: 1", b"- a", b"...", b"--- !!map", b"%YAML 9.9", b"? [a, b]", b"x" * 100_000, b"a: &a")
    )
    lines.insert(rng.randrange(len(lines) + 1), rng.choice((b"", b" ", b"   ")) + line)
    return b"\n".join(lines)


def _with_aliases(rng: random.Random, content: bytes) -> bytes:
    bomb = b"a: &a [x, x, x, x, x, x, x, x, x]\n"
    for one, two in zip("abcdefgh", "bcdefghi", strict=True):
        bomb += f"{two}: &{two} [{', '.join([f'*{one}'] * 9)}]\n".encode()
    return bomb + content


def _other_encoding(rng: random.Random, content: bytes) -> bytes:
    return content.decode("utf-8", "replace").encode(
        rng.choice(("utf-16", "utf-16-le", "utf-32", "latin-1")), "replace"
    )


def _deep(rng: random.Random, content: bytes) -> bytes:
    depth = rng.choice((50, 400, 3000))
    lines = rng.choice((
        "- " * depth + "x", "".join(f"{' ' * level}k:\n" for level in range(min(depth, 900))), "x: " + "[" * depth,
        "x: " + "{a: " * depth, "? " * depth + "x", "".join(f"{' ' * level}- a\n" for level in range(min(depth, 900))),
    ))  # fmt: skip
    return rng.choice((content + lines.encode(), lines.encode() + b"\n" + content))


_TEXT_CHANGES: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    _with_bytes, _with_bytes, _without_bytes, _without_bytes, _cut_off, _with_a_line, _with_a_line, _with_aliases,
    _other_encoding, _deep,
)  # fmt: skip
