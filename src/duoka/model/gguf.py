"""A transformers folder as one GGUF file, for llama.cpp, Ollama and what stands on them; read back before it counts.

Needs the package gguf. Written for the architectures and tokenizers below; others are refused by name.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from duoka.data.tokens.tokenizer import ChatTokenizer, load_tokenizer
from duoka.errors import ConfigError, DuokaError
from duoka.model.gguf_rope import add_stretch, rope_of, why_no_stretch

TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
# The largest error of a matrix's weights, relative to their norm: what rounding to that type may cost.
BOUNDS = {
    "f32": 0.0, "f16": 1e-3, "bf16": 4e-3, "q8_0": 1e-2, "q5_1": 6e-2, "q5_0": 6e-2, "q4_1": 0.12, "q4_0": 0.12,
}  # fmt: skip
_ARCHITECTURES = {"llama": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3"}  # model_type -> gguf's name
# How a byte-level tokenizer cuts text before merges, by the pattern in its tokenizer.json, behind its English endings:
# llama.cpp's name of it. All of it counts: o200k, DeepSeek's and others take three digits too, and cut words otherwise.
_ENDINGS = (
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|",
    "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|",
)
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CUTS = {
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST: "llama-bpe",
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST: "qwen2",
}
_ELSEWHERE = (
    "export without --gguf, and convert that folder with llama.cpp's own convert_hf_to_gguf.py, which knows more "
    "models and tokenizers; or serve the folder itself: duoka serve, vLLM, SGLang"
)
_NO_CHANGE = ("NFC",)  # llama.cpp knows no normal forms; text is in this one as it is typed
_DIVISORS = "rope_freqs.weight"
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5


@dataclass(frozen=True)
class Written:
    path: Path
    size_bytes: int
    kind: str
    largest_error: float  # of a tensor, relative to its norm


def check_gguf(folder: Path, tokenizer: Path | None = None) -> None:
    """Refuse what cannot be written, before anything is; `tokenizer`: the folder of one that is not the model's own."""
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError("--gguf needs the package gguf, which is not installed", fix="pip install gguf")
    config = _read(folder / "config.json")
    kind = config.get("model_type")
    if kind not in _ARCHITECTURES:
        raise ConfigError(f"--gguf does not know the architecture {kind}", fix=f"known: {', '.join(_ARCHITECTURES)}")
    if why := why_no_stretch(config):
        raise ConfigError(f"--gguf does not write the stretched positions of this model: {why}", fix=_ELSEWHERE)
    for what in _unwritten(config, rope_of(config)):
        raise ConfigError(
            f"--gguf does not write {what}: programs that read such files compute {kind} without",
            fix="serve the folder itself: duoka serve, vLLM, SGLang",
        )
    name_of_cut(_raw(load_tokenizer(tokenizer or folder)))


def _unwritten(config: Mapping[str, Any], rope: Mapping[str, Any]) -> Iterator[str]:
    """What a config asks for, that the file has no place for or that its readers take for something else."""
    if config["model_type"] == "qwen3" and config.get("attention_bias"):
        yield "biases of attention"
    act = config.get("hidden_act", "silu")
    if act != "silu":
        yield f"this model's hidden_act {act}"
    share = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if share != 1.0:
        yield f"positions that turn {share:g} of each head"
    window, kinds = config.get("sliding_window"), config.get("layer_types") or ()
    has_windows = "sliding_attention" in kinds or (not kinds and config.get("use_sliding_window"))
    if window and has_windows and window < config["max_position_embeddings"]:
        yield f"windows of attention ({window:,} tokens)"


