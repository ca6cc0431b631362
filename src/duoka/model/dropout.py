"""Dropout that is counted, not drawn: a unit is dropped by the key of its token and by where in the model it is.

Torch's dropout draws in the order in which a micro-batch lies in memory, so another split gives another training. Here
a mask is a hash of (token key, place in the model, unit): the same packed or padded, on any rank, computed again in the
backward pass. data/feed/token_keys.py makes the keys; LossModel brings them here. Passes without keys (people's own
batches) draw as torch does.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from duoka.errors import ConfigError
from duoka.model import native

_LEVELS = 2**16  # 16 bits of a hash decide a unit: shares are kept to 1/65,536
_UNITS_PER_HASH = 4


def _signed(value: int) -> int:
    """The same 64 bits as torch's int64 has them."""
    return value - 2**64 if value >= 2**63 else value


def _wrapped(value: int) -> int:
    """As int64 arithmetic runs over."""
    return _signed(value % 2**64)


# splitmix64: the step between hashes, and the factors of its finalizer. Of the finalizer's three shifts the last is
# left out and the others keep the sign: a CPU has no logical shift of int64, and no bit of a mask can tell.
_STEP = _signed(0x9E3779B97F4A7C15)
_FIRST, _SECOND = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)
_PAIR = _signed(0xD6E8FEB86659FD93)  # tells a query's key from a key's


def place_key(name: str, call: int = 0) -> int:
    """Where in the model, as a number: the dropout of this name, or the call-th of the layer of this name."""
    return _signed(int.from_bytes(hashlib.blake2b(f"{name}/{call}".encode(), digest_size=8).digest(), "little"))


def level_of(p: float) -> int:
    """How many of 65,536 are dropped: never none and never all, where a share of them is asked for."""
    return min(max(round(p * _LEVELS), 1), _LEVELS - 1)


def keep_scale(level: int) -> float:
    return _LEVELS / (_LEVELS - level)


