"""Activations that are computed again are the same activations: every gradient is equal to the bit."""

from pathlib import Path

import pytest
import torch

from duoka.model.build import load_model
from duoka.model.request import ModelRequest
from duoka.parallel.recompute import apply_recompute


def gradients(model: Path, how: str) -> tuple[dict[str, torch.Tensor], int]:
    """Of one backward pass, and how many bytes were kept for it."""
    lm = load_model(ModelRequest(model, dtype=torch.float32))
    lm.requires_grad_(True).train()
    if how:
        apply_recompute(lm, how)
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.randint(3, 250, (2, 48), generator=torch.Generator().manual_seed(0))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = lm(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return {name: p.grad for name, p in lm.named_parameters() if p.grad is not None}, sum(kept.values())


@pytest.mark.parametrize("how", ["full", "selective", "1/4", "1/2", "3/4"])
def test_gradients_are_equal_to_the_bit_and_less_is_kept(tiny_model: Path, how: str) -> None:
    (wanted, most), (found, less) = gradients(tiny_model, ""), gradients(tiny_model, how)
    assert found.keys() == wanted.keys() and len(wanted) > 30
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert less < most
