"""A frozen base whose layers' matrices are packed into 4 bits (QLoRA), by bitsandbytes: asked for, used, and undone.

build.py calls this while it loads a model. Packing is deterministic: a resumed run has the same weights, in whatever
precision it computes.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from duoka.config.rules_model import GET_PACKER, NO_PACKER
from duoka.config.schema import ModelConfig
from duoka.errors import ConfigError
from duoka.model import native
from duoka.model.decode import MOST_ROWS, multiply_codes
from duoka.model.result import base_dtype
from duoka.runs.folder import read_json

_READERS = {"gptq": ("optimum", "gptqmodel"), "awq": ("gptqmodel",)}  # of files that they packed


@dataclass(frozen=True)
class Quantization:
    """`unpacked`: with the values that packing leaves, but in plain matrices that adapters can be merged into.

    `came`: the folder has its weights packed already.
    """

    kind: str  # nf4 or fp4; int8 of folders that came so
    double: bool
    unpacked: bool = False
    came: bool = False

    @classmethod
    def of(cls, model: ModelConfig | None, *, unpacked: bool = False) -> Quantization | None:
        """What a config asks for; None: weights as they came."""
        if model is None or model.quantization == "none":
            return None
        return cls(model.quantization, model.double_quantization, unpacked)

    @classmethod
    def in_files(cls, folder: Path, *, unpacked: bool = False) -> Quantization | None:
        """How bitsandbytes packed the weights of a folder; None: it did not."""
        how = (read_json(folder / "config.json") or {}).get("quantization_config")
        if not isinstance(how, dict) or how.get("quant_method") != "bitsandbytes":
            return None
        kind = "int8" if how.get("load_in_8bit") else how.get("bnb_4bit_quant_type", "fp4")
        return cls(kind, bool(how.get("bnb_4bit_use_double_quant")), unpacked, came=True)

    def options(self, folder: Path, dtype: torch.dtype) -> dict[str, Any]:
        """What transformers is told when it reads the folder, to compute in `dtype`."""
        if self.came:
            if importlib.util.find_spec("bitsandbytes") is None:
                what = f"the weights in {folder} came packed by bitsandbytes, which is not installed here"
                raise ConfigError(what, fix=GET_PACKER)
            _import_packer()
            return {"dtype": dtype}
        return {"dtype": self.dtype_to_pack_from(folder, dtype), "quantization_config": self.settings(dtype)}

    def settings(self, dtype: torch.dtype) -> Any:
        """What transformers needs to pack while it loads; products are computed in `dtype`."""
        if importlib.util.find_spec("bitsandbytes") is None:
            raise ConfigError(NO_PACKER, fix=GET_PACKER)
        _import_packer()
        from transformers import BitsAndBytesConfig

        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=self.kind,
            bnb_4bit_use_double_quant=self.double,
            bnb_4bit_compute_dtype=dtype,
        )

    @staticmethod
    def dtype_to_pack_from(folder: Path, dtype: torch.dtype) -> torch.dtype:
        """What keeps every bit of the model's files: rounded to bf16 before, other codes would come out in places, and
        a run's weights would depend on what its machine computes in."""
        keeps = dtype == torch.float32 or base_dtype(folder) == dtype
        return dtype if keeps else torch.float32


def _coding_of(folder: Path) -> dict[str, Any] | None:
    """How GPTQ or AWQ packed a folder; None: they did not."""
    how = (read_json(folder / "config.json") or {}).get("quantization_config")
    return how if isinstance(how, dict) and how.get("quant_method") in _READERS else None


def check_codes(folder: Path) -> None:
    """Refuse a folder of GPTQ or AWQ by all that its reading wants: transformers names one package after the other."""
    how = _coding_of(folder)
    if how is None:
        return
    method = how["quant_method"]
    missing = [name for name in _READERS[method] if importlib.util.find_spec(name) is None]
    if missing:
        what = f"the weights in {folder} came packed by {method.upper()}, and what reads them is not installed here"
        fix = f"pip install {' '.join(missing)}\nor name the model that was packed"
        raise ConfigError(f"{what}: {', '.join(missing)}", fix=fix)


def options_to_learn_beside(folder: Path) -> dict[str, Any]:
    """For a folder that GPTQ or AWQ packed and adapters that learn beside it: kernels that hand gradients on. By
    default their package takes the fastest, and most of these only answer."""
    how = _coding_of(folder)
    if how is None:
        return {}
    from transformers.quantizers.auto import AutoQuantizationConfig

    return {"quantization_config": AutoQuantizationConfig.from_dict({**how, "backend": "auto_trainable"})}


