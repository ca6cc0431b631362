"""What a dialect's table is made of: rows, the words that conversions share, and what a conversion may answer.

A row says for one key of another tool what becomes of it here. `engine.py` reads the rows; nothing here reads files.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from duoka.registry import nearest

# What a file is for, and how its answers are drawn, hangs on these, whatever becomes of them in training.
_SWITCHES = ("do_predict", "do_eval", "predict_with_generate", "do_sample")
# What to write in place of what is no number, where 1 would be refused too.
_EXAMPLES = {
    "lora_rank": 8, "lora_alpha": 16, "cutoff_len": 2048, "save_steps": 100, "eval_steps": 100, "warmup_ratio": 0.1,
    "val_size": 0.1, "adam_beta1": 0.9, "adam_beta2": 0.999, "quantization_bit": 4, "data_seed": 42, "min_lr_rate": 0.1,
    "min_lr": 1e-6, "learning_rate": 5e-5, "freeze_trainable_layers": 2, "ddp_timeout": 1800,
}  # fmt: skip
State = Literal["implemented", "reported", "refused"]
# DeepSpeed's switches of how sharded weights are saved.
WHOLE_AT_THE_END = "the final folder is always whole, in the base's own type; 16 bits: duoka export RUN --dtype bf16"


@dataclass(frozen=True)
class Start:
    """What a translation must know of the start: a batch per device is a global one only for a number of ranks."""

    num_ranks: int = 1
    has_gpu: bool = True


@dataclass(frozen=True)
class Asked:
    """Everything that a file asks for, by the other tool's names, beside the one value that is converted."""

    values: Mapping[str, Any]
    start: Start
    folder: Path = Path(".")
    flavour: str = ""  # of two dialects that share rows, the one that was written

    def get(self, name: str, default: Any = None) -> Any:
        value = self.values.get(name)
        return default if value is None else value

    def is_on(self, name: str) -> bool:
        return is_true(self.values.get(name))  # a switch that cannot be read is refused at its own row


@dataclass(frozen=True)
class Answer:
    """Our keys with their values, and a word to the user. No values: the key asks for what is the case anyway."""

    values: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""


class Refusal(ValueError):
    """A value that would change the result, and that duoka cannot honor; `name` when it is another key's."""

    def __init__(self, what: str, fix: str = "", name: str = "") -> None:
        super().__init__(what)
        self.what, self.fix, self.name = what, fix, name


Convert = Callable[[Any, Asked], Any]


@dataclass(frozen=True)
class Row:
    """One key of another tool."""

    name: str
    state: State
    key: str = ""  # ours; "" when there is none
    note: str = ""
    convert: Convert | None = None  # None: the value as it is
    off: tuple[Any, ...] = ()  # of a refused key: values that ask for nothing
    opens: str = ""  # the value is the path of a file in this dialect
    is_switch: bool = False  # true or false; read before `convert` sees it
    parts: tuple[str, ...] = ()  # the keys that a block of it may have


@dataclass(frozen=True)
class Dialect:
    """One kind of file."""

    id: str
    title: str
    rows: Mapping[str, Row]
    fits: Callable[[Mapping[str, Any]], bool]
    defaults: Callable[[Asked], Mapping[str, Any]] = lambda asked: {}
    openers: frozenset[str] = field(init=False, default=frozenset())  # names before a dot of a row: blocks
    rename: Mapping[str, str] = field(default_factory=dict)  # how a file writes a key -> the name of its row
    blocks: tuple[str, ...] = ()  # blocks whose keys are looked up without the block's name
    task: Callable[[Mapping[str, Any]], str] = lambda values: "train"  # what the other tool would do with a file
    meant: Mapping[str, str] = field(default_factory=dict)  # others' words -> the row, or all that is to be written
    is_whole: bool = True  # False: a file beside the one that names model and data

    def __post_init__(self) -> None:
        object.__setattr__(self, "openers", _openers(self.rows))


def _openers(rows: Iterable[str]) -> frozenset[str]:
    parts = [name.split(".") for name in rows]
    return frozenset(".".join(words[:count]) for words in parts for count in range(1, len(words)))


