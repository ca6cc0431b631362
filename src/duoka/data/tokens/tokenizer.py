"""A model's tokenizer and chat template as data needs them: text to ids with offsets, messages to text.

Reads tokenizer.json and the template files with `tokenizers` and `jinja2` alone, because importing transformers
costs seconds and loads torch; a folder without tokenizer.json goes through transformers. Never trains, never saves.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from duoka.data.tokens.reasoning import find_key
from duoka.data.tokens.templates import NAMED_TEMPLATES, compile_template
from duoka.errors import ConfigError
from duoka.registry import nearest
from duoka.runs.folder import write_json_atomic

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LETTER = "\ue000"  # an answer that no template writes by itself
_FACTS = ("template", "tool_template", "template_name", "special_tokens", "notes")


@dataclass(frozen=True)
class Tokens:
    """A text's ids, and the characters [start, end) of each."""

    ids: np.ndarray  # (tokens,) int32
    starts: np.ndarray  # (tokens,) int64
    ends: np.ndarray


def _with_offsets(encoding: Any) -> Tokens:
    # One flat walk: NumPy takes several times as long to look into a list of pairs.
    flat = np.fromiter(itertools.chain.from_iterable(encoding.offsets), np.int64, 2 * len(encoding.ids))
    return Tokens(np.asarray(encoding.ids, np.int32), flat[0::2], flat[1::2])