def write_gguf(folder: Path, kind: str, name: str) -> Written:
    """Write FOLDER/NAME.KIND.gguf and a Modelfile from the model and tokenizer in `folder`."""
    check_gguf(folder)
    config, tokenizer = _read(folder / "config.json"), load_tokenizer(folder)
    path = folder / f"{name}.{kind}.gguf"
    draft = folder / f".{path.name}"
    try:
        worst = _write(draft, folder, kind, name, config, tokenizer)
        draft.rename(path)
    finally:
        draft.unlink(missing_ok=True)
    (folder / "Modelfile").write_text(_modelfile(folder, path.name, tokenizer), encoding="utf-8")
    return Written(path, path.stat().st_size, kind, worst)


def _write(
    path: Path, folder: Path, kind: str, name: str, config: Mapping[str, Any], tokenizer: ChatTokenizer
) -> float:
    """Returns the largest error of a tensor, of the file that was written."""
    gguf: Any = importlib.import_module("gguf")
    arch = getattr(gguf.MODEL_ARCH, _ARCHITECTURES[config["model_type"]])
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    _add_facts(writer, config, name)
    add_stretch(writer, gguf, config)
    _add_tokenizer(writer, tokenizer, _stops(folder), int(config["vocab_size"]))
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    if (divisors := _divisors_of_turns(config)) is not None:
        writer.add_tensor(_DIVISORS, divisors)
    for tensor_name, values in _tensors(folder, config):
        short = names.get_name(tensor_name, try_suffixes=(".weight", ".bias"))
        if short is None:
            raise ConfigError(f"--gguf has no name for the tensor {tensor_name}", fix=_ELSEWHERE)
        data, stored = _stored(gguf, values, kind)
        writer.add_tensor(short, data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return _check(gguf, path, folder, config, names, kind)


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _add_facts(writer: Any, config: Mapping[str, Any], name: str) -> None:
    heads = config["num_attention_heads"]
    head_dim = _head_dim(config)
    writer.add_name(name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(_theta(config))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def _head_dim(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _theta(config: Mapping[str, Any]) -> float:
    rope = config.get("rope_parameters") or {}
    return float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)


# --- weights ---


def _divisors_of_turns(config: Mapping[str, Any]) -> np.ndarray | None:
    """By what the turn of each pair of a head is divided, where positions are stretched as Llama 3.1's: pairs that turn
    seldom within the text of the first training by `factor`, those that turn often by 1, and between in between."""
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") != "llama3":
        return None
    size = _head_dim(config)
    turns = rope["original_max_position_embeddings"] * _theta(config) ** -(np.arange(0, size, 2) / size) / (2 * np.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)  # of a pair's own turn
    return np.asarray(1 / (kept + (1 - kept) / rope["factor"]), np.float32)


def _tensors(folder: Path, config: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Weights as GGUF lays them out, in fp32; a head that is the embedding is not written twice."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  (a handle, which cannot be walked)
                if name == "lm_head.weight" and config.get("tie_word_embeddings"):
                    continue
                values: np.ndarray = opened.get_tensor(name).to(torch.float32).numpy()
                yield name, _turned(name, values, config)


def _turned(name: str, values: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    """Llama's heads have the pairs that a position turns side by side there, and in two halves in transformers."""
    found = re.search(r"self_attn\.([qk])_proj\.", name)
    if config["model_type"] != "llama" or not found:
        return values
    heads = config["num_attention_heads"]
    if found.group(1) == "k":
        heads = config.get("num_key_value_heads") or heads
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))


def _stored(gguf: Any, values: np.ndarray, kind: str) -> tuple[np.ndarray, Any]:
    """What is written of a tensor: norms and biases in fp32, rows that blocks of 32 do not divide in f16."""
    types = gguf.GGMLQuantizationType
    if values.ndim == 1 or kind == "f32":
        return values, types.F32
    stored = getattr(types, kind.upper() if values.shape[-1] % 32 == 0 or kind in ("f16", "bf16") else "F16")
    return gguf.quants.quantize(values, stored), stored


def _check(gguf: Any, path: Path, folder: Path, config: Mapping[str, Any], names: Any, kind: str) -> float:
    """Read the file again: each tensor is there, and as near as its type allows."""
    written = {one.name: one for one in gguf.GGUFReader(path).tensors if one.name != _DIVISORS}
    worst = 0.0
    for name, values in _tensors(folder, config):
        one = written.pop(names.get_name(name, try_suffixes=(".weight", ".bias")))
        found = gguf.quants.dequantize(one.data, one.tensor_type).reshape(values.shape)
        error = float(np.linalg.norm(found - values)) / max(float(np.linalg.norm(values)), 1e-12)
        worst = max(worst, error)
        if not error <= BOUNDS[kind] or math.isnan(error):
            raise DuokaError(f"{name} came back from {path.name} off by {error:.2%}; the file was removed")
    if written:
        raise DuokaError(f"{path.name} holds tensors that the model has not: {', '.join(written)}")
    return worst


# --- tokenizer ---


def name_of_cut(tokenizer: Mapping[str, Any]) -> str:
    """llama.cpp's name of how this tokenizer makes text into words, and words into tokens."""
    model, before = tokenizer["model"], tokenizer.get("pre_tokenizer") or {}
    parts = before.get("pretokenizers") or [before]
    if model.get("type") != "BPE" or "ByteLevel" not in [one.get("type") for one in parts]:
        raise ConfigError("--gguf writes byte-level BPE tokenizers; this one is of another kind", fix=_ELSEWHERE)
    if changes := [kind for kind in _kinds_of(tokenizer.get("normalizer")) if kind not in _NO_CHANGE]:
        raise ConfigError(
            f"--gguf has no place for what this tokenizer makes of text first ({', '.join(changes)})", fix=_ELSEWHERE
        )
    name = _name_of_parts(parts)
    if name == "llama-bpe" and not model.get("ignore_merges"):
        return (
            "smaug-bpe"  # the same cuts; by the other name a word that is a token is taken whole, whatever merges say
        )
    if name is None or (name != "llama-bpe" and model.get("ignore_merges")):
        raise ConfigError("--gguf has no name for how this tokenizer cuts text into words", fix=_ELSEWHERE)
    return name


def _name_of_parts(parts: Sequence[Mapping[str, Any]]) -> str | None:
    """By all of them: one more, or one that is told otherwise, is another way to cut."""
    *first, last = parts
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        return None
    cuts_words = last.get("use_regex", True)
    if not first and cuts_words:
        return "gpt-2"
    if len(first) != 1:
        return None
    (one,) = first
    if one.get("type") == "Digits":
        return "smollm" if one.get("individual_digits") and cuts_words else None
    if one.get("type") != "Split" or cuts_words or one.get("behavior", "Isolated") != "Isolated" or one.get("invert"):
        return None
    pattern = str((one.get("pattern") or {}).get("Regex", ""))
    rests = [pattern.removeprefix(endings) for endings in _ENDINGS if pattern.startswith(endings)]
    return next((_CUTS[rest] for rest in rests if rest in _CUTS), None)


def _kinds_of(normalizer: Mapping[str, Any] | None) -> list[str]:
    if normalizer is None:
        return []
    parts = normalizer.get("normalizers") if normalizer.get("type") == "Sequence" else [normalizer]
    return [str(one.get("type")) for one in parts or ()]


def _raw(tokenizer: ChatTokenizer) -> dict[str, Any]:
    """All of it as tokenizer.json has it, with the tokens that older files of a folder add."""
    found: dict[str, Any] = json.loads(tokenizer.backend.to_str())
    return found


def _add_tokenizer(writer: Any, tokenizer: ChatTokenizer, stops: Sequence[int], rows: int) -> None:
    raw = _raw(tokenizer)
    vocabulary: dict[str, int] = dict(raw["model"]["vocab"])
    kinds = dict.fromkeys(vocabulary.values(), _NORMAL)
    for token in raw.get("added_tokens", ()):
        vocabulary[token["content"]] = token["id"]
        kinds[token["id"]] = _CONTROL if token["special"] else _USER_DEFINED
    by_id = {number: text for text, number in vocabulary.items()}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name_of_cut(raw))
    writer.add_token_list([by_id.get(number, f"[PAD{number}]") for number in range(rows)])
    writer.add_token_types([kinds.get(number, _UNUSED) for number in range(rows)])
    merges = raw["model"]["merges"]
    writer.add_token_merges([one if isinstance(one, str) else " ".join(one) for one in merges])
    named = {key: vocabulary[text] for key, text in tokenizer.special_tokens.items() if text in vocabulary}
    ids: Mapping[str, Callable[[int], None]] = {
        "bos_token": writer.add_bos_token_id, "eos_token": writer.add_eos_token_id,
        "eot_token": writer.add_eot_token_id, "unk_token": writer.add_unk_token_id,
        "pad_token": writer.add_pad_token_id,
    }  # fmt: skip
    for key, number in _with_ends(named, stops).items():
        if key in ids and number < rows:
            ids[key](number)
    # Templates write the first token themselves; text without a template begins as the tokenizer alone begins it,
    # whatever its settings say: transformers goes by tokenizer.json too.
    writer.add_add_bos_token(bool(tokenizer.beginning))
    if tokenizer.template_name == "model":
        writer.add_chat_template(tokenizer.template)


def _with_ends(named: dict[str, int], stops: Sequence[int]) -> dict[str, int]:
    """The special tokens with what ends answers: readers take token 11 where no end is named, and know a second one by
    its text where it is a well-known one."""
    ends = dict(named)
    if stops:
        ends.setdefault("eos_token", stops[0])
    second = next((number for number in reversed(stops) if number != ends.get("eos_token")), None)
    return ends if second is None else ends | {"eot_token": second}


def _stops(folder: Path) -> list[int]:
    """What ends an answer, as the folder says."""
    for name in ("generation_config.json", "config.json"):
        stops = (_read(folder / name) if (folder / name).is_file() else {}).get("eos_token_id")
        if stops is not None:
            return list(stops) if isinstance(stops, list) else [stops]
    return []


def _modelfile(folder: Path, file: str, tokenizer: ChatTokenizer) -> str:
    """For `ollama create NAME -f Modelfile`; the chat template is the one inside the GGUF file."""
    lines = [f"FROM ./{file}", *_template_lines(tokenizer)]
    lines += [f'PARAMETER stop "{tokenizer.added[number]}"' for number in _stops(folder) if number in tokenizer.added]
    return "\n".join(lines) + "\n"


# Ollama's own language of templates, for the form that most models here have. It knows some chat templates of GGUF
# files by their text and takes none for the others, so that a model would be asked without its marks.
_CHATML = (
    'TEMPLATE """{{- range .Messages }}<|im_start|>{{ .Role }}\n{{ .Content }}<|im_end|>\n{{ end }}'
    '<|im_start|>assistant\n"""'
)


def _template_lines(tokenizer: ChatTokenizer) -> list[str]:
    """Nothing where the template writes anything else than ChatML; what it says unasked becomes SYSTEM."""
    said = [{"role": role, "content": f"{role}?"} for role in ("system", "user", "assistant")]
    wanted = "".join(f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in [*said, said[1]])
    if tokenizer.render([*said, said[1]], prompt=True) != f"{wanted}<|im_start|>assistant\n":
        return []
    asked = "<|im_start|>user\nuser?<|im_end|>\n<|im_start|>assistant\n"
    unasked = tokenizer.render(said[1:2], prompt=True).removesuffix(asked)
    found = re.fullmatch(r"<\|im_start\|>system\n(.*)<\|im_end\|>\n", unasked, re.DOTALL)
    return [_CHATML, *([f'SYSTEM """{found.group(1)}"""'] if found and '"""' not in found.group(1) else [])]
