"""What a rank holds, counted from storages, and who holds more than its share."""

from dataclasses import replace

import torch

from duoka.train.memory import AllocationWatch, Holdings, bytes_by_storage, explain_imbalance

EVEN = Holdings(weights_bytes=400, gradients_bytes=400, optimizer_bytes=800, activations_bytes=1000, num_tokens=100)


def test_births_are_counted_while_they_live():
    kept = []
    with AllocationWatch() as births:
        for _ in range(50):
            torch.ones(1000) * 2  # born and gone, its address given out again
        kept.append(torch.ones(500).exp())
        kept.append(kept[0].view(5, 100))
    assert sum(births.alive().values()) == 2000
    kept.clear()
    assert not births.alive()


def test_shared_storages_count_once():
    whole = torch.zeros(100)
    assert (
        sum(bytes_by_storage([whole, whole[:50], whole.view(10, 10), 7, torch.zeros(3, device="meta")]).values()) == 400
    )


def test_an_even_world_is_not_talked_about():
    assert explain_imbalance([EVEN, replace(EVEN, weights_bytes=420)]) == ""
    assert explain_imbalance([EVEN]) == ""


def test_the_fullest_rank_and_its_likely_cause_are_named():
    long = replace(EVEN, activations_bytes=3000, num_tokens=300)
    said = explain_imbalance([EVEN, long, EVEN])
    assert said.startswith("rank 1 holds ") and "most of it activations" in said
    assert "its longest micro-batch had 300 tokens, the mean over ranks is 167" in said
    said = explain_imbalance([replace(EVEN, optimizer_bytes=1800), EVEN])
    assert said.startswith("rank 0 holds ") and "most of it optimizer" in said and "does not divide by 2" in said