@dataclass(frozen=True)
class ChatTokenizer:
    """A tokenizer with the chat template in force. `template_name` is "model" when it is the model's own."""

    backend: Tokenizer = field(repr=False)
    template: str
    tool_template: str  # for conversations with tools; mostly the same
    template_name: str
    special_tokens: Mapping[str, str]  # bos_token, eos_token, ... as the template sees them
    notes: tuple[str, ...] = ()

    @property
    def eos_id(self) -> int | None:
        return self._id_of("eos_token")

    @property
    def bos_id(self) -> int | None:
        return self._id_of("bos_token")

    @property
    def unknown_id(self) -> int | None:
        """The unknown token; None when that token has another use too."""
        text = self.special_tokens.get("unk_token")
        others = {token for name, token in self.special_tokens.items() if name != "unk_token"}
        return self._id_of("unk_token") if text is not None and text not in others else None

    @property
    def pad_id(self) -> int:
        """The padding id; any valid id will do, as padding is never a target and never attended to."""
        for name in ("pad_token", "eos_token", "unk_token"):
            found = self._id_of(name)
            if found is not None:
                return found
        return 0

    def _id_of(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)

    @cached_property
    def special_texts(self) -> tuple[str, ...]:
        """The tokens that end turns and frame texts: those that the tokenizer never splits."""
        added = {token.content for token in self.backend.get_added_tokens_decoder().values() if token.special}
        return tuple(sorted(added | set(self.special_tokens.values())))

    @cached_property
    def added(self) -> dict[int, str]:
        """Tokens that were added to the vocabulary, as they stand in text."""
        return {number: token.content for number, token in self.backend.get_added_tokens_decoder().items()}

    @cached_property
    def writes_prompt(self) -> bool:
        """True when the template knows how to begin the assistant's turn (most do)."""
        asked = [{"role": "user", "content": "?"}]
        return self.render(asked, prompt=True) != self.render(asked)

    @cached_property
    def begins_question(self) -> str:
        """The token that stands right behind an answer where the template asks on; "" where text or a blank does."""
        from jinja2 import TemplateError

        asked = [{"role": "user", "content": "?"}]
        try:
            text = self.render([*asked, {"role": "assistant", "content": _LETTER}, *asked])
        except (TemplateError, TypeError, ValueError, KeyError):
            return ""
        return self.special_at(text, text.rfind(_LETTER) + 1) if _LETTER in text else ""

    def special_at(self, text: str, at: int) -> str:
        """The token that frames texts and stands there; "" where none does, or the one that begins any text."""
        found = (special for special in self.special_texts if special and text.startswith(special, at))
        token = max(found, key=len, default="")
        return "" if token == self.special_tokens.get("bos_token") else token

    @cached_property
    def reasoning_keys(self) -> tuple[str | None, str | None]:
        """By which key the template takes the reasoning of an answer, without tools and with some."""
        if not self.writes_prompt:
            return None, None  # where an answer begins is seen by its words alone: what stands before is its header
        function = {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}}
        tools = [{"type": "function", "function": function}]
        return find_key(self.render), find_key(lambda messages: self.render(messages, tools))

    @cached_property
    def fingerprint(self) -> str:
        """Changes whenever the same conversation might get other ids."""
        facts = (self.template, self.tool_template, sorted(self.special_tokens.items()))
        digest = hashlib.blake2b(json.dumps(facts, ensure_ascii=False).encode(), digest_size=16)
        digest.update(self.backend.to_str().encode())
        return digest.hexdigest()

    def save(self, file: Path) -> None:
        """All of it in one file, so that processes that tokenize need not find it again."""
        facts = {name: getattr(self, name) for name in _FACTS}
        write_json_atomic(file, {**facts, "backend": self.backend.to_str()})

    @classmethod
    def load(cls, file: Path) -> ChatTokenizer:
        from tokenizers import Tokenizer

        facts = json.loads(file.read_text(encoding="utf-8"))
        return cls(backend=Tokenizer.from_str(facts.pop("backend")), **facts)

    def render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, *, prompt: bool = False
    ) -> str:
        """Messages as text; `prompt` adds the beginning of the assistant's next turn."""
        template = compile_template(self.tool_template if tools else self.template)
        text: str = template.render(
            messages=messages, tools=tools, documents=None, add_generation_prompt=prompt, **self.special_tokens
        )
        return text

    def encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids, and the characters [start, end) that each stands for. Special tokens are those in the text."""
        encoding = self.backend.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def encode_many(self, texts: Sequence[str]) -> list[Tokens]:
        """The same for many texts at once, several times faster."""
        if self.token_bytes is None:
            return [_with_offsets(one) for one in self.backend.encode_batch(list(texts), add_special_tokens=False)]
        out = []
        # Offsets cost more than the ids: where tokens are bytes, their lengths tell them.
        for text, one in zip(texts, self.backend.encode_batch_fast(list(texts), add_special_tokens=False), strict=True):
            ids = np.asarray(one.ids, np.int32)
            ends = np.cumsum(self.token_bytes[ids], dtype=np.int64)
            starts = ends - self.token_bytes[ids]
            if not text.isascii():
                raw = text.encode("utf-8")
                place = np.cumsum((np.frombuffer(raw, np.uint8) & 0xC0) != 0x80) - 1  # byte -> its character
                if len(ends) and int(ends[-1]) == len(raw):
                    out.append(Tokens(ids, place[starts], place[ends - 1] + 1))
                    continue
            elif int(ends[-1] if len(ends) else 0) == len(text):
                out.append(Tokens(ids, starts, ends))
                continue
            # A normalizer has changed the text, or a blank was put before it: ask for the offsets after all.
            out.append(_with_offsets(self.backend.encode(text, add_special_tokens=False)))
        return out

    @cached_property
    def token_bytes(self) -> np.ndarray | None:
        """How many bytes of text each id stands for; None for tokenizers whose tokens are no bytes."""
        from tokenizers.decoders import ByteLevel

        if not isinstance(self.backend.decoder, ByteLevel):
            return None
        added = self.backend.get_added_tokens_decoder()
        sizes = np.zeros(self.backend.get_vocab_size() + len(added) + max(added, default=0) + 1, np.int64)
        for token, number in self.backend.get_vocab().items():
            sizes[number] = len(token)  # a byte is one letter of the alphabet
        for number, special in added.items():
            sizes[number] = len(special.content.encode("utf-8"))
        return sizes

    @cached_property
    def text_bytes(self) -> np.ndarray | None:
        """As `token_bytes`, but special tokens stand for no text at all: what bits per byte are counted by."""
        if self.token_bytes is None:
            return None
        sizes: np.ndarray = self.token_bytes.copy()
        for text in self.special_texts:
            number = self.backend.token_to_id(text)
            if number is not None:
                sizes[number] = 0
        return sizes

    @cached_property
    def beginning(self) -> tuple[int, ...]:
        """What the tokenizer itself puts before a plain text: many name a token for it and never do (SmolLM2, Qwen)."""
        ids: list[int] = self.backend.encode("", add_special_tokens=True).ids
        return tuple(ids[:1]) if self.bos_id is not None and ids[:1] == [self.bos_id] else ()

    def encode_plain(self, text: str) -> tuple[int, ...]:
        """The ids of a text that no template has written, as whoever goes on from it expects it to begin."""
        ids, begin = tuple(self.encode(text)[0]), self.beginning
        return ids if ids[:1] == begin else (*begin, *ids)

    def decode(self, ids: list[int]) -> str:
        text: str = self.backend.decode(ids, skip_special_tokens=False)
        return text


def load_tokenizer(folder: Path, template: str = "auto", *, trust_remote_code: bool = False) -> ChatTokenizer:
    """The tokenizer in a model's folder. Raises ConfigError when it, or the template's name, is none."""
    config = _read_json(folder / "tokenizer_config.json")
    file = folder / "tokenizer.json"
    if file.is_file():
        backend, special = _read_backend(file), _special_tokens(folder, config)
        own = _own_templates(folder, config)
        if not _knows(backend, config):
            backend, special, own = _load_with_transformers(folder, trust_remote_code)
    else:
        backend, special, own = _load_with_transformers(folder, trust_remote_code)
    backend.no_truncation()
    backend.no_padding()
    name, text, notes = _choose_template(template, own, backend)
    tool_text = own.get("tool_use", text) if name == "model" else text
    return ChatTokenizer(backend, text, tool_text, name, special, notes)


def _choose_template(wanted: str, own: Mapping[str, str], backend: Tokenizer) -> tuple[str, str, tuple[str, ...]]:
    if wanted == "auto" and "default" in own:
        return "model", own["default"], ()
    if wanted == "auto":
        # Without the markers a ChatML turn would end in a dozen pieces of text that no generator stops at.
        name = "chatml" if backend.token_to_id("<|im_end|>") is not None else "plain"
        note = f"the model ships no chat template; {name} is used (model.template names another)"
        return name, NAMED_TEMPLATES[name], (note,)
    if wanted not in NAMED_TEMPLATES:
        guess = nearest(wanted, NAMED_TEMPLATES)
        hint = f"did you mean {guess!r}? " if guess else ""
        known = ", ".join(("auto", *sorted(NAMED_TEMPLATES)))
        raise ConfigError(f"model.template is {wanted!r}, and there is no such template", fix=f"{hint}known: {known}")
    return wanted, NAMED_TEMPLATES[wanted], ()


def _read_backend(file: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    try:
        # From bytes: the library opens paths in its own way, which fails on some that are not ASCII.
        return Tokenizer.from_buffer(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the tokenizer cannot be read ({error})", where=str(file), fix="copy the model's folder again"
        ) from None


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    older = _read_json(folder / "special_tokens_map.json")
    found = {}
    for name in _TOKEN_NAMES:
        token = config.get(name, older.get(name))
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            found[name] = token
    return found


def _own_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The model's templates by name; the usual one is "default"."""
    file = folder / "chat_template.jinja"
    own: dict[str, str] = {}
    given = config.get("chat_template")
    if isinstance(given, str):
        own["default"] = given
    elif isinstance(given, list):
        own |= {entry["name"]: entry["template"] for entry in given if isinstance(entry, dict)}
    if file.is_file():
        own["default"] = file.read_text(encoding="utf-8")
    for extra in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        own[extra.stem] = extra.read_text(encoding="utf-8")
    return own


