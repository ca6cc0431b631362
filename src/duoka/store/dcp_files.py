"""Checkpoints that torch.distributed.checkpoint wrote (FSDP's SHARDED_STATE_DICT): a model's weights, by name.

Their index (`.metadata`) is a pickle. It is taken apart here and nothing of it is called: what it would make becomes
a name with what belongs to it. The tensors are read by torch with `weights_only`.
"""

from __future__ import annotations

import io
import math
import pickletools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from duoka.errors import ConfigError, StorageError
from duoka.runs.folder import read_json
from duoka.store.deepspeed_files import Found

INDEX = ".metadata"
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
_OTHER_VERSION = "where you trust it, convert it with what wrote it:   accelerate merge-weights FOLDER DIR"


@dataclass(eq=False)
class _Made:
    """What a pickle would make by calling `name`; of a bare class or function, the name alone."""

    name: str
    given: Any = None
    state: Any = None
    items: dict[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Part:
    """A box of a tensor: where it begins in it, and in which file it lies."""

    start: tuple[int, ...]
    file: str
    offset: int
    length: int
    is_packed: bool


@dataclass(frozen=True)
class _Tensor:
    dtype: torch.dtype
    size: tuple[int, ...]
    parts: list[_Part]


def find_dcp(folder: Path) -> Path | None:
    """The folder with the model's index: this one, or the one in it that is no optimizer's."""
    if (folder / INDEX).is_file():
        return folder
    inside = [path.parent for path in sorted(folder.glob(f"*/{INDEX}")) if "optim" not in path.parent.name]
    if len(inside) > 1:
        raise ConfigError(
            f"{folder} holds {len(inside)} checkpoints: {', '.join(path.name for path in inside[:4])}",
            fix=f"name one of them:   {inside[-1]}",
        )
    return inside[0] if inside else None


def read_dcp(folder: Path, wanted: Iterable[str]) -> Found:
    """Of the weights in `folder` those that a model has under the names `wanted`, whatever stands before them."""
    try:
        tensors = _read_index(folder)
    except (KeyError, AttributeError, TypeError, ValueError, IndexError) as error:
        raise StorageError(
            f"{folder / INDEX} is written otherwise than the versions of torch that are known here: {error!r}",
            fix=_OTHER_VERSION,
        ) from None
    plain = {_unwrapped(name): name for name in tensors}
    before = _beginning(plain, set(wanted))
    chosen = {name.removeprefix(before): whole for name, whole in plain.items() if name.startswith(before)}
    weights = {name: _read_tensor(folder, whole, tensors[whole]) for name, whole in chosen.items()}
    step = (read_json(folder.parent / "trainer_state.json") or {}).get("global_step")
    kind = f"sharded weights{f' under {before}' if before else ''}"
    return Found(weights, kind, step if isinstance(step, int) else 0)


def _unwrapped(name: str) -> str:
    for word in _WRAPPERS:
        name = name.replace(word, "")
    return name


def _beginning(names: Iterable[str], wanted: set[str]) -> str:
    """What stands before most of the wanted names; of several such, the shortest."""
    counts: dict[str, int] = {}
    for name in names:
        words = name.split(".")
        for count in range(len(words)):
            if ".".join(words[count:]) in wanted:
                start = "".join(f"{word}." for word in words[:count])
                counts[start] = counts.get(start, 0) + 1
    return max(counts, key=lambda start: (counts[start], -len(start)), default="")


# ------------------------------------------------------------------------------------------------ tensors


def _read_tensor(folder: Path, name: str, tensor: _Tensor) -> torch.Tensor:
    whole = torch.empty(tensor.size, dtype=tensor.dtype)
    filled = 0
    for part in tensor.parts:
        value = _read_part(folder, name, part)
        box = tuple(slice(at, at + count) for at, count in zip(part.start, value.shape, strict=False))
        if value.dim() != len(tensor.size) or whole[box].shape != value.shape:
            raise StorageError(
                f"{folder}: a part of {name} has the shape {tuple(value.shape)}, which does not fit its place",
                fix="some of its files are of another step: bring them again, or name another step",
            )
        whole[box] = value
        filled += value.numel()
    if filled != math.prod(tensor.size):
        raise StorageError(
            f"{folder} has {filled:,} of the {math.prod(tensor.size):,} numbers of {name}",
            fix="it was not saved whole: name another step",
        )
    return whole


def _read_part(folder: Path, name: str, part: _Part) -> torch.Tensor:
    path = folder / part.file
    if Path(part.file).name != part.file or part.is_packed:
        how = "packed" if part.is_packed else f"in {part.file!r}, which is no file of this folder"
        raise ConfigError(f"{folder} has {name} {how}: that is not read here", fix=_OTHER_VERSION)
    try:
        with path.open("rb") as file:
            file.seek(part.offset)
            data = file.read(part.length)
        value = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except FileNotFoundError:
        raise StorageError(
            f"{folder} lacks {part.file}, which holds a part of {name}",
            fix="each machine wrote its own files: bring the others' into this folder",
        ) from None
    except (OSError, RuntimeError, EOFError, ValueError, torch.serialization.pickle.UnpicklingError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise StorageError(f"{path} cannot be read: {reason}", fix="copy it again, or name another step") from None
    if not isinstance(value, torch.Tensor):
        raise StorageError(f"{path} holds a {type(value).__name__} where {name} should be", fix=_OTHER_VERSION)
    return value


# -------------------------------------------------------------------------------------------------- index


def _read_index(folder: Path) -> dict[str, _Tensor]:
    """The tensors that an index names. Raises KeyError and its kin where it is no such index."""
    state = _taken_apart((folder / INDEX).read_bytes()).state
    parts: dict[str, list[_Part]] = {}
    for index, info in state["storage_data"].items():
        at, place = index.state, info.state
        offset = at.get("offset")
        part = _Part(
            () if offset is None else offset, str(place["relative_path"]), int(place["offset"]), int(place["length"]),
            bool(place.get("transform_descriptors")),
        )  # fmt: skip
        parts.setdefault(at["fqn"], []).append(part)
    tensors: dict[str, _Tensor] = {}
    for name, one in state["state_dict_metadata"].items():
        if one.name.endswith(".TensorStorageMetadata"):
            kind = one.state["properties"].state[0].name
            dtype = getattr(torch, kind.removeprefix("torch."))
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"{kind} is no type of numbers")
            tensors[name] = _Tensor(dtype, one.state["size"], parts[name])
    return tensors


def _taken_apart(data: bytes) -> Any:
    """What a pickle describes, with a `_Made` in place of every object that it would make."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    for opcode, argument, _ in pickletools.genops(data):
        name = opcode.name
        if name in ("PROTO", "FRAME", "STOP"):
            continue
        if name == "MARK":
            marks.append(len(stack))
        elif name in ("MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT"):
            memo[len(memo) if name == "MEMOIZE" else int(argument or 0)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(memo[int(argument or 0)])
        elif name in _PLAIN:
            stack.append(_PLAIN[name]())
        elif name == "GLOBAL":
            stack.append(_Made(str(argument).replace(" ", ".")))
        elif name in _TUPLES:
            count = _TUPLES[name]
            stack[len(stack) - count :] = [tuple(stack[len(stack) - count :])]
        elif name in ("TUPLE", "APPENDS", "SETITEMS", "ADDITEMS", "FROZENSET"):
            at = marks.pop()
            above, stack[at:] = stack[at:], []
            _take(name, stack, above)
        elif name in ("APPEND", "SETITEM", "STACK_GLOBAL", "REDUCE", "NEWOBJ", "BUILD", "POP"):
            above = [stack.pop() for _ in range(2 if name in ("SETITEM", "STACK_GLOBAL", "REDUCE", "NEWOBJ") else 1)]
            _take(name, stack, above[::-1])
        elif argument is not None and opcode.stack_after and not opcode.stack_before:
            stack.append(argument)  # a number or a word
        else:
            raise ValueError(f"it has {name}")
    (found,) = stack
    return found


_PLAIN: dict[str, Any] = {
    "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False, "EMPTY_TUPLE": tuple, "EMPTY_LIST": list,
    "EMPTY_DICT": dict, "EMPTY_SET": set,
}  # fmt: skip
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def _take(name: str, stack: list[Any], above: list[Any]) -> None:
    """One opcode that takes what lies on top of the stack."""
    if name in ("TUPLE", "FROZENSET"):
        stack.append(tuple(above))
    elif name in ("APPEND", "APPENDS") and isinstance(stack[-1], list):
        stack[-1].extend(above)
    elif name in ("SETITEM", "SETITEMS"):
        target = stack[-1].items if isinstance(stack[-1], _Made) else stack[-1]
        target.update(_pairs(above))
    elif name == "STACK_GLOBAL":
        stack.append(_Made(".".join(above)))
    elif name in ("REDUCE", "NEWOBJ"):
        made, given = above
        # A shape is the one call whose meaning is needed: its numbers.
        is_shape = made.name == "torch.Size"
        stack.append(tuple(given[0]) if is_shape and given else _Made(made.name, given))
    elif name == "BUILD" and isinstance(stack[-1], _Made):
        stack[-1].state = above[0]
    elif name not in ("POP", "APPEND", "APPENDS", "ADDITEMS", "BUILD"):
        raise ValueError(f"it has {name}")


def _pairs(flat: list[Any]) -> Iterator[tuple[Any, Any]]:
    yield from zip(flat[::2], flat[1::2], strict=True)
