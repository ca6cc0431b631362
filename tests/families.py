"""Every causal language model of transformers, tiny: what duoka makes of it, held against transformers alone.

`python tests/families.py` writes the table of docs/models.md; `make nightly` measures every family anew.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from huggingface_hub.errors import StrictDataclassError

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"
LENGTHS = (14, 3, 9)  # one shorter than the kernel of a convolution, all over the short window
EXACT = 1e-4

# Where the defaults of a config class make no model, or one without what its checkpoints are known for: layers of
# several kinds, short windows.
WINDOWS = {"use_sliding_window": True, "max_window_layers": 14}
SETTINGS = {
    "bamba": {"num_hidden_layers": 4, "attn_layer_indices": [1, 3]},
    "lfm2": {"num_hidden_layers": 4, "full_attn_idxs": [1, 3]},
    "lfm2_moe": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "ministral": {"head_dim": 128},
    "mixtral": {"sliding_window": 4096},
    "nemotron": {"num_key_value_heads": 8},
    "phi3": {"sliding_window": 2047},
    "phimoe": {"sliding_window": 2047},
    "qwen2": WINDOWS,
    "qwen2_moe": WINDOWS,
    "qwen3": WINDOWS,
    "qwen3_moe": WINDOWS,
    "starcoder2": {"sliding_window": 4096},
    "cohere_compass_text": {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("sliding_attention", "full_attention")
        },
    },
    "deepseek_v2": {"num_experts_per_tok": 6, "topk_group": 3, "n_group": 8},
    "emu3": {"vocabulary_map": {"<image>": 5, "<|extra_200|>": 6}},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 6},
    "granitemoehybrid": {"num_hidden_layers": 4, "layer_types": ["mamba", "attention", "mamba", "attention"]},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
}
# Shares of the rotary frequencies for time, height and width; all checkpoints have them, and the classes assume none.
_THREE_POSITIONS = {
    (16, 24, 24): ("qwen2_vl", "qwen2_5_vl", "qwen2_5_omni_thinker"),
    (8, 12, 12): ("glm4v", "glm4v_moe", "glm46v", "glm_ocr", "glmga"),
    (24, 20, 20): ("qwen3_vl", "qwen3_vl_moe"),
}
for _section, _names in _THREE_POSITIONS.items():
    _rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(_section)}
    SETTINGS |= {_name: {"text_config": {"rope_parameters": _rope}} for _name in _names}
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
BREAKS = (
    RuntimeError, ValueError, TypeError, LookupError, AttributeError, ImportError, AssertionError, ArithmeticError,
    OSError, StrictDataclassError,
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """`rows`: packed, padded, as written (padded, by the model's own attention), refused or not built; errors are the
    oracle's, relative, None where it cannot run."""

    model_type: str
    rows: str
    why: str = ""
    packed: float | None = None
    padded: float | None = None
    written: float | None = None
    has_experts: bool = False


def all_families() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def seeing_families() -> list[str]:
    """Those of transformers' models for images and text that learn from text here, as docs/models.md has them."""
    return sorted(written_lines().keys() - set(all_families()))


def family_config(model_type: str):
    from transformers import AutoConfig

    return AutoConfig.for_model(model_type, **SETTINGS.get(model_type, {}))


def write_family(folder: Path, model_type: str, *, tokenizer=None, **sizes) -> Path:
    """A tiny model of that type with drawn weights and no dropout; with a tokenizer, one that can be trained. `sizes`
    are written into its config."""
    from duoka.model.build import quiet_loading
    from duoka.model.tiny_copy import build_tiny, tiny_config

    with quiet_loading():
        config = tiny_config(family_config(model_type))
        without_dropout(config)
        vars(config).update(sizes)
        if tokenizer is not None:
            config.get_text_config().vocab_size = len(tokenizer) + 5
            for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
                setattr(config, name, getattr(tokenizer, name))
            tokenizer.save_pretrained(folder)
        build_tiny(config, "eager").save_pretrained(folder)
    return folder


def without_dropout(config) -> None:
    for name, value in vars(config).items():
        if isinstance(value, float) and ("dropout" in name or "pdrop" in name):
            setattr(config, name, 0.0)
    for name in getattr(config, "sub_configs", ()):
        if getattr(config, name, None) is not None:
            without_dropout(getattr(config, name))


def measure_family(model_type: str) -> Row:
    """What duoka chooses by itself, and how far each way is from transformers' own loss and gradient."""
    from duoka.errors import ConfigError
    from duoka.model.exactness import LAYOUTS, SelfTest

    try:
        config = family_config(model_type)
        has_experts = any(getattr(config.get_text_config(), name, None) for name in EXPERTS)
        with tempfile.TemporaryDirectory() as folder:
            plain = load_plain(write_family(Path(folder), model_type))
            tested = SelfTest(config)
            rows = tested.layout or "refused"
            failed = {"packed": None, "padded": "packed", "as written": "padded", "refused": "as written"}[rows]
            why = tested.trial(failed).sentence() if failed else ""
            errors = [
                distance_from_alone(plain, Path(folder), one, tested)
                for one in (LAYOUTS if rows in ("as written", "refused") else LAYOUTS[:2])
            ]
    except ConfigError as error:
        return Row(model_type, "refused", error.where or error.what)
    except BREAKS as error:
        return Row(model_type, "not built", f"{type(error).__name__}: {str(error).strip().splitlines()[0][:120]}")
    return Row(model_type, rows, why, *errors, has_experts=has_experts)


def load_plain(folder: Path):
    """By transformers alone: a model that reads images too, or a language model."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    how = {"dtype": torch.float32, "attn_implementation": "eager"}
    try:
        return AutoModelForImageTextToText.from_pretrained(folder, **how).eval()
    except ValueError:
        return AutoModelForCausalLM.from_pretrained(folder, **how).eval()


def distance_from_alone(plain, folder: Path, rows: str, tested) -> float | None:
    """The largest relative error of loss and of any parameter's gradient; None where it cannot be computed."""
    from duoka.errors import ConfigError
    from duoka.model.build import LossModel, load_model
    from duoka.model.request import ModelRequest

    plain.zero_grad()
    numbers = torch.Generator().manual_seed(5)
    documents = [torch.randint(8, 64, (length,), generator=numbers) for length in LENGTHS]
    logits = (plain(one[None], use_cache=False).logits[0, :-1].float() for one in documents)
    want = sum(F.cross_entropy(own, one[1:], reduction="sum") for own, one in zip(logits, documents, strict=True))
    want.backward()
    try:
        attention = tested.written_attention if rows == "as written" else "duoka"
        request = ModelRequest(folder, dtype=torch.float32, attention=attention, trains=True)
        model = LossModel(load_model(request).eval(), own_logits=tested.trial(rows).own_logits)
        ours, _ = model(**(packed if rows == "packed" else padded)(documents))
        ours.backward()
    except (ConfigError, *BREAKS):
        return None
    theirs = {name: p.grad for name, p in plain.named_parameters()}
    scale = max(float(gradient.norm()) for gradient in theirs.values() if gradient is not None)
    error = abs(float(ours.detach()) / float(want.detach()) - 1)
    for name, parameter in model.lm.named_parameters():
        a, b = (torch.zeros(()) if g is None else g for g in (parameter.grad, theirs[name]))
        error = max(error, float((a - b).norm()) / scale)
    return error if error == error else float("inf")


def packed(documents):
    return {
        "input_ids": torch.cat(documents)[None],
        "labels": torch.cat([torch.cat([one[1:], torch.tensor([-100])]) for one in documents])[None],
        "position_ids": torch.cat([torch.arange(len(one)) for one in documents])[None],
        "boundaries": torch.tensor([0, *torch.tensor([len(one) for one in documents]).cumsum(0)], dtype=torch.int32),
    }


def padded(documents):
    width = max(len(one) for one in documents)
    ids = torch.full((len(documents), width), 7)
    labels = torch.full((len(documents), width), -100)
    for row, one in enumerate(documents):
        ids[row, : len(one)] = one
        labels[row, : len(one) - 1] = one[1:]
    return {"input_ids": ids, "labels": labels, "position_ids": torch.arange(width).expand_as(ids)}


SHOWN = {
    "packed": "packed",
    "padded": "padded by itself",
    "as written": "padded, by its own attention",
    "refused": "refused",
    "not built": "not tried",
}


def line_of(row: Row) -> str:
    from duoka.plan.families import FAMILIES

    why = row.why.replace("|", "/")
    if row.has_experts:
        known = "" if row.model_type in FAMILIES else ", whose sizes the plan estimates"
        why = f"mixture of experts{known}{'; ' + why if why else ''}"
    errors = " | ".join(in_words(error) for error in (row.packed, row.padded, row.written))
    return f"| {row.model_type} | {SHOWN[row.rows]} | {errors} | {why} |"


def lines_of(lines: dict[str, str]) -> Iterator[str]:
    """The table, of the line of each model type."""
    kinds = [line.split("|")[2].strip() for line in lines.values()]
    counts = ", ".join(f"{kinds.count(name)} {name}" for name in SHOWN.values())
    yield f"{len(lines)} model types of transformers: {counts}."
    yield ""
    yield "| model type | rows | packed against alone | padded against alone | by its own attention | why |"
    yield "|---|---|---|---|---|---|"
    yield from (lines[name] for name in sorted(lines))


def in_words(error: float | None) -> str:
    return "-" if error is None else "exact" if error < EXACT else f"off by {error:.1%}"


def written_rows() -> dict[str, str]:
    """What docs/models.md says of each model type: its column `rows`."""
    return {name: line.split("|")[2].strip() for name, line in written_lines().items()}


def written_lines() -> dict[str, str]:
    text = TABLE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]
    lines = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("| ")}
    return {name: line for name, line in lines.items() if name != "model type"}


def write_table(rows: list[Row]) -> None:
    """With these rows; lines of other model types stay as they are."""
    before, rest = TABLE.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    known = written_lines() | {row.model_type: line_of(row) for row in rows}
    lines = {name: known[name] for name in sorted({*all_families(), *known})}
    TABLE.write_text("\n".join((before + BEGIN, *lines_of(lines), END + after)), encoding="utf-8")


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    rows = []
    for name in names or [*all_families(), *seeing_families()]:
        rows.append(measure_family(name))
        print(rows[-1], file=sys.stderr, flush=True)
    causal = set(all_families())
    found = {"packed": "packed", "padded": "padded", "as written": "written"}
    learns = {row.model_type for row in rows if row.rows in found and getattr(row, found[row.rows]) is not None}
    write_table([row for row in rows if row.model_type in causal or row.model_type in learns])


if __name__ == "__main__":
    main(sys.argv[1:])
