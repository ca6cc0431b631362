"""Low-rank adapters through PEFT: inserted, counted, never touching the base weights."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

from duoka.config.adapters import HOLDS, WEIGHTS
from duoka.config.schema import LoraConfig
from duoka.errors import ConfigError
from duoka.model.adapters import Earlier
from duoka.model.box import Box
from duoka.model.expert_adapters import adapt_rows
from duoka.model.layers import beside_text, skipped_layers
from duoka.model.pissa import PissaStarts, as_plain_adapter, check_untied, draw_seed

STARTS = "pissa_starts"  # where a model keeps what its adapters began with
EARLIER = "earlier_adapters"  # and those that were laid into its base
HELD = "held_adapters"  # and all that are part of its adapter, by name and digest


def apply_lora(
    model: torch.nn.Module, lora: LoraConfig, seed: int = 0, earlier: Earlier | None = None, *, scores: bool = False
) -> torch.nn.Module:
    """Freeze the model and put trainable adapters beside its linear layers; returns the PeftModel.

    They begin from the seed, or where `earlier` ended. What is to be merged into the base is there already. With
    `scores` the head of a sequence classifier is trained as it is, and saved with the adapters.
    """
    with without_packer():
        return _apply_lora(model, lora, seed, earlier, scores)


@contextlib.contextmanager
def quiet_adapters() -> Iterator[None]:
    """PEFT without its warnings of what it does right by itself, and no user can change."""
    with warnings.catch_warnings():
        # It knows of experts that it could adapt, and warns where it was not asked to.
        warnings.filterwarnings("ignore", message=r".*(rank|alpha)_pattern keys did not match", category=RuntimeWarning)
        # GPT-2's layers hold their weights the other way round.
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to", category=UserWarning)
        yield


@contextlib.contextmanager
def without_packer() -> Iterator[None]:
    """PEFT alone: where bitsandbytes is installed it imports that too, which takes a quarter of a start, for nothing.

    A model that bitsandbytes has packed has imported it before; then nothing is kept from PEFT.
    """
    name = "bitsandbytes"
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]  # Python's own mark of what is not to be found
    try:
        yield
    finally:
        del sys.modules[name]
        found = sys.modules.get("peft.import_utils")
        for question in ("is_bnb_available", "is_bnb_4bit_available"):
            # It remembers the answer, and a later model may be packed.
            getattr(getattr(found, question, None), "cache_clear", bool)()


def _apply_lora(
    model: torch.nn.Module, lora: LoraConfig, seed: int, earlier: Earlier | None, scores: bool
) -> torch.nn.Module:
    import peft

    if lora.targets != "all":
        _check_targets(model, lora.targets)
    settings = peft.LoraConfig(
        task_type=peft.TaskType.SEQ_CLS if scores else peft.TaskType.CAUSAL_LM,
        r=lora.rank,
        lora_alpha=lora.alpha if lora.alpha != int(lora.alpha) else int(lora.alpha),  # type: ignore[arg-type]
        lora_dropout=lora.dropout,
        target_modules=_find_targets(model, lora.targets),
        exclude_modules=_not_to_adapt(model),
        bias="none",
    )
    with quiet_adapters():
        try:
            adapted = peft.get_peft_model(model, settings)
        except ValueError as error:
            if lora.dropout and "lora_dropout" in str(error):  # of its wrapper of a single tensor
                raise ConfigError(
                    f"lora.dropout is {lora.dropout:g}, and lora.targets takes in experts or a router, whose adapters "
                    "have none",
                    fix="write:   dropout: 0   or   targets: [q_proj, k_proj, v_proj, o_proj]",
                ) from error
            raise ConfigError(
                f"PEFT puts no such adapters on this model: {str(error).strip().splitlines()[0]}",
                fix="write:   targets: [q_proj, k_proj, v_proj, o_proj]   or other linear layers of the model",
            ) from error
    if experts := adapted_experts(adapted):
        _check_experts(experts, lora, earlier)
        adapt_rows(adapted)
    keep_earlier(adapted, earlier)
    if any(parameter.is_meta for parameter in adapted.parameters()):
        return adapted
    with torch.no_grad():
        if lora.init == "pissa":
            _start_with_principal_parts(adapted, lora, seed)
            return adapted
        for name, parameter in adapted.named_parameters():
            if is_adapter(name):
                parameter.copy_(begin_adapter(name, parameter.shape, seed, earlier))
            elif parameter.requires_grad:
                parameter.data = parameter.data.float()  # a head that is trained, on a base in half precision
    return adapted


def _start_with_principal_parts(adapted: torch.nn.Module, lora: LoraConfig, seed: int) -> None:
    starts = PissaStarts(lora, seed)
    named, modules = dict(adapted.named_parameters(remove_duplicate=False)), adapted_modules(adapted)
    check_untied(adapted, list(modules))
    for name, lies in modules.items():
        starts.add(name, named[f"{name}.base_layer.weight"], lies=lies)
    for name, parameter in named.items():
        if is_adapter(name):
            parameter.copy_(starts.values(name))
        elif starts.owns(name):
            parameter.copy_(starts.rest_of(name, parameter, Box.whole(parameter.shape)))
    keep_starts(adapted, starts)


def keep_starts(adapted: torch.nn.Module, starts: PissaStarts) -> None:
    """Leave the starts with the model: export uses them to turn the adapter into a plain one."""
    setattr(adapted, STARTS, starts)


def keep_earlier(adapted: torch.nn.Module, earlier: Earlier | None, held: dict[str, str] | None = None) -> None:
    """Leave with the model what lies below its adapter, and the names of all that is part of it."""
    setattr(adapted, EARLIER, earlier)
    setattr(adapted, HELD, (held or {}) | (earlier.held() if earlier else {}))


def adapted_experts(adapted: torch.nn.Module) -> list[str]:
    """Names of PEFT's wrappers of single tensors: experts of a mixture, which are no linear layers, and its routers."""
    return [name for name, module in adapted.named_modules() if hasattr(module, "lora_A") and _wraps_tensor(module)]