def dropped(keys: torch.Tensor, place: int, num_units: int, level: int) -> torch.Tensor:
    """True where a unit is dropped: (*keys.shape, num_units)."""
    num_hashes = -(-num_units // _UNITS_PER_HASH)
    hashes = counted(keys + place, torch.arange(num_hashes, device=keys.device))
    return hashes.view(torch.int16)[..., :num_units] < level - _LEVELS // 2


def counted(keys: torch.Tensor | int, places: torch.Tensor) -> torch.Tensor:
    """A hash of 64 bits for each of `places` (int64) under each of `keys`: (*keys.shape, *places.shape)."""
    hashes = _times_step(places) + (keys if isinstance(keys, int) else keys.unsqueeze(-1))
    shifted = hashes >> 32
    hashes.bitwise_xor_(shifted).mul_(_FIRST)
    torch.bitwise_right_shift(hashes, 29, out=shifted)
    return hashes.bitwise_xor_(shifted).mul_(_SECOND)


def _times_step(places: torch.Tensor) -> torch.Tensor:
    """places * _STEP, of which the lowest 64 bits are meant.

    Compiled for a CPU a range of places is no tensor but a loop's counter, and the product that of a signed number in
    C++. From one that overflows gcc concludes that the counter stays small, and leaves out the end of the loop: masks
    were wrong and memory behind them was written. So the compiler is not shown the product there.
    """
    if torch.compiler.is_compiling() and places.device.type == "cpu":
        return _hidden_product(places)
    return places * _STEP


@torch.library.custom_op("duoka::places_times_step", mutates_args=())
def _hidden_product(places: torch.Tensor) -> torch.Tensor:
    return places * _STEP


@_hidden_product.register_fake
def _(places: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(places)


def drop_units(x: torch.Tensor, keys: torch.Tensor, place: int, level: int, *, in_place: bool = False) -> torch.Tensor:
    """x (*keys.shape, ...) with its dropped units 0, not scaled. A CPU needs no mask for it: the same bits."""
    if native.serves(x) and x.is_contiguous() and keys.is_contiguous():
        return native.drop(x, keys, place, level, in_place=in_place)
    mask = dropped(keys, place, math.prod(x.shape[keys.ndim :]), level).view(x.shape)
    return x.masked_fill_(mask, 0.0) if in_place else x.masked_fill(mask, 0.0)


class _Drop(torch.autograd.Function):
    """Keeps the keys, 8 bytes a token, and computes the mask again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, keys: torch.Tensor, place: int, level: int) -> torch.Tensor:
        ctx.save_for_backward(keys)
        ctx.place, ctx.level = place, level
        return drop_units(x, keys, place, level).mul_(keep_scale(level))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        (keys,) = ctx.saved_tensors
        return drop_units(grad, keys, ctx.place, ctx.level).mul_(keep_scale(ctx.level)), None, None, None


def drop(x: torch.Tensor, keys: torch.Tensor, place: int, p: float, name: str) -> torch.Tensor:
    """Dropout of (rows, tokens, ...), or of the same with rows and tokens in one dim; or of a written-out attention's
    weights (rows, heads, tokens, tokens), or of the same with rows and heads in one dim."""
    level = level_of(p)
    if _are_weights(x, keys):
        weights = x.view(len(keys), -1, *x.shape[-2:])
        return _drop_weights(weights, keys, keys, place, level, (0, weights.shape[1])).view(x.shape)
    if x.shape[: keys.ndim] != keys.shape:
        if x.ndim < 2 or x.shape[0] != keys.numel():
            raise ConfigError(
                f"{name} drops units of a tensor of {tuple(x.shape)}, and {tuple(keys.shape)} tokens are computed",
                where="which token a row of it belongs to cannot be told, so its dropout would depend on the split",
                fix="set lora.dropout, or the dropout in the model's config.json, to 0",
            )
        keys = keys.reshape(-1)
    if torch.compiler.is_compiling():  # the compiler chooses what to keep by itself
        mask = dropped(keys, place, math.prod(x.shape[keys.ndim :]), level).view(x.shape)
        return torch.where(mask, 0.0, x * keep_scale(level))
    answer: torch.Tensor = _Drop.apply(x, keys, place, level)
    return answer


def _are_weights(x: torch.Tensor, keys: torch.Tensor) -> bool:
    """Whether these are an attention's weights, and no states, which may be as wide as there are tokens."""
    rows, tokens = keys.shape if keys.ndim == 2 else (0, 0)
    if not rows or x.ndim not in (3, 4) or x.shape[-2:] != (tokens, tokens):
        return False
    return x.shape[0] == rows if x.ndim == 4 else x.shape[0] % rows == 0 and x.shape[0] > rows


def _drop_weights(
    weights: torch.Tensor, asking: torch.Tensor, asked: torch.Tensor, place: int, level: int, heads: tuple[int, int]
) -> torch.Tensor:
    """Dropout of (rows, heads, queries, keys) by both tokens' keys; `heads`: which is the first here of how many."""
    pairs = asking[:, :, None] * _PAIR + asked[:, None, :]
    first, num_heads = heads
    mask = dropped(pairs, place, num_heads, level)[..., first : first + weights.shape[1]].permute(0, 3, 1, 2)
    return weights.masked_fill(mask, 0.0) * keep_scale(level)


class _Here(threading.local):
    """Where this thread's pass stands: replicas run in threads of their own, and backward passes on GPUs too."""

    device = 0
    layer = ""
    call = 0


_HERE = _Here()


class Drops:
    """A model's places of dropout, and the keys of the tokens that it computes just now."""

    def __init__(self, *, own: bool) -> None:
        self.own = own  # the model drops by itself, beside what adapters do: by calls that come in a layer's order
        self.keys: list[torch.Tensor | None] = [None] * max(1, torch.cuda.device_count())  # by device

    def keys_on(self, device: torch.device) -> torch.Tensor | None:
        return self.keys[device.index or 0]

    @contextlib.contextmanager
    def counting(self, keys: torch.Tensor) -> Iterator[None]:
        """Around a pass over the tokens of these keys."""
        _HERE.device, _HERE.layer, _HERE.call = keys.device.index or 0, "", 0
        with self._with_keys(_HERE.device, keys):
            yield

    @property
    def call(self) -> int:
        """How many calls were counted in this layer."""
        return _HERE.call

    @contextlib.contextmanager
    def counting_part(self, take: Callable[[torch.Tensor], torch.Tensor], call: int) -> Iterator[None]:
        """Around the computation of some of the pass's tokens, which `take` takes of all; after `call` calls, as are
        the others."""
        keys, _HERE.call = self.keys[_HERE.device], call
        with contextlib.nullcontext() if keys is None else self._with_keys(_HERE.device, take(keys)):
            yield

    def again(self) -> Callable[[], contextlib.AbstractContextManager[None]]:
        """Makes what stands around each recomputation of the pass that this is called in."""
        keys = self.keys[_HERE.device]
        return contextlib.nullcontext if keys is None else functools.partial(self._again, vars(_HERE).copy(), keys)

    @contextlib.contextmanager
    def _again(self, here: dict[str, Any], keys: torch.Tensor) -> Iterator[None]:
        # Where the layer began: its hook may lie outside of what is computed again.
        vars(_HERE).update(here)
        with self._with_keys(_HERE.device, keys):
            yield

    @contextlib.contextmanager
    def _with_keys(self, device: int, keys: torch.Tensor) -> Iterator[None]:
        before, self.keys[device] = self.keys[device], keys
        try:
            with _OwnDropout(keys) if self.own else contextlib.nullcontext():
                yield
        finally:
            self.keys[device] = before

    def attention(
        self,
        device: torch.device,
        p: float,
        whole_rows: Callable[[torch.Tensor], torch.Tensor] | None = None,
        heads: tuple[int, int] | None = None,
    ) -> Callable[..., torch.Tensor] | None:
        """Drops weights (rows, heads, queries, keys) that begin at tokens of a row; None without keys to count from.

        By the query's token, the key's token and the head. Where ranks share rows, `whole_rows` brings their keys
        together, and `heads` says which head of how many the first here is.
        """
        keys = self.keys_on(device)
        if keys is None:
            return None
        place, level = _next_place(), level_of(p)
        row = keys if whole_rows is None else whole_rows(keys)

        def drop_weights(weights: torch.Tensor, first_query: int = 0, first_key: int = 0) -> torch.Tensor:
            asking = row[:, first_query : first_query + weights.shape[2]]
            asked = row[:, first_key : first_key + weights.shape[3]]
            return _drop_weights(weights, asking, asked, place, level, heads or (0, weights.shape[1]))

        return drop_weights


def _next_place() -> int:
    _HERE.call += 1
    return place_key(_HERE.layer, _HERE.call)


class _OwnDropout(TorchFunctionMode):
    """Counts where a model calls torch's dropout itself, by module or by function."""

    def __init__(self, keys: torch.Tensor) -> None:
        super().__init__()
        self.token_keys = keys

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.dropout:
            return _count_call(self.token_keys, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _count_call(
    keys: torch.Tensor, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    """F.dropout's signature; never in place, which is only ever a matter of memory."""
    if not training or not p:
        return input
    return drop(input, keys, _next_place(), p, f"dropout number {_HERE.call} of {_HERE.layer or 'the model'}")


class CountedDropout(torch.nn.Dropout):
    """An adapter's dropout."""

    def __init__(self, p: float, name: str, drops: Drops) -> None:
        super().__init__(p)
        self.name = name
        self.place = place_key(name)
        self.drops = drops

    def begin_at(self, unit: int) -> None:
        """Its input begins at this unit of the whole: a rank of several that share a layer has a part of them."""
        if unit % _UNITS_PER_HASH:
            raise ConfigError(
                f"{self.name} begins on this rank at unit {unit}, and dropout is counted from multiples of "
                f"{_UNITS_PER_HASH}",
                fix="set lora.dropout to 0, or write another   tensor:",
            )
        self.place = _wrapped(place_key(self.name) + unit // _UNITS_PER_HASH * _STEP)

    def counted_keys(self, x: torch.Tensor) -> torch.Tensor | None:
        """What to count from in this pass; None where nothing is dropped, or torch draws."""
        return self.drops.keys_on(x.device) if self.training and self.p else None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        keys = self.counted_keys(input)
        return super().forward(input) if keys is None else drop(input, keys, self.place, self.p, self.name)


def count_dropout(lm: torch.nn.Module) -> Drops | None:
    """Let all dropout of a language model be counted, in place; None when it has none."""
    adapters = {
        name: module
        for name, module in lm.named_modules()
        if type(module) is torch.nn.Dropout and _is_of_adapter(name) and module.p
    }
    own = _drops_itself(lm, adapters)
    if not adapters and not own:
        return None
    drops = Drops(own=own)
    for name, module in adapters.items():
        parent, _, child = name.rpartition(".")
        counted = CountedDropout(module.p, name, drops).train(module.training)
        lm.get_submodule(parent).register_module(child, counted)
    if own:
        _follow_layers(lm, drops)
    return drops


def _is_of_adapter(name: str) -> bool:
    return ".lora_dropout." in name


def stop_dropout(lm: torch.nn.Module, *, but_adapters: bool = False) -> None:
    """Let nothing of a language model drop anything: for losses that compare it with what it was.

    `but_adapters`: what is asked for by lora.dropout stays.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    for place, module in lm.named_modules():
        if but_adapters and _is_of_adapter(place):
            continue
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):  # what attention hands on
                setattr(module, name, 0.0)
        if isinstance(module, GradientCheckpointingLayer) and hasattr(module, "config"):
            module.config = _without_dropout(module.config)  # Falcon's layers read their share there


def _without_dropout(config: Any) -> Any:
    """A copy: the model's own is saved beside its weights."""
    out = copy.copy(config)
    for name, value in vars(config).items():
        if "drop" in name and isinstance(value, float):
            setattr(out, name, 0.0)
    return out


def _drops_itself(lm: torch.nn.Module, adapters: dict[str, Any]) -> bool:
    config = getattr(lm, "config", None)
    find = getattr(config, "get_text_config", None)
    facts = vars(find()) if callable(find) else {}
    shares = [value for key, value in facts.items() if "drop" in key and isinstance(value, float)]
    modules = [m for name, m in lm.named_modules() if isinstance(m, torch.nn.Dropout) and name not in adapters and m.p]
    return any(shares) or bool(modules)


def _follow_layers(lm: torch.nn.Module, drops: Drops) -> None:
    """Calls are numbered from each layer's beginning on: that is where what is computed again begins, too."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    def enter(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            _HERE.layer, _HERE.call = name, 0

        return hook

    for name, module in lm.named_modules():
        # Not a child: attention reads it.
        module.counted_drops = drops  # type: ignore[assignment]
        if isinstance(module, GradientCheckpointingLayer):
            module.register_forward_pre_hook(enter(name))
