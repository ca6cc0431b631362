"""A tokenizer from text: byte-level BPE, with the marks that chats and tools need, saved as transformers saves one.

`duoka data tokenizer` calls this. Text is read once, record by record; nothing of it is kept but what the library
counts. The same files give the same tokenizer.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from duoka.data.read.detect import detect_format
from duoka.data.read.example import AnyExample, BadRecord, Preference, SetFormat, Text, check_whole, names_of
from duoka.data.read.record import Record
from duoka.data.read.record_kinds import read_record
from duoka.data.read.records import check_file, find_pieces, is_data_file, read_piece
from duoka.data.read.registry import set_with_name
from duoka.errors import ConfigError, DataError, Fault, Faults, StorageError
from duoka.runs.folder import apply_umask
from duoka.units import format_bytes

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BEGIN, PAD, TURN_BEGINS, TURN_ENDS = "<|bos|>", "<|pad|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (
    BEGIN, PAD, TURN_BEGINS, TURN_ENDS, "<tools>", "</tools>", "<tool_call>", "</tool_call>", "<tool_response>",
    "</tool_response>",
)  # fmt: skip
# Words with the sign or blank before them; digits in pairs, or each number of a text would be a token; signs; blanks.
WORDS = (
    r"(?i:'(?:[sdmt]|ll|ve|re))|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LEAST = 256 + len(SPECIAL_TOKENS)
_PIECE_BYTES, _RECORD_BYTES = 4 << 20, 64 << 20
_MOST_FAULTS = 5
_MOST_LOOKED_AT = 256  # documents, for bytes per token
_TEMPLATE = """\
{%- if tools -%}
{{- '<|im_start|>system\\n' -}}
{%- if messages[0].role == 'system' -%}{{ messages[0].content + '\\n\\n' }}{%- endif -%}
{{- '<tools>\\n' -}}
{%- for tool in tools -%}{{ (tool | tojson) + '\\n' }}{%- endfor -%}
{{- '</tools>\\nCall one:\\n<tool_call>\\n{"name": "...", "arguments": {...}}\\n</tool_call><|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{{ '<|im_start|>user\\n<tool_response>\\n' + (message.content or '') + '\\n</tool_response><|im_end|>\\n' }}
{%- elif message.role != 'system' or not tools -%}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') -}}
{%- for given in message.tool_calls or [] -%}
{%- set call = given.function or given -%}
{{- ('\\n' if message.content or not loop.first else '') + '<tool_call>\\n{"name": "' + call.name -}}
{{- '", "arguments": ' -}}
{{- (call.arguments if call.arguments is string else call.arguments | tojson) + '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""


@dataclass
class Learned:
    """Counts of the text read, and figures of the tokenizer."""

    vocab_size: int = 0
    asked: int = 0
    num_documents: int = 0
    num_bytes: int = 0
    num_empty: int = 0
    num_bad: int = 0
    stopped_early: bool = False
    bytes_per_token: float = 0.0
    faults: list[Fault] = field(default_factory=list)

    def lines(self) -> list[str]:
        bits = [f"{self.num_documents:,} documents, {format_bytes(self.num_bytes)} of text"]
        bits += [f"{self.num_empty:,} empty ones passed over"] if self.num_empty else []
        bits += [f"{self.num_bad:,} wrong ones left out"] if self.num_bad else []
        bits += ["the rest was not read (--max-bytes)"] if self.stopped_early else []
        out = [
            f"read       {'; '.join(bits)}",
            f"vocabulary {self.vocab_size:,} tokens, {len(SPECIAL_TOKENS)} of them marks",
        ]
        if self.vocab_size < self.asked:
            out.append(f"           the text has no more pairs that come twice: {self.asked:,} were asked for")
        return [*out, f"size       {self.bytes_per_token:.2f} bytes of this text per token"]


def train_tokenizer(
    files: Sequence[str],
    out: Path,
    *,
    vocab_size: int,
    max_bytes: int,
    column: str | None = None,
    skip_bad: bool = False,
) -> Learned:
    """Learn a tokenizer from the text of `files` and write its folder. Raises ConfigError, DataError, Faults."""
    if vocab_size < LEAST:
        raise ConfigError(
            f"a vocabulary of {vocab_size} has no room for the 256 bytes and {len(SPECIAL_TOKENS)} marks of chats",
            fix=f"write at least {LEAST}, usual are 8192 to 65536:   --vocab-size 32768",
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is there already", fix="name another folder:   --out tokenizer2   or delete it")
    paths = _find_files(files)
    learned, looked_at = Learned(asked=vocab_size), _Sample()
    texts = _read_texts(paths, learned, max_bytes, column, skip_bad)
    tokenizer = _learn((looked_at.keep(text) for text in texts), vocab_size)
    if learned.faults and not skip_bad:
        raise Faults(learned.faults, title="data error")
    if not learned.num_documents:
        raise DataError("there is no text in these files", where=", ".join(map(str, paths[:3])), fix="look into them")
    learned.vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
    learned.bytes_per_token = looked_at.bytes_per_token(tokenizer)
    _write(tokenizer, out)
    return learned


def _find_files(names: Sequence[str]) -> list[Path]:
    paths: list[Path] = []
    for name in names:
        path = Path(name).expanduser()
        if (made := None if path.exists() else set_with_name(name, Path())) is not None:
            paths.append(made)
        elif path.is_dir():
            found = sorted(file for file in path.iterdir() if file.is_file() and is_data_file(file))
            if not found:
                raise DataError(f"the folder {name} holds no file that duoka reads", fix="name files of text")
            paths += found
        else:
            paths.append(path)
    faults = [fault for path in paths if (fault := _look(path)) is not None]
    if faults:
        raise Faults(faults, title="data error")
    return paths


def _look(path: Path) -> Fault | None:
    if not path.exists():
        return Fault(f"there is no file {path}", file=str(path), fix="name files or folders of text")
    return check_file(path)


def _read_texts(
    paths: Sequence[Path], learned: Learned, max_bytes: int, column: str | None, skip_bad: bool
) -> Iterator[str]:
    """Every text in order, counted; ends early at `max_bytes`, or after a few wrong records."""
    for path in paths:
        form: SetFormat | None = None
        for piece in find_pieces(path, _PIECE_BYTES):
            for record in [piece] if isinstance(piece, Fault) else read_piece(piece, _RECORD_BYTES):
                if isinstance(record, Record) and form is None:
                    form = _form_of(record, column)
                texts = record if isinstance(record, Fault) else _texts_in(record, form)
                if isinstance(texts, Fault):
                    learned.num_bad += 1
                    learned.faults += [] if len(learned.faults) >= _MOST_FAULTS else [texts]
                    if not skip_bad and len(learned.faults) >= _MOST_FAULTS:
                        return
                    continue
                for text in texts:
                    if learned.num_bytes >= max_bytes:
                        learned.stopped_early = True
                        return
                    learned.num_empty += not text.strip()
                    if text.strip():
                        learned.num_documents += 1
                        learned.num_bytes += len(text.encode("utf-8", "replace"))
                        yield text


def _form_of(record: Record, column: str | None) -> SetFormat:
    if column is not None:
        return SetFormat("text", {"text": column}, kind="text")
    return detect_format(record.value) or SetFormat("text", {"text": "text"}, kind="text")


def _texts_in(record: Record, form: SetFormat | None) -> list[str] | Fault:
    """The texts of a record: a document, or the messages of a talk."""
    assert form is not None
    value = record.value
    if form.kind == "text" and isinstance(value, dict):
        column = form.columns["text"]
        text = value.get(column)
        if isinstance(text, str):
            return _whole(record, [text])
        what = (
            f"{column!r} is no text" if column in value else f"there is no {column!r}; the record has {names_of(value)}"
        )
        return _fault(record, what, "name the column of the text:   --column NAME")
    try:
        return _whole(record, _parts_of(read_record(value, form)))
    except BadRecord as error:
        return _fault(record, error.rule, error.fix)


def _whole(record: Record, texts: list[str]) -> list[str] | Fault:
    """The texts, if a UTF-8 file could hold them."""
    try:
        for place, text in enumerate(texts, 1):
            check_whole(text, f"message {place}")
    except BadRecord as error:
        return _fault(record, error.rule, error.fix)
    return texts


def _fault(record: Record, what: str, fix: str) -> Fault:
    return Fault(what, file=record.file, line=record.line, source=record.text, fix=fix)


def _parts_of(example: AnyExample) -> list[str]:
    if isinstance(example, Text):
        return [example.text]
    answers = (example.chosen, example.rejected) if isinstance(example, Preference) else ()
    return [message.content for message in (*example.messages, *answers)]


def _learn(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(SPECIAL_TOKENS), min_frequency=2, show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    # A model that is pretrained with it sees every document behind this token: whoever asks it to go on from plain text
    # (transformers, vLLM, lm-eval) asks the tokenizer alone what a text begins with.
    first = [(BEGIN, SPECIAL_TOKENS.index(BEGIN))]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=first)
    return tokenizer


class _Sample:
    """A sample of documents spread evenly over a stream of unknown length."""

    def __init__(self) -> None:
        self.kept: list[str] = []
        self.num_seen, self.stride = 0, 1

    def keep(self, text: str) -> str:
        if self.num_seen % self.stride == 0:
            self.kept.append(text[: 1 << 16])
            if len(self.kept) >= 2 * _MOST_LOOKED_AT:
                self.kept, self.stride = self.kept[::2], self.stride * 2
        self.num_seen += 1
        return text

    def bytes_per_token(self, tokenizer: Tokenizer) -> float:
        encodings = tokenizer.encode_batch(self.kept, add_special_tokens=False)
        num_bytes = sum(len(text.encode("utf-8", "replace")) for text in self.kept)
        return num_bytes / max(1, sum(len(encoding.ids) for encoding in encodings))


def _write(tokenizer: Tokenizer, out: Path) -> None:
    """The folder in one step, in the form that transformers reads."""
    facts: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BEGIN, "eos_token": TURN_ENDS, "pad_token": PAD,
        "additional_special_tokens": [TURN_BEGINS], "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000_000,
    }  # fmt: skip
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))
        try:
            tokenizer.save(str(draft / "tokenizer.json"))
            (draft / "tokenizer_config.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
            (draft / "chat_template.jinja").write_text(_TEMPLATE, encoding="utf-8")
            apply_umask(draft)
            if out.is_dir():
                out.rmdir()  # an empty one
            draft.rename(out)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    except OSError as error:
        raise StorageError(f"the tokenizer cannot be written: {error.strerror or error}", where=str(out)) from None