def implemented(name: str, key: str, convert: Convert | None = None, note: str = "") -> list[Row]:
    return [Row(name, "implemented", key, note, convert)]


def switch(name: str, key: str, convert: Convert | None = None, note: str = "") -> list[Row]:
    """A key that is on or off; left empty it says nothing."""
    return [Row(name, "implemented", key, note, convert, is_switch=True)]


def reported(note: str, *names: str) -> list[Row]:
    return [Row(name, "reported", "", note, is_switch=name in _SWITCHES) for name in names]


def refused(note: str, *names: str, off: tuple[Any, ...] = ()) -> list[Row]:
    """Keys that would change the result. `off` beside null, false, and empty lists: values that ask for nothing."""
    return [Row(name, "refused", "", note, off=off, is_switch=name in _SWITCHES) for name in names]


def table(*groups: Iterable[Row]) -> dict[str, Row]:
    out: dict[str, Row] = {}
    for row in (row for group in groups for row in group):
        if row.name in out:
            raise ValueError(f"{row.name} has two rows")
        out[row.name] = row
    return out


_ALMOST = 0.85


def nearest_row(word: str, rows: Mapping[str, str]) -> str:
    """The key that does something and is like it, or any that is almost it: advice that is refused next is none.

    `rows` are names, with the blocks that they stand in, and states.
    """
    last = {name.rpartition(".")[2]: state for name, state in rows.items()}
    almost = difflib.get_close_matches(word.lower(), list(last), n=1, cutoff=_ALMOST)
    useful = [name for name, state in last.items() if state == "implemented"]
    return (almost[0] if almost else nearest(word, useful)) or ""


# --------------------------------------------------------------------------------- words that conversions share


_ON, _OFF = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def is_true(value: Any) -> bool:
    return value is True or (isinstance(value, (str, int)) and str(value).strip().lower() in _ON)


def is_false(value: Any) -> bool:
    return value is False or (isinstance(value, (str, int)) and str(value).strip().lower() in _OFF)


def read_switch(value: Any, name: str) -> bool:
    """On or off. A misspelled word is neither: taken for off, it would make another run than the one that was meant."""
    if not is_true(value) and not is_false(value):
        last = name.rpartition(".")[2]  # as it stands in its block
        raise Refusal(f"{name} must be true or false, got {shown(value)}", f"write:   {last}: true   or   false", name)
    return is_true(value)


def shorten(value: Any) -> str:
    """A value as far as a message shows it."""
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def shown(value: Any) -> str:
    return f'"{shorten(value)}"'


def is_none(value: Any) -> bool:
    """True for what stands for nothing in other tools' files: null, none, "", an empty list."""
    return value is None or value == [] or value == {} or str(value).strip().lower() in ("", "none", "null")


def asks_for_nothing(value: Any, off: tuple[Any, ...]) -> bool:
    if isinstance(value, dict) and value.get("enabled") is False:
        return True
    return is_none(value) or value is False or str(value).lower() in ("false", "no", "off") or value in off


def number(value: Any, name: str) -> float:
    try:
        if isinstance(value, bool) or not math.isfinite(out := float(value)):
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise Refusal(f"{name} must be a number, got {shown(value)}", _example(name, 1), name) from None
    return out


def _example(name: str, least: int) -> str:
    """What to write, by the word that stands in the key's own block."""
    return f"write for example:   {name.rpartition('.')[2]}: {_EXAMPLES.get(name, max(1, least))}"


def whole(value: Any, name: str, least: int = 1) -> int:
    out = number(value, name)
    if out != int(out) or out < least:
        what = f"{name} must be a whole number of at least {least}, got {shown(value)}"
        raise Refusal(what, _example(name, least), name)
    return int(out)


def share(value: Any, name: str, steps_name: str) -> float:
    """A part of something, 0 or more and less than 1; more would be taken for a count of steps."""
    out = number(value, name)
    if not 0 <= out < 1:
        what = f"{name} {value} is no share, which lies between 0 and 1"
        raise Refusal(what, f"write for example:   {name}: 0.1   or   {steps_name}: {max(1, int(out))}", name)
    return out