def _knows(backend: Tokenizer, config: Mapping[str, Any]) -> bool:
    """True when tokenizer.json has every token that the older tokenizer_config.json adds, under the same id."""
    added = config.get("added_tokens_decoder")
    if not isinstance(added, dict):
        return True
    return all(backend.token_to_id(token["content"]) == int(number) for number, token in added.items())


def _load_with_transformers(folder: Path, trust_remote_code: bool) -> tuple[Tokenizer, dict[str, str], dict[str, str]]:
    """For folders and Hub ids without a complete tokenizer.json. Slow: this imports torch."""
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    try:
        slow = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError, KeyError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        fix = "the folder needs tokenizer.json and tokenizer_config.json"
        raise ConfigError(f"there is no tokenizer in {folder} ({reason})", fix=fix) from None
    backend = getattr(slow, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise ConfigError(
            f"the tokenizer in {folder} has no fast form, and duoka needs its offsets",
            fix="convert it: AutoTokenizer.from_pretrained(...).save_pretrained(...) writes tokenizer.json",
        )
    own = slow.chat_template
    templates = dict(own) if isinstance(own, dict) else {"default": own} if own else {}
    special = {name: str(value) for name in _TOKEN_NAMES if (value := getattr(slow, name, None)) is not None}
    return Tokenizer.from_str(backend.to_str()), special, templates


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
