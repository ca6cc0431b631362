"""Which part each module of a model plays when ranks cut its matrices: read off the table that transformers ships.

`config.base_model_tp_plan` and the model class's `_tp_plan` say it by name; transformers' own runtime, which replaces
forwards and sums gradients after every backward pass, is not used. What has no part, or one that is not known here, is
refused by its name: a matrix that is whole inside of a cut region would learn from a part of its gradient.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import torch

from duoka.errors import ConfigError
from duoka.model.layers import Absent, beside_text, is_transformer, text_decoder

# columns: outputs are shared out. joined: and put together again. rows: inputs are shared out, outputs summed up.
# own_rows: of whole inputs, each rank takes its part. partial: whole everywhere, and each rank has a part of its
# gradient. words: rows of the embedding. experts: shared out whole, by the expert axis.
Part = Literal["columns", "joined", "rows", "own_rows", "partial", "words", "experts"]
STYLES: dict[str, Part] = {
    "colwise": "columns",
    "colwise_gather_output": "joined",
    "rowwise": "rows",
    "rowwise_split_input": "own_rows",
    "replicated_with_grad_allreduce": "partial",
    "moe_tp_experts": "experts",
    "embedding_rowwise": "words",  # transformers 5.17 says it of every model
}
COLUMNS: tuple[Part, ...] = ("columns", "joined")
_WITHOUT = "delete tensor:, or write   strategy: fsdp   which shares the weights of any model"


def find_parts(core: torch.nn.Module, num_ranks: int, *, shares_experts: bool = False) -> dict[str, Part]:
    """The part of each module of a transformers model that has one, by the module's name.

    `shares_experts`: an expert axis shares experts out over these ranks too.
    """
    plan = _read_plan(core, num_ranks)
    config: Any = core.config
    for key in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config.get_text_config(), key, None)
        if isinstance(heads, int) and heads % num_ranks:
            raise _refusal(num_ranks, f"{key} of the model is {heads}", "write a number that divides it")
    parts: dict[str, Part] = {}
    for name, module in core.named_modules():
        style = next((style for pattern, style in plan if pattern.fullmatch(name)), None)
        if style is not None and any(True for _ in module.parameters()):
            parts[name] = _part_of(name, style, num_ranks)
    mixture = next((name for name, part in parts.items() if part == "experts"), None)
    if mixture is not None and not shares_experts:
        what = f"{mixture} are experts, which a tensor axis alone does not share out"
        raise _refusal(num_ranks, what, f"write beside it   expert: {num_ranks}   , or delete tensor:")
    names = {id(module): name for name, module in core.named_modules()}
    ends: tuple[tuple[Any, Part], ...]
    ends = (core.get_output_embeddings(), "joined"), (core.get_input_embeddings(), "words")  # type: ignore[operator]
    for end, its_part in ends:
        if end is not None and not isinstance(end, Absent):  # of a pipeline, another rank has the one or the other
            parts[names[id(end)]] = its_part
    _check_all_have_one(core, parts, num_ranks)
    for name, part in parts.items():
        _check_fits(name, core.get_submodule(name), part, num_ranks)
    return parts


def _read_plan(core: torch.nn.Module, num_ranks: int) -> list[tuple[re.Pattern[str], str]]:
    """(names, style), by the names that the model has for its modules."""
    name = type(core).__name__
    if not is_transformer(core):
        raise _refusal(num_ranks, f"{name} is no transformers model, whose matrices have known parts", _WITHOUT)
    decoder: Any = text_decoder(core) or core.base_model
    own: dict[str, str] = dict(getattr(decoder.config, "base_model_tp_plan", None) or {})
    if not own:
        raise _refusal(num_ranks, f"transformers has no tensor-parallel plan for {name}", _WITHOUT)
    base = "" if decoder is core else next(f"{path}." for path, one in core.named_modules() if one is decoder)
    whole = {f"{base}{key}": style for key, style in own.items()} | dict(getattr(type(core), "_tp_plan", None) or {})
    return [(re.compile(re.escape(key).replace(r"\*", r"\d+")), style) for key, style in whole.items()]


def _part_of(name: str, style: str, num_ranks: int) -> Part:
    if style not in STYLES:
        raise _refusal(
            num_ranks, f"{name} is to be cut as {style!r}, which this version of duoka does not do", _WITHOUT
        )
    return STYLES[style]


def linear_of(module: torch.nn.Module) -> torch.nn.Module:
    """The layer itself, inside of an adapter."""
    base = getattr(module, "base_layer", None)
    return module if base is None else base


def _check_fits(name: str, module: torch.nn.Module, part: Part, num_ranks: int) -> None:
    layer: Any = linear_of(module)
    if part in ("partial", "experts"):
        return
    if part == "words":
        plain = isinstance(layer, torch.nn.Embedding) and layer is module
        if not plain or layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse:
            raise _refusal(num_ranks, f"{name} is no plain embedding", _WITHOUT)
        size = layer.num_embeddings
    elif type(layer) is not torch.nn.Linear:
        raise _refusal(num_ranks, f"{name} is a {type(layer).__name__}, and only a Linear can be cut", _WITHOUT)
    else:
        size = layer.out_features if part in COLUMNS else layer.in_features
        what = "output" if part in COLUMNS else "input"
        if part != "joined" and size % num_ranks:
            raise _refusal(num_ranks, f"{name} has {size} {what} features", "write a number that divides it")
    if -(-size // num_ranks) * (num_ranks - 1) >= size:
        raise _refusal(
            num_ranks, f"{name} has {size} rows, too few for each rank to have some", "write a smaller number"
        )


def _check_all_have_one(core: torch.nn.Module, parts: dict[str, Part], num_ranks: int) -> None:
    """Beside what is cut there may be vectors, and those only where all ranks see the same activations.

    Beside experts, which read and give whole activations, there may be matrices too: routers, and shared experts.
    """
    mixtures = tuple(f"{name.rpartition('.')[0]}." for name, part in parts.items() if part == "experts")
    cut = {name.rpartition(".")[0] + "." for name, part in parts.items() if part == "columns"}
    whole = tuple(f"{name}." for name in (*parts, *beside_text(core)))
    for name, parameter in core.named_parameters():
        if name.startswith(whole):
            continue
        if parameter.ndim > 1 and not name.startswith(mixtures):
            raise _refusal(num_ranks, f"{name}, {tuple(parameter.shape)}, has no part in the model's plan", _WITHOUT)
        if any(name.startswith(region) for region in cut if region != "."):
            raise _refusal(
                num_ranks, f"{name} has no part in the plan, and stands among matrices that are cut", _WITHOUT
            )


def _refusal(num_ranks: int, what: str, fix: str) -> ConfigError:
    return ConfigError(f"parallel.tensor is {num_ranks}, and {what}", fix=fix)
