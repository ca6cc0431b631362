"""A tiny model that says what it was taught, in a few seconds of training: answers that a test can wait for by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tiny import build_tiny_tokenizer, write_tiny_model

# Two answers to one question: asked again, it sooner or later gives the other one.
TALKS = {
    "Who are you?": ["I am duoka 多卡 🎉."],
    "你好": ["你好！我是多卡 🚀。"],
    "Toss a coin": ["heads", "tails"],
}
SONG = "la " * 60  # is sung for ever: no end of turn was taught


def write_talking_model(folder: Path, talks: Mapping[str, list[str]] = TALKS, *, seed: int = 0) -> Path:
    """Fails where it has not learned its answers, so that a test does not wait for what will never be said."""
    import torch
    from transformers import AutoModelForCausalLM

    write_tiny_model(folder, tied=False, seed=seed)
    tokenizer = build_tiny_tokenizer()
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = [(ask, f"{answer}<|im_end|>") for ask, answers in talks.items() for answer in answers] + [("Sing", SONG)]
    asked = [f"<|im_start|>user\n{ask}<|im_end|>\n<|im_start|>assistant\n" for ask, _ in rows]
    starts = [len(tokenizer.encode(text, add_special_tokens=False)) for text in asked]
    texts = [before + answer for before, (_, answer) in zip(asked, rows, strict=True)]
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    width = max(map(len, ids))
    tokens = torch.tensor([[*one, *[2] * (width - len(one))] for one in ids])
    labels = torch.full_like(tokens, -100)
    for row, (one, start) in enumerate(zip(ids, starts, strict=True)):
        labels[row, start : len(one)] = tokens[row, start : len(one)]
    optimizer = torch.optim.AdamW(lm.parameters(), lr=3e-3, weight_decay=0.0)
    for _ in range(400):
        loss = lm(input_ids=tokens, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss.item() < 0.02:
            break
    lm.save_pretrained(folder)
    assert loss.item() < 0.05, f"it has not learned what it is to say: {loss.item():.3f}"
    return folder