def words(name: str, meanings: Mapping[str, Any]) -> Convert:
    """A conversion by a table of words; a word that is not in it gets the nearest."""

    def convert(value: Any, asked: Asked) -> Any:
        word = str(value).strip().lower()
        if word in meanings:
            return meanings[word]
        guess = nearest(word, meanings)
        known = ", ".join(meanings)
        hint = f"did you mean {guess}?   " if guess else ""
        raise Refusal(f"{name} {shorten(value)} is not known here", f"{hint}known: {known}", name)

    return convert


def comma_list(value: Any, name: str) -> list[str]:
    """`a, b` or `[a, b]` as a list of words."""
    items = value if isinstance(value, list) else [value]
    if any(isinstance(item, (dict, list, bool, type(None))) for item in items):
        what = f"{name} must be a name, or a list of names, got {shown(value)}"
        raise Refusal(what, f"write for example:   {name}: one, two", name)
    words = items if isinstance(value, list) else str(value).split(",")
    return [str(item).strip() for item in words if str(item).strip()]


def names_of(name: str) -> Convert:
    return lambda value, asked: comma_list(value, name)


def unless_none(value: Any, asked: Asked) -> Any:
    return Answer() if is_none(value) else value


def only_if_on(key: str, value: Any) -> Convert:
    """A switch that means a value of ours when it is on, and nothing when it is off."""
    return lambda given, asked: Answer({key: value}) if given else Answer()


def describe_years(seconds: float) -> str:
    years = seconds / (365.25 * 86_400)
    return f"{years:.1f} years" if years >= 1 else f"{seconds / 86_400:.0f} days"


def packed_row(asked: Asked) -> int:
    """The tokens of a sample, where a file's batch counts packed rows; 0 where it counts conversations, as ours does.

    Taken for conversations, a step would learn from a fraction of what it is to learn from.
    """
    is_packed = asked.is_on("packing") or asked.is_on("neat_packing")
    if not is_packed or str(asked.get("stage", "sft")).strip().lower() != "sft":
        return 0
    return whole(asked.get("cutoff_len", 2048), "cutoff_len")


def batch_answer(
    micro: Any, accumulation: Any, asked: Asked, names: tuple[str, str], ranks_per_sample: int = 1
) -> Answer:
    """A batch per device as a global one, for the number of ranks that this start has; both are said."""
    per_device, steps = whole(micro, names[0]), whole(accumulation, names[1])
    ranks = max(1, asked.start.num_ranks // ranks_per_sample)
    batch = per_device * steps * ranks
    row = packed_row(asked)
    if row:
        note = (
            f"{per_device} per device x {steps} accumulated x {ranks} process{'es' if ranks > 1 else ''}, each a "
            f"packed row of {row} tokens = train.global_batch {batch * row} tokens; on other numbers of processes this "
            "file means another batch"
        )
        amounts = {"train.global_batch": f"{batch * row} tokens", "train.micro_batch": f"{per_device * row} tokens"}
        return Answer(amounts, note)
    note = (
        f"{per_device} per device x {steps} accumulated x {ranks} process{'es' if ranks > 1 else ''} = "
        f"train.global_batch {batch}, train.micro_batch {per_device}; on other numbers of processes this file means "
        "another batch"
    )
    return Answer({"train.global_batch": batch, "train.micro_batch": per_device}, note)


def timeout_answer(value: Any, name: str, default: str = "10min") -> Answer:
    """A timeout of years hides hangs; people write it because others tokenize while ranks wait. Here nobody waits."""
    seconds = number(value, name)
    if seconds <= 0:
        last = name.rpartition(".")[2]
        raise Refusal(f"{name} must be more than 0 seconds, got {value}", f"write for example:   {last}: 1800", name)
    if seconds <= 86_400:
        return Answer({"parallel.timeout": f"{seconds:g}s"})
    note = (
        f"{describe_years(seconds)} would hide a hang; data is prepared before ranks meet, so parallel.timeout is "
        f"{default} here"
    )
    return Answer({"parallel.timeout": default}, note)