def _wraps_tensor(module: torch.nn.Module) -> bool:
    return getattr(module, "parameter_name", None) is not None and not _is_linear(module.get_base_layer())  # type: ignore[operator]


def _check_experts(names: list[str], lora: LoraConfig, earlier: Earlier | None) -> None:
    """What is not there for adapters of tensors that hold a matrix for each expert."""
    wish = "lora.init: pissa" if lora.init == "pissa" else "lora.adapter and lora.merge" if earlier is not None else ""
    if wish:
        raise ConfigError(
            f"{wish} works on linear layers, and lora.targets takes in experts or a router",
            where=f"{names[0]} (and {len(names) - 1} more)",
            fix="write:   targets: [q_proj, k_proj, v_proj, o_proj]",
        )


def adapted_modules(adapted: torch.nn.Module) -> dict[str, bool]:
    """Names of the modules with an adapter beside them, and whether their base weight is (in, out)."""
    return {
        name: bool(getattr(module, "fan_in_fan_out", False))
        for name, module in adapted.named_modules()
        if hasattr(module, "lora_A")
    }


def save_adapter(lm: torch.nn.Module, folder: Path, state: dict[str, torch.Tensor] | None = None) -> None:
    """Write the adapter as a PEFT folder for the base as it came; `state` has whole tensors where `lm` has shards."""
    _save_tensors(lm, folder, state)
    if held := getattr(lm, HELD, {}):
        (folder / HOLDS).write_text(json.dumps(held, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _save_tensors(lm: torch.nn.Module, folder: Path, state: dict[str, torch.Tensor] | None) -> None:
    starts: PissaStarts | None = getattr(lm, STARTS, None)
    earlier: Earlier | None = getattr(lm, EARLIER, None)
    # PEFT leaves out what lies beside modules that it has nothing on: layers of a pipeline's other stages.
    is_part = state is not None and not state.keys() <= lm.state_dict().keys()
    # Beside a head with an adapter PEFT would write the head itself too, which is the base's and no part of an adapter.
    options: dict[str, Any] = {"save_embedding_layers": "auto" if _adapts_embedding(lm) else False}
    if starts is None and not (earlier and earlier.merged):
        lm.save_pretrained(os.fspath(folder), state_dict=state, **options)  # type: ignore[operator]
        if state is not None and is_part:
            _write_tensors(state, folder)
        return
    whole = lm.state_dict() if state is None else state
    (settings,) = lm.peft_config.values()  # type: ignore[union-attr, operator]
    rank, alpha, targets = settings.r, settings.lora_alpha, settings.target_modules
    if starts is not None:
        plain, plain_rank = as_plain_adapter(whole, starts), 2 * rank
    else:
        assert earlier is not None
        plain, plain_rank = earlier.beside({name: v for name, v in whole.items() if is_adapter(name)}, alpha / rank)
        settings.target_modules = {*targets, *(m.rpartition(".")[2] for one in earlier.merged for m in one.pairs)}
    settings.r, settings.lora_alpha = plain_rank, alpha * plain_rank / rank
    try:
        lm.save_pretrained(os.fspath(folder), state_dict=plain, **options)  # type: ignore[operator]
    finally:
        settings.r, settings.lora_alpha, settings.target_modules = rank, alpha, targets
    if starts is None or is_part:  # the new adapter may have nothing on modules of an earlier one
        _write_tensors(plain, folder)


def _write_tensors(named: dict[str, torch.Tensor], folder: Path) -> None:
    tensors = {name.replace(".default.", "."): value.contiguous() for name, value in named.items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def _adapts_embedding(lm: torch.nn.Module) -> bool:
    """True for adapters of others: duoka puts none beside an embedding."""
    return any(True for module in lm.modules() if len(getattr(module, "lora_embedding_A", ())))


def untie_adapted_head(adapted: torch.nn.Module) -> None:
    """Give the head weights of its own, where it has the embedding's and one of both has an adapter: what is merged
    into one of them is not the other's."""
    core: Any = adapted.get_base_model()  # type: ignore[operator]
    embedding, head = core.get_input_embeddings(), core.get_output_embeddings()
    base = getattr(head, "base_layer", head if len(getattr(embedding, "lora_embedding_A", ())) else None)
    if base is None or all(base.weight is not one for one in embedding.parameters()):
        return
    base.weight = torch.nn.Parameter(base.weight.detach().clone(), requires_grad=False)
    for config in {id(one): one for one in (core.config, core.config.get_text_config())}.values():
        config.tie_word_embeddings = False


def is_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def begin_adapter(name: str, shape: torch.Size, seed: int, earlier: Earlier | None) -> torch.Tensor:
    """Where an adapter begins: where the one that goes on ended, else as it is drawn."""
    if earlier is not None and earlier.begins(name):
        return earlier.values(name, shape)
    return draw_adapter(name, shape, seed)


def draw_adapter(name: str, shape: torch.Size, seed: int) -> torch.Tensor:
    """Where an adapter begins: A as PEFT draws it (uniform within 1/sqrt(width)), B zero.

    From seed and name alone: a rank that holds a part of the adapters begins with the values that one process would.
    """
    if ".lora_B." in name:
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(draw_seed(f"{seed} {name}"))
    bound = shape[1] ** -0.5
    return torch.rand(shape, generator=generator) * (2 * bound) - bound


def _check_targets(model: torch.nn.Module, targets: tuple[str, ...]) -> None:
    linear = {name.rsplit(".", 1)[-1] for name, module in model.named_modules() if _is_linear(module)}
    missing = [name for name in targets if name.rsplit(".", 1)[-1] not in linear]
    if missing:
        raise ConfigError(
            f"lora.targets names {', '.join(missing)}, and the model has no linear layer of that name",
            fix=f"choose from {', '.join(sorted(linear))}, or write targets: all",
        )


_PEFT_LEAVES_OUT_PROJ = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")


def _find_targets(model: torch.nn.Module, targets: tuple[str, ...] | Literal["all"]) -> str | list[str]:
    """What PEFT is told. Layers of the model's own code that are linear by their class only (a router that answers with
    what it chose, a product by groups) have no answer to which an adapter's could be added: `all` names the others."""
    linear = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    own = {name: one for name, one in linear.items() if type(one).__module__ == type(model).__module__}
    odd = {name.rsplit(".", 1)[-1]: type(one).__name__ for name, one in own.items() if not _answers_a_row(one)}
    odd |= _of_scans(model)
    coded = [name for name, module in model.named_modules() if _holds_codes(module)]  # PEFT passes over them
    if targets == "all" and not (odd or coded):
        return "all-linear"
    if targets == "all":
        names = (name.split(".") for name in (*linear, *coded))
        inside = {words[-1] for words in names if any(map(str.isdecimal, words))}
        return sorted(inside - odd.keys())
    if named := sorted(odd.keys() & {name.rsplit(".", 1)[-1] for name in targets}):
        rest = {name.rsplit(".", 1)[-1] for name in linear} - odd.keys()
        raise ConfigError(
            f"lora.targets names {', '.join(f'{name} ({odd[name]})' for name in named)}, to whose answer no adapter's "
            "can be added",
            fix=f"choose from {', '.join(sorted(rest))}, or write targets: all",
        )
    return list(targets)


def _of_scans(model: torch.nn.Module) -> dict[str, str]:
    """Linear layers of Mamba that are read by their weights, beside any adapter, and why."""
    found: dict[str, str] = {}
    for module in model.modules():
        if not any(isinstance(child, torch.nn.Conv1d) for child in module.children()):
            continue
        if isinstance(getattr(module, "dt_proj", None), torch.nn.Linear):
            found["dt_proj"] = "read by its weight"
        if model.config.model_type in _PEFT_LEAVES_OUT_PROJ and hasattr(module, "out_proj"):  # type: ignore[union-attr]
            found["out_proj"] = "PEFT leaves it: fused kernels read its weight"
    return found


def _not_to_adapt(model: torch.nn.Module) -> str | None:
    """A pattern of names, for PEFT: no text would give their adapters a gradient."""
    names = "|".join(map(re.escape, {**beside_text(model), **skipped_layers(model)}))
    return rf"({names})(\..*)?" if names else None


def _answers_a_row(linear: torch.nn.Linear) -> bool:
    try:
        with torch.no_grad():
            answer = linear(linear.weight.new_zeros(1, linear.in_features))
    except (RuntimeError, ValueError, LookupError):
        return False
    return isinstance(answer, torch.Tensor) and tuple(answer.shape) == (1, linear.out_features)


def _is_linear(module: torch.nn.Module) -> bool:
    """Also GPT-2's kind, whose weights lie."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, (torch.nn.Linear, Conv1D)) or _holds_codes(module)


def _holds_codes(module: torch.nn.Module) -> bool:
    """A linear layer as GPTQ's and AWQ's package lays it out: no torch.nn.Linear, and no weight."""
    return hasattr(module, "qweight") and hasattr(module, "in_features")


def count_parameters(model: torch.nn.Module) -> tuple[int, int]:
    """(all, trainable) parameters; shared ones count once."""
    # By the layer: parameters that were shared out know no longer how many numbers they stand for.
    states = {
        id(one.weight): one.quant_state for one in model.modules() if getattr(one, "quant_state", None) is not None
    }
    parameters = list(model.parameters())
    sizes = [states[id(p)].shape.numel() if id(p) in states else p.numel() for p in parameters]
    return sum(sizes), sum(p.numel() for p in parameters if p.requires_grad)
