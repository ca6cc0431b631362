"""A model that does not exist yet, as a folder: config.json and tokenizer, and a mark in place of weights.

`models.model_folder` makes one for `model.depth`; loading draws its weights (random_init.py). Knows no torch.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from duoka.config.schema import ModelConfig
from duoka.errors import ConfigError
from duoka.plan.shape import facts_of_new
from duoka.runs.cache import cache_folder, make_folder
from duoka.runs.folder import apply_umask, read_json

MARK = "new_model.json"
VOCABULARY_MULTIPLE = 64  # matrix products of odd widths are slow on GPUs
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip


def is_new(folder: Path) -> bool:
    """True for a folder whose weights are still to be drawn."""
    return (folder / MARK).is_file()


def new_model_folder(model: ModelConfig, tokenizer: Path, say: Callable[[str], None]) -> Path:
    """The folder of a new model of those sizes with that tokenizer; made once, then reused."""
    tokens = _read_tokenizer(tokenizer)
    facts = facts_of_new(model, padded_vocabulary(tokens.get_vocab(with_added_tokens=True).values()))
    named = _special_ids(tokenizer, tokens)
    facts |= {
        "architectures": ["Qwen3ForCausalLM"], "dtype": "float32", "initializer_range": 0.02,
        "max_position_embeddings": model.context, "bos_token_id": named.get("bos_token"),
        "eos_token_id": named.get("eos_token"), "pad_token_id": named.get("pad_token"),
    }  # fmt: skip
    digest = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=8)
    files = [tokenizer / name for name in TOKENIZER_FILES if (tokenizer / name).is_file()]
    for path in files:
        digest.update(path.name.encode() + path.read_bytes())
    folder = cache_folder() / "models" / f"new-depth-{model.depth}-{digest.hexdigest()}"
    if is_new(folder):
        return folder
    say(f"a new model of depth {model.depth}: its config is in {folder}")
    draft = Path(tempfile.mkdtemp(dir=make_folder(folder.parent), prefix=f".{folder.name}."))
    for path in files:
        shutil.copyfile(path, draft / path.name)
    (draft / "config.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    (draft / MARK).write_text(json.dumps({"depth": model.depth}) + "\n", encoding="utf-8")
    apply_umask(draft)
    try:
        draft.rename(folder)
    except OSError:  # another rank was faster
        shutil.rmtree(draft)
        if not is_new(folder):
            raise
    return folder


def padded_vocabulary(ids: Iterable[int]) -> int:
    """Rows of embedding and head: one for every id, and some that no text ever has, up to a multiple of 64."""
    return -(-(max(ids) + 1) // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def read_vocabulary(tokenizer: Path) -> int:
    return padded_vocabulary(_read_tokenizer(tokenizer).get_vocab(with_added_tokens=True).values())


def _read_tokenizer(folder: Path) -> Any:
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    try:
        return Tokenizer.from_buffer(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.tokenizer is {str(folder)!r}, and its tokenizer.json cannot be read ({error})",
            fix="make one from your text:   duoka data tokenizer FILES --out tok",
        ) from None


def _special_ids(folder: Path, tokenizer: Any) -> dict[str, int]:
    facts = read_json(folder / "tokenizer_config.json") or {}
    found = {}
    for name in ("bos_token", "eos_token", "pad_token"):
        token = facts.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        number = tokenizer.token_to_id(token) if isinstance(token, str) else None
        if number is not None:
            found[name] = number
    return found
