"""Keys of the optimizer that nothing reads beside the others, and rates of another one: said, not refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from duoka.config.load import load_config
from duoka.optim.build import build_optimizer

YAML = "model: demo\ndata: {train: [identity]}\n"
LORA = "lora={targets: [q_proj, lm_head]}"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["optim.decay=0.5"], "optim.decay is 0.5"),
        (["optim.decay=0.5", "optim.schedule=wsd"], ""),
        (["optim.momentum=0.9"], "optim.momentum is 0.9"),
        (["optim.momentum=0.9", "optim.name=lars"], ""),
        (["optim.betas=[0.8, 0.9]", "optim.name=adafactor"], "betas (0.8, 0.9) and eps 1e-08"),
        (["optim.betas=[0.8, 0.9]", "optim.name=lamb"], ""),
        (["optim.embedding_lr=1e-3", "lora={}"], "lora leaves the embedding as it is"),
        (["optim.embedding_lr=1e-3"], ""),
        (["optim.head_lr=1e-3", "lora={}"], "lora leaves the head as it is"),
        (["optim.head_lr=1e-3", LORA], ""),
        (["model={name: '', depth: 12, tokenizer: demo}", "optim.name=adafactor", "optim.lr=1e-3"], ""),
    ],
)
def test_what_changes_nothing_is_said(tmp_path: Path, overrides: list[str], words: str) -> None:
    (tmp_path / "x.yaml").write_text(YAML, encoding="utf-8")
    unread = [note for note in load_config(tmp_path / "x.yaml", overrides).notes if "nothing" in note]
    assert len(unread) == bool(words) and words in "".join(unread), unread


@pytest.mark.parametrize(("name", "share"), [("lamb", 1.0), ("adafactor", 1.0), ("lars", 1e-3)])
def test_rates_of_these_are_shares_of_a_matrix_as_the_note_says(tmp_path: Path, name: str, share: float) -> None:
    (tmp_path / "x.yaml").write_text(YAML, encoding="utf-8")
    for lr, is_said in ((2e-5, True), (0.01, False)):
        loaded = load_config(tmp_path / "x.yaml", [f"optim.name={name}", f"optim.lr={lr}"])
        assert any("would hardly learn" in note for note in loaded.notes) == is_said
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(40, 30, dtype=torch.float64) * 3)
        before = weight.detach().clone()
        optimizer = build_optimizer({"weight": weight}, loaded.config.optim)
        weight.grad = torch.randn(40, 30, dtype=torch.float64)
        optimizer.step()
        moved = float((weight.detach() - before).norm() / before.norm())
        assert moved == pytest.approx(lr * share, rel=0.02)
