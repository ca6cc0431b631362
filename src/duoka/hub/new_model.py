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
    "vocab.json", "merges.txt", "vocab.txt", "spiece.model", "sentencepiece.bpe.model", "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
MORE_TEMPLATES = "additional_chat_templates/*.jinja"  # one for tools, mostly


def tokenizer_files(folder: Path) -> list[str]:
    """The files of a folder's tokenizer and of its chat templates, as they are called there."""
    templates = sorted(path.relative_to(folder).as_posix() for path in folder.glob(MORE_TEMPLATES))
    return [name for name in (*TOKENIZER_FILES, *templates) if (folder / name).is_file()]


def copy_tokenizer_files(source: Path, target: Path) -> None:
    for name in tokenizer_files(source):
        (target / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(source / name, target / name)


def copy_processor_files(source: Path, target: Path) -> None:
    """How images and sound become what a model's towers read."""
    for name in PROCESSOR_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def is_new(folder: Path) -> bool:
    """True for a folder whose weights are still to be drawn."""
    return (folder / MARK).is_file()


def is_of_depth(folder: Path) -> bool:
    """Whether they are drawn as `model.depth` has them; else as the architecture's own library does."""
    return "depth" in (read_json(folder / MARK) or {})


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
    return _make_folder(f"new-depth-{model.depth}", facts, tokenizer, {"depth": model.depth}, say)


def scratch_folder(named: Path, tokenizer: Path | None, say: Callable[[str], None]) -> Path:
    """The folder of a model of `named`'s architecture and sizes, without its weights; made once, then reused.

    With another tokenizer its vocabulary is as large as that needs.
    """
    facts: dict[str, Any] = json.loads((named / "config.json").read_text(encoding="utf-8"))
    for part in (facts, facts.get("text_config") or {}):
        part.pop("quantization_config", None)  # of weights that are not these
    if tokenizer is not None:
        tokens = _read_tokenizer(tokenizer)
        sizes = facts if "vocab_size" in facts or "text_config" not in facts else facts["text_config"]
        sizes["vocab_size"] = padded_vocabulary(tokens.get_vocab(with_added_tokens=True).values())
        ids = _special_ids(tokenizer, tokens)
        sizes |= {f"{name}_id": ids.get(name) for name in ("bos_token", "eos_token", "pad_token")}
    return _make_folder(f"scratch-{facts.get('model_type')}", facts, tokenizer or named, {"model": "from scratch"}, say)


def _make_folder(
    name: str, facts: dict[str, Any], tokenizer: Path, mark: dict[str, Any], say: Callable[[str], None]
) -> Path:
    """A folder of config, tokenizer and mark in the cache, by what is in them."""
    digest = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=8)
    for file in tokenizer_files(tokenizer):
        digest.update(file.encode() + (tokenizer / file).read_bytes())
    folder = cache_folder() / "models" / f"{name}-{digest.hexdigest()}"
    if is_new(folder):
        return folder
    say(f"a new model with random weights: its config is in {folder}")
    draft = Path(tempfile.mkdtemp(dir=make_folder(folder.parent), prefix=f".{folder.name}."))
    copy_tokenizer_files(tokenizer, draft)
    (draft / "config.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    (draft / MARK).write_text(json.dumps(mark) + "\n", encoding="utf-8")
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
