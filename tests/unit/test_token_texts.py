"""Single tokens as bytes: end to end they are the text, whatever kind of tokenizer cut it."""

from __future__ import annotations

import pytest
from tiny import build_tiny_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from duoka.data.tokens.token_texts import bytes_of
from duoka.data.tokens.tokenizer import ChatTokenizer, load_tokenizer

TEXT = "two words, 多卡 and é"


def by_words(tmp_path) -> ChatTokenizer:
    """As Llama 2's: words with their blank, and bytes for what no word knows."""
    marks = {f"<0x{byte:02X}>": byte for byte in range(256)}
    letters = ["▁", *"twordsan,", "▁w", "▁wo", "▁a", "▁an"]
    vocabulary = marks | {piece: 256 + place for place, piece in enumerate(letters)}
    merges = [("▁", "w"), ("▁w", "o"), ("▁", "a"), ("▁a", "n")]
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return ChatTokenizer(backend, "", "", "plain", {})


def by_bytes(tmp_path) -> ChatTokenizer:
    build_tiny_tokenizer().save_pretrained(tmp_path)
    return load_tokenizer(tmp_path)


def by_marked_words(tmp_path) -> ChatTokenizer:
    pieces = [(letter, -2.0) for letter in sorted(set(TEXT.replace(" ", "▁")))]
    backend = Tokenizer(models.Unigram([("<unk>", -9.0), *pieces, ("▁words", -3.0), ("▁", -2.0)], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    return ChatTokenizer(backend, "", "", "plain", {})


@pytest.mark.parametrize("make", [by_words, by_bytes, by_marked_words])
def test_tokens_end_to_end_are_the_text(make, tmp_path) -> None:
    tokenizer = make(tmp_path)
    ids = tokenizer.encode(TEXT)[0]
    parts = [bytes_of(tokenizer, token) for token in ids]
    assert b"".join(parts).removeprefix(b" ").decode() == TEXT
    assert len(ids) > len(TEXT) / 2 and tokenizer.decode(ids) == TEXT


def test_a_token_that_was_added_stands_for_itself_and_one_that_is_not_there_for_nothing(tmp_path) -> None:
    tokenizer = by_bytes(tmp_path)
    assert bytes_of(tokenizer, tokenizer.backend.token_to_id("<|im_end|>")) == b"<|im_end|>"
    assert bytes_of(tokenizer, 100_000) == b""
