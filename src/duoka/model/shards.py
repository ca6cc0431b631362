"""Weights by boxes: a model is built without memory, and each rank reads only the part of each tensor that it keeps.

Called when the layout shards weights. What cannot be built this way (names that transformers converts on loading,
quantized weights, buffers that nobody knows how to fill) is said by returning None: the caller then loads it whole.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import safe_open

from duoka.config.schema import LoraConfig
from duoka.hub.new_model import is_new
from duoka.hub.weight_files import INDEX, SINGLE
from duoka.model.adapters import Earlier
from duoka.model.attention import register_attention
from duoka.model.auto_class import language_class
from duoka.model.box import Box
from duoka.model.build import quiet_loading
from duoka.model.dtypes import stays_wide
from duoka.model.expert_files import ExpertFiles
from duoka.model.experts import use_own_experts
from duoka.model.freeze import apply_train_only, freeze_beside_text
from duoka.model.lora import adapted_modules, apply_lora, begin_adapter, is_adapter, keep_starts
from duoka.model.pissa import PissaStarts, check_untied
from duoka.model.random_init import RandomWeights, random_weights
from duoka.model.reading import say_untied
from duoka.model.request import ModelRequest

_MAPPED_BYTES = 64 * 2**20  # of files, that count as this process's memory until they are let go of


@dataclass
class WeightSource:
    """Where each parameter's values come from: a safetensors file of `folder`, or an adapter's own beginning."""

    folder: Path
    seed: int
    files: dict[str, str]  # name in the folder -> file
    starts: PissaStarts | None = None
    dtype: torch.dtype | None = None  # that the model is built in
    earlier: Earlier | None = None
    _open: dict[str, Any] = field(default_factory=dict)
    _num_read: int = 0  # bytes, since files were opened
    _joined: dict[tuple[str, int], ExpertFiles | None] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path, seed: int) -> WeightSource | None:
        if (folder / SINGLE).is_file():  # where both lie there, it is this one that transformers reads
            with safe_open(folder / SINGLE, framework="pt") as file:
                return cls(folder, seed, dict.fromkeys(file.keys(), SINGLE))
        if not (folder / INDEX).is_file():
            return None
        files: dict[str, str] = {}
        # Which files belong to the model the index says, what lies in them they say: transformers too goes by that.
        for name in sorted(set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())):
            with safe_open(folder / name, framework="pt") as file:
                files |= dict.fromkeys(file.keys(), name)
        return cls(folder, seed, files)

    def knows(self, name: str, shape: torch.Size) -> bool:
        """True when `read` will find a tensor of this shape under the module's parameter `name`."""
        if is_adapter(name):
            return True
        stored = self._in_files(name)
        if stored in self.files:
            return self._shape_of(stored) == tuple(shape)
        experts = self._experts(stored, shape)
        return experts is not None and experts.fits(shape, self._shape_of)

    def differ(self, name: str, other: str) -> bool:
        """True where both are in the files, with other values."""
        if name not in self.files or other not in self.files:
            return False
        shape = self._shape_of(name)
        if self._shape_of(other) != shape:
            return True
        rows = max(1, _MAPPED_BYTES // max(1, 4 * math.prod(shape[1:])))
        parts = (slice(first, first + rows) for first in range(0, shape[0], rows))
        return any(not torch.equal(*(self._file(one).get_slice(one)[part] for one in (name, other))) for part in parts)

    def _shape_of(self, stored: str) -> tuple[int, ...]:
        return tuple(self._file(stored).get_slice(stored).get_shape())

    def _in_files(self, name: str) -> str:
        """The name of a parameter or a buffer in the files; Mixtral's have another one for the router."""
        stored = stored_name(name)
        other = stored.replace(".mlp.gate.", ".block_sparse_moe.gate.")
        return other if stored not in self.files and other in self.files else stored

    def _experts(self, stored: str, shape: torch.Size) -> ExpertFiles | None:
        if (stored, len(shape)) not in self._joined:
            self._joined[stored, len(shape)] = ExpertFiles.of(stored, self.files, shape[0]) if len(shape) == 3 else None
        return self._joined[stored, len(shape)]

    def read(self, name: str, shape: torch.Size, box: Box | None = None) -> torch.Tensor:
        """What lies in `box` of the tensor, by default all of it; of a file, only these bytes are read."""
        box = box or Box.whole(shape)
        if is_adapter(name):
            if self.starts is not None:
                return self.starts.values(name)[box.slices].clone()  # training works in place, and starts must stay
            return begin_adapter(name, shape, self.seed, self.earlier)[box.slices]
        stored = self._in_files(name)
        if stored not in self.files and (experts := self._experts(stored, shape)) is not None:
            return experts.read(shape, box, lambda one, part: self._file(one).get_slice(one)[part])
        file = self._file(stored)
        values: torch.Tensor = file.get_slice(stored)[box.slices] if shape else file.get_tensor(stored)
        module = stored.removesuffix(".weight")
        if self.earlier is not None and self.earlier.changes(module):
            return self.earlier.merge_part(module, values.to(self.dtype), box)
        if self.starts is not None and self.starts.owns(name):
            return self.starts.rest_of(name, values.to(self.dtype), box)
        values = values.clone()  # the slice is a view of the whole file in memory, which would never be let go
        self._num_read += values.nbytes
        if self._num_read > _MAPPED_BYTES:
            self.close()
        return values

    def start_with_principal_parts(self, lm: torch.nn.Module, lora: LoraConfig, dtype: torch.dtype) -> None:
        """Adapters begin with the strongest directions of the base, whole weights of which are read once for it."""
        starts = PissaStarts(lora, self.seed)
        modules = adapted_modules(lm)
        check_untied(lm, list(modules))
        for module, lies in modules.items():
            stored = stored_name(f"{module}.base_layer.weight")
            starts.add(module, self._file(stored).get_tensor(stored).to(dtype), lies=lies)
        self.starts = starts
        keep_starts(lm, starts)

    def _file(self, stored: str) -> Any:
        name = self.files[stored]
        if name not in self._open:
            self._open[name] = safe_open(self.folder / name, framework="pt")
        return self._open[name]

    def close(self) -> None:
        """Files open again when they are read."""
        self._open.clear()
        self._num_read = 0


Weights: TypeAlias = WeightSource | RandomWeights


def stored_name(name: str) -> str:
    """The name of a parameter in the base model's files: without what PEFT puts around and into it."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def build_without_memory(request: ModelRequest) -> tuple[torch.nn.Module, Weights] | None:
    """The model on the meta device, buffers filled, and where its weights are; None: load it whole."""
    from transformers import AutoConfig, GenerationConfig

    if request.scores:
        return None  # a head that no file has
    folder, dtype, lora, seed, earlier = request.folder, request.dtype, request.lora, request.seed, request.earlier
    trust_remote_code, train_only = request.trust_remote_code, request.train_only
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    source: Weights | None
    source = random_weights(folder, config, seed) if is_new(folder) else WeightSource.of(folder, seed)
    is_packed = request.packing is not None or getattr(config, "quantization_config", None) is not None
    if source is None or is_packed:
        return None
    register_attention()
    with quiet_loading(), torch.device("meta"):
        core = language_class(config).from_config(
            config, dtype=dtype, attn_implementation=request.named_attention, trust_remote_code=trust_remote_code
        )
    if isinstance(source, WeightSource):
        _untie(core, source)
    if request.has_own_experts:
        use_own_experts(core)
    _widen_buffers(core, dtype)
    if (folder / "generation_config.json").is_file():
        core.generation_config = GenerationConfig.from_pretrained(folder)
    if not _fill_buffers(core) or not _read_buffers(core, source):
        return None
    freeze_beside_text(core)
    if train_only is not None:
        apply_train_only(core, train_only)
    if lora is not None:
        with quiet_loading(), torch.device("meta"):
            lm: torch.nn.Module = apply_lora(core, lora, seed, earlier)
    else:
        lm = core
    aliases: dict[int, list[str]] = {}
    for name, parameter in lm.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    shapes = {id(parameter): parameter.shape for parameter in lm.parameters()}
    known = all(any(source.knows(name, shapes[one]) for name in names) for one, names in aliases.items())
    if isinstance(source, WeightSource):
        source.earlier, source.dtype = earlier, dtype
        if known and lora is not None and lora.init == "pissa":
            source.start_with_principal_parts(lm, lora, dtype)
    return (lm, source) if known else None


def _untie(core: Any, source: WeightSource) -> None:
    """Weights that the config shares stay apart where the files have other values for them, as transformers has it."""
    for name, other in list(core.all_tied_weights_keys.items()):
        if not source.differ(name, other):
            continue
        path, _, last = name.rpartition(".")
        shared = core.get_parameter(name)
        setattr(core.get_submodule(path), last, torch.nn.Parameter(torch.empty_like(shared)))
        del core.all_tied_weights_keys[name]
    say_untied(core)


def _widen_buffers(core: torch.nn.Module, dtype: torch.dtype) -> None:
    """As transformers reads them from files: built from a config alone, all have the weights' type."""
    is_wide = stays_wide(core, dtype)
    for path, module in core.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point() and is_wide(f"{path}.{name}"):
                module._buffers[name] = buffer.float()


def _fill_buffers(core: torch.nn.Module) -> bool:
    """Give real memory to buffers (rotary tables: small) and let transformers compute them; False if it cannot."""
    filled: list[torch.Tensor] = []
    # Each inner model fills its own modules, by attributes that the outer one may not have (Gemma3n).
    models: dict[str, Any] = {name: one for name, one in core.named_modules() if hasattr(one, "_init_weights")}
    for path, module in core.named_modules():
        on_meta = [name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
        for name in on_meta:
            buffer = module._buffers[name]
            assert buffer is not None
            if not buffer.is_floating_point():
                return False
            # NaN shows which were left out.
            module._buffers[name] = torch.full(buffer.shape, torch.nan, dtype=buffer.dtype)
        if on_meta:
            owner = max((name for name in models if not name or f"{path}.".startswith(f"{name}.")), key=len)
            with torch.no_grad():
                models[owner]._init_weights(module)
            filled += [value for name in on_meta if (value := module._buffers[name]) is not None]
    return all(not bool(buffer.isnan().any()) for buffer in filled)


def _read_buffers(core: torch.nn.Module, source: Weights) -> bool:
    """Buffers that are a part of the model (a router's bias) have the files' values; False if these are not there."""
    saved = core.state_dict(keep_vars=True)
    for name, buffer in core.named_buffers():
        if name not in saved:
            continue
        if not isinstance(source, WeightSource) or not source.knows(name, buffer.shape):
            return False
        buffer.copy_(source.read(name, buffer.shape))
    return True
