"""A tiny copy of an architecture: the same config class and code with few layers, small widths, drawn weights.

`exactness.py` tries it in place of the model itself: it takes milliseconds at any size, and is the same on every rank.
What a key of a config means is read from its name, so that no family has to be known here.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Sequence
from typing import Any

import torch

from duoka.model.auto_class import language_class
from duoka.model.experts import NAME, use_own_experts

VOCABULARY, SPECIAL = 64, 8  # ids of special tokens are below the second number
_HIDDEN, _HEADS, _HEAD_DIM = 64, 4, 16

# What a key is set to: (pattern of its whole name, value). Numbers that must fit each other; the first match rules.
_SET: tuple[tuple[str, int], ...] = (
    (r".*vocab_size.*", VOCABULARY),
    (r"mamba_n_heads|mamba_num_heads|n_mamba_heads|num_mamba_heads", 8),
    (r"mamba_d_head|mamba_head_dim|mamba_headdim", 16),
    (r"mamba_d_ssm|attention_hidden_size|mamba_intermediate_size", 2 * _HIDDEN),
    (r"attention_head_dim", 2 * _HEAD_DIM),
    (r"linear_num_key_heads", 2),
    (r"qk_rope_head_dim|qk_nope_head_dim|v_head_dim|index_head_dim", _HEAD_DIM),
    (r"qk_head_dim", 2 * _HEAD_DIM),
    (r"linear_(key|value)_head_dim|rotary_dim", 8),
    (r"linear_num_value_heads|num_heads|n_heads?|num_attention_heads|((decoder|encoder)_)?attention_heads", _HEADS),
    (r"head_dim|d_head|kv_channels|d_kv|global_head_dim", _HEAD_DIM),
    (r"hidden_size|n_embd|n_embed|d_model|dim|embed_dim|embedding_size|lru_width|word_embed_proj_dim", _HIDDEN),
    (r"(d_inner|n_inner|d_ff|.*ffn?_(hidden_)?(dim|size)|intermediate_size)", 2 * _HIDDEN),
)
# What a key is at most.
_AT_MOST: tuple[tuple[str, int], ...] = (
    (r".*window(_size)?", 4),
    (r".*chunk(_size|_length)", 8),
    (r".*(period|interval|pattern|_step|_every_n.*)", 2),
    (r"first_k_dense_replace|num_dense_layers|max_window_layers|.*_offset|num_kv_shared_layers", 1),
    (r"num_experts_per_tok(en)?|moe_topk|moe_k|top_k_experts|experts_top_k", 2),
    (r"n_group|topk_group|n_groups|num_expert_group|mamba_n(um)?_?groups|mamba_ngroups", 1),
    (r".*shared_experts?|zero_expert_num", 1),
    (r".*experts", 4),
    (r".*(d_state|state_size|ssm_state_dim)", 8),
    (r"index_topk", 4),
    (r"index_n_heads", 32),  # so many that no two tokens have a score of 0: which of equals is chosen is chance
    (r".*(lora_|_)rank", 16),
    (r".*(_size|_dim|_width)", _HIDDEN),
)
_DEPTH = re.compile(r"num_hidden_layers|n_layers?|num_layers|num_blocks|decoder_layers|encoder_layers")
_PART = re.compile(r"n(um)?_\w+_layers")
_KEY_VALUE_HEADS = re.compile(r"num_key_value_heads|num_kv_heads|n_head_kv|.*_num_key_value_heads")
_TOKEN = re.compile(r".*(token|tok)_(id|index)|sep_token_id|sos_id|eos_id")
_LAYERS = re.compile(r".*(layer|attn).*|.*_(idx|idxs|indices)")
_COUNTED = re.compile(r".*(period|interval|pattern|_step|_every_n.*|block_types)")
_SIZES_OF_ANOTHER_KIND = re.compile(r"image_size|patch_size|.*kernel_size|.*batch_size|pad_vocab_size.*")
_MOST_KINDS = 8
_SLOWER = 3.0  # logarithm of how many times as long a state lasts


def tiny_config(config: Any, *, widths: bool = True) -> Any:
    """`config` with few layers, small tables and short windows; with small widths, or with its own."""
    small = copy.deepcopy(config)
    parts = [getattr(small, name, None) for name in getattr(small, "sub_configs", ())]
    for part in (small, *(part for part in parts if hasattr(part, "to_dict"))):
        _shrink(part, widths)
    return small


def count_parameters(config: Any, trust_remote_code: bool) -> int:
    """Of the model that `config` describes, which is not built for it."""
    with torch.device("meta"):
        model = language_class(config).from_config(config, trust_remote_code=trust_remote_code)
    return sum(parameter.numel() for parameter in model.parameters())


def build_tiny(
    config: Any, attention: str, *, trust_remote_code: bool = False, own_experts: bool | None = None
) -> torch.nn.Module:
    """The model of a tiny config, every weight drawn; no generator of this process is moved.

    `own_experts`: mixtures by our function of experts; left out: where the attention is ours too.
    """
    # Of its own: a model notes in its config how experts are computed, and the next one would not be all transformers'.
    own = copy.deepcopy(config)
    own._experts_implementation = None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: torch.nn.Module = language_class(own).from_config(
            own, dtype=torch.float32, attn_implementation=attention, trust_remote_code=trust_remote_code
        )
    if attention.startswith(NAME) if own_experts is None else own_experts:  # beside "eager", all is transformers'
        use_own_experts(model)
    numbers = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for decay in _find_decays_of_delta_rules(model):
            decay.sub_(_SLOWER)
        for parameter in model.parameters():
            # Beside what the code begins with: gates and projections that begin at zero would hide what they let
            # through, and 0.02 in small matrices makes every layer too faint to be seen.
            scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.1
            parameter.add_(scale * torch.randn(parameter.shape, generator=numbers))
    return model.eval()


def _find_decays_of_delta_rules(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """As their code draws these, states fade within a token: no document would see the one before, and of an answer one
    product would be left, at times so near 0 that the norm behind makes rounding large. A scan has its input beside, D.
    """
    rules = [one for one in model.modules() if hasattr(one, "A_log") and not hasattr(one, "D")]
    return [one.A_log for one in rules if isinstance(one.A_log, torch.nn.Parameter)]


def _shrink(config: Any, widths: bool) -> None:
    facts = {key: value for key, value in vars(config).items() if not key.startswith("_")}
    depth = next((value for key, value in facts.items() if _DEPTH.fullmatch(key) and type(value) is int), 0)
    layers, parts = _choose_layers(facts, depth), _find_parts(facts, depth)
    heads = next((value for key, value in facts.items() if key in ("num_attention_heads", "n_head", "num_heads")), 0)
    by_layer = config.to_dict().get("per_layer_config")
    small: Any
    for key, value in facts.items():
        if type(value) is int:
            if key in parts:
                small = sum(layer in parts[key] for layer in layers)
            elif _KEY_VALUE_HEADS.fullmatch(key):
                small = value if not widths else _HEADS if value == heads else min(value, 2)
            elif _DEPTH.fullmatch(key):
                small = len(layers) if value == depth else min(value, len(layers))
            else:
                small = _shrink_number(key, value, widths)
        elif isinstance(value, (list, tuple, str)):
            small = _choose_from(key, value, depth, layers)
        elif isinstance(value, dict) and widths and "rope" in key:
            small = _shrink_rope(value)
        else:
            continue
        if small != value:
            setattr(config, key, small)
    if by_layer:  # numbers of layers that the small one does not have would be refused
        config.per_layer_config = _shrink_by_layer(by_layer, layers, widths)
    if widths and {"expand", "num_heads", "head_dim"} <= facts.keys():
        config.num_heads = int(facts["expand"] * _HIDDEN) // _HEAD_DIM  # these share the inner width, not the hidden


def _shrink_number(key: str, value: int, widths: bool) -> int:
    if _TOKEN.fullmatch(key):
        return min(value, SPECIAL - 1)
    if value <= 0 or _SIZES_OF_ANOTHER_KIND.fullmatch(key):
        return value
    for pattern, number in _SET:
        if re.fullmatch(pattern, key):
            return number if widths or "vocab" in key else value
    for pattern, number in _AT_MOST:
        if re.fullmatch(pattern, key):
            is_width = number == _HIDDEN or "rank" in key or "state" in key
            return min(value, number) if widths or not is_width else value
    return value


def _shrink_rope(value: dict[str, Any]) -> dict[str, Any]:
    """Tables with a factor for every frequency are as long as there are frequencies, and shares of these add up."""
    most = int(_HEAD_DIM * float(value.get("partial_rotary_factor") or 1.0)) // 2

    def shrink(key: str, own: Any) -> Any:
        if isinstance(own, dict):
            return _shrink_rope(own)
        if isinstance(own, list) and key == "mrope_section":  # frequencies of time, height and width
            ends = [round(end * most / sum(own)) for end in itertools.accumulate(own)]
            return [end - start for start, end in itertools.pairwise([0, *ends])]
        return own[:most] if isinstance(own, list) and key.endswith("_factor") else own

    return {key: shrink(key, own) for key, own in value.items()}


def _shrink_by_layer(value: dict[Any, dict[str, Any]], layers: list[int], widths: bool) -> dict[int, dict[str, Any]]:
    """What single layers have otherwise than the rest, by the number of the layer."""
    own = {int(layer): keys for layer, keys in value.items()}
    return {
        place: {key: _shrink_number(key, n, widths) if type(n) is int else n for key, n in own[layer].items()}
        for place, layer in enumerate(layers)
        if layer in own
    }


def _choose_layers(facts: dict[str, Any], depth: int) -> list[int]:
    """Which layers stay: two of every kind that the lists of a config tell apart."""
    lists = [value for key, value in facts.items() if _is_list_of_kinds(key, value, depth)]
    numbered: list[Sequence[int]] = [value for key, value in facts.items() if _is_list_of_numbers(key, value, depth)]
    numbered += _find_parts(facts, depth).values()
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for layer in range(depth):
        kind = (*(str(value[layer]) for value in lists), *(layer in value for value in numbered))
        kinds.setdefault(kind, []).append(layer)
    each = 2 if len(kinds) < 3 else 1
    if len(kinds) == 1 and any(_COUNTED.fullmatch(key) and value for key, value in facts.items()):
        each = 4
    return sorted(layer for some in list(kinds.values())[:_MOST_KINDS] for layer in some[:each])


def _find_parts(facts: dict[str, Any], depth: int) -> dict[str, range]:
    """The layers of each part that has its own number of them, one part behind the other, where these add up."""
    counts = {key: value for key, value in facts.items() if _PART.fullmatch(key) and not _DEPTH.fullmatch(key)}
    if len(counts) < 2 or any(type(one) is not int for one in counts.values()) or sum(counts.values()) != depth:
        return {}
    ends = list(itertools.accumulate(counts.values()))
    return {key: range(end - counts[key], end) for key, end in zip(counts, ends, strict=True)}


def _is_list_of_numbers(key: str, value: Any, depth: int) -> bool:
    """Numbers of layers, of those that are of one kind."""
    if not isinstance(value, (list, tuple)) or not value or not _LAYERS.fullmatch(key):
        return False
    return all(type(one) is int and 0 <= one < depth for one in value) and list(value) == sorted(set(value))


def _is_list_of_kinds(key: str, value: Any, depth: int) -> bool:
    """Something for every layer, in a list or as a letter each."""
    if isinstance(value, str) and not _COUNTED.fullmatch(key):
        return False
    is_long_enough = isinstance(value, (list, tuple, str)) and len(value) == depth > 1
    return is_long_enough and not _is_list_of_numbers(key, value, depth)


def _choose_from(key: str, value: Any, depth: int, layers: list[int]) -> Any:
    if _is_list_of_numbers(key, value, depth):
        return type(value)(place for place, layer in enumerate(layers) if layer in value)
    if not _is_list_of_kinds(key, value, depth):
        return value
    some = [value[layer] for layer in layers]
    return "".join(some) if isinstance(value, str) else type(value)(some)