def _is_news(record: logging.LogRecord) -> bool:
    """bitsandbytes says of each product in 8 bits that it is computed in fp16: thousands of lines an evaluation."""
    return not str(record.msg).startswith("MatMul8bitLt: inputs will be cast")


logging.getLogger("bitsandbytes.autograd._functions").addFilter(_is_news)


def _import_packer() -> None:
    """Where the CPU computes bf16, bitsandbytes looks for the package `kernels`, to download code by it, and says so
    on the terminal if it is not there. Neither is wanted."""
    if "bitsandbytes" in sys.modules:
        return
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    level, known = logger.level, sys.modules.get("kernels")
    logger.setLevel(logging.ERROR)
    sys.modules["kernels"] = None  # type: ignore[assignment]  # Python's own mark of what is not to be found
    try:
        import bitsandbytes  # noqa: F401
    finally:
        logger.setLevel(level)
        del sys.modules["kernels"]
        if known is not None:
            sys.modules["kernels"] = known


@torch.no_grad()
def read_weight(packed: torch.Tensor, state: Any) -> torch.Tensor:
    """The matrix that packed bytes and their state stand for.

    Asked for block by block: bitsandbytes 0.50 on CPUs with AVX-512 takes the scales of other blocks when rows are not
    whole blocks of 64, and 9 of 10 values are wrong.
    """
    from bitsandbytes.functional import dequantize_4bit

    size, block = state.shape.numel(), state.blocksize
    blocks = copy.copy(state)
    blocks.shape = torch.Size((size // block, block) if size % block == 0 else (1, size))
    return dequantize_4bit(packed, blocks).reshape(state.shape)


@torch.no_grad()
def _read_bytes(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The matrix that codes of 8 bits and a scale for each row stand for."""
    return codes.float() * (scales.to(codes.device).float() / 127)[:, None]


def _bytes_of(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of a layer in 8 bits, wherever bitsandbytes keeps them."""
    scales = layer.state.SCB if layer.weight.SCB is None else layer.weight.SCB
    return layer.weight.data, scales


@dataclass(frozen=True)
class Packed:
    """A weight that lies unpacked only while it is multiplied with."""

    read: Callable[[], torch.Tensor]

    def unpack(self, dtype: torch.dtype) -> torch.Tensor:
        return self.read().to(dtype)


def is_packed(layer: torch.nn.Module) -> bool:
    """Whether it computes by its `packed()` weight."""
    return hasattr(layer, "packed")


def dtype_of(layer: Any) -> torch.dtype:
    """What a linear layer's products are computed in, where no autocast says otherwise."""
    dtype: torch.dtype = layer.compute_dtype if is_packed(layer) else layer.weight.dtype
    return dtype


def weight_in(layer: Any, dtype: torch.dtype) -> torch.Tensor | Packed:
    weight: torch.Tensor | Packed = layer.packed() if is_packed(layer) else layer.weight.to(dtype)
    return weight


class _PackedProduct(torch.autograd.Function):
    """x W' with a packed W, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: Packed) -> torch.Tensor:
        ctx.packed = packed
        return F.linear(x, packed.unpack(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        return grad @ ctx.packed.unpack(grad.dtype), None


@functools.cache
def _exact_linear() -> type:
    from bitsandbytes.nn import Linear4bit

    class ExactLinear4bit(Linear4bit):  # type: ignore[misc]
        """On CPUs always the weights that training, evaluating and merging mean.

        Where the CPU computes bf16, bitsandbytes lays weights out anew at the first pass in eval mode: with scales
        rounded to bf16, for good, and products that know no gradient, so that training after it learns nothing through
        the base. `decodes`: there are answers to write and nothing to train; they come several times as fast by it.
        """

        decodes = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            state = getattr(self.weight, "quant_state", None)
            # One that was brought together from ranks has none: bitsandbytes would put another parameter in its place.
            if state is not None and (x.device.type != "cpu" or (self.decodes and self._can_be_laid_out())):
                return super().forward(x)  # type: ignore[no-any-return]
            return _multiply(x, self)

        def packed(self) -> Packed:
            state = getattr(self.weight, "quant_state", None) or self.quant_state
            return Packed(partial(read_weight, self.weight.data, state))

        def _can_be_laid_out(self) -> bool:
            """Rows of whole blocks, in strips of 32, for a model that computes in bf16 anyway."""
            whole = self.in_features % 64 == 0 and self.out_features % 32 == 0
            return bool(self.support_avx512bf16_for_cpu) and self.compute_dtype == torch.bfloat16 and whole

    return ExactLinear4bit


@functools.cache
def _exact_bytes() -> type:
    from bitsandbytes.nn import Linear8bitLt

    class ExactLinear8bit(Linear8bitLt):  # type: ignore[misc]
        """The weights that merging means, as in 4 bits.

        bitsandbytes rounds a layer's inputs to 8 bits too, but for columns in which any row has a large number: what
        came out for a row hung on the rows beside it, in a server's answers.
        """

        compute_dtype: torch.dtype | None = None
        decodes = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.decodes and (answer := _by_codes(x, self)) is not None:
                return answer
            return _multiply(x, self)

        def packed(self) -> Packed:
            return Packed(partial(_read_bytes, *_bytes_of(self)))

    return ExactLinear8bit


def _by_codes(x: torch.Tensor, layer: Any) -> torch.Tensor | None:
    """Of few rows: to unpack a matrix for one token takes longer than the product. None: it is not for them."""
    codes, scales = _bytes_of(layer)
    inputs = x.to(layer.compute_dtype or x.dtype)
    is_small = x.numel() <= MOST_ROWS * codes.shape[1] and not torch.is_grad_enabled()
    if not is_small or codes.device.type != "cpu" or not codes.is_contiguous() or not native.serves(inputs):
        return None
    return multiply_codes(inputs, codes, scales / 127, layer.bias).to(x.dtype)


def _multiply(x: torch.Tensor, layer: Any) -> torch.Tensor:
    product: torch.Tensor = _PackedProduct.apply(x.to(layer.compute_dtype or x.dtype), layer.packed())
    return (product if layer.bias is None else product + layer.bias.to(product.dtype)).to(x.dtype)


def compute_in(model: torch.nn.Module, dtype: torch.dtype, packing: Quantization) -> None:
    """Make a model that was just packed compute in `dtype`, by the weights that packing left; in place."""
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    if packing.unpacked:
        _unpack(model, dtype)
    wide = {part for names in ("", "_strict") for part in getattr(model, f"_keep_in_fp32_modules{names}", None) or ()}
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not wide & set(name.split(".")):
            # A copy: one view of the files' pages would keep all of them in memory, of the layers that were packed too.
            parameter.data = parameter.data.to(dtype, copy=not packing.came)
    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.__class__ = _exact_linear()
            module.weight.quant_state.dtype = module.compute_dtype = dtype
            module.compute_type_is_set = True
        elif isinstance(module, Linear8bitLt):
            module.__class__ = _exact_bytes()
            module.compute_dtype = dtype  # type: ignore[assignment]
    model.config.dtype = dtype  # type: ignore[union-attr]


def decode_fast(model: torch.nn.Module) -> None:
    """For models that write answers: packed layers may be laid out anew, and weights be off by bf16's rounding."""
    for module in model.modules():
        if hasattr(module, "decodes"):
            module.decodes = True  # type: ignore[assignment]


@torch.no_grad()
def _unpack(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Plain linear layers in place of packed ones, with the weights that these compute with."""
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    for name, module in list(model.named_modules()):
        if isinstance(module, Linear4bit):
            weight = read_weight(module.weight.data, module.weight.quant_state).to(dtype)
        elif isinstance(module, Linear8bitLt):
            weight = _read_bytes(*_bytes_of(module)).to(dtype)
        else:
            continue
        with torch.device("meta"):
            plain = torch.nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)
        plain.weight = torch.nn.Parameter(weight, requires_grad=False)
        plain.bias = module.bias
        above, _, last = name.rpartition(".")
        setattr(model.get_submodule(above), last, plain)
    for attribute in ("hf_quantizer", "quantization_method", "is_loaded_in_4bit", "is_quantized"):
        if hasattr(model, attribute):
            delattr(model, attribute)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    # How the files' packed bytes became weights, which transformers would do backwards when it writes them.
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is not None:
        kept = [one for one in conversions if not any("Deserialize" in type(op).__name__ for op in _steps(one))]
        model._weight_conversions = kept or None  # type: ignore[assignment]


def _steps(conversion: Any) -> Sequence[Any]:
    return getattr(conversion, "operations", None) or ()
