"""Sums over the documents of a micro-batch: whole answers out of numbers of tokens, packed or padded."""

from __future__ import annotations

import torch

from duoka.data.feed.answers import PADDING
from duoka.data.feed.loader import IGNORED, Batch


def document_sums(values: torch.Tensor, micro: Batch) -> torch.Tensor:
    """(documents,) float64: the sums of `values` (rows, tokens), in the order in which documents lie."""
    # Wide: a sum of a thousand log-probabilities in fp32 loses digits by the order in which they lie.
    wide = values.double()
    if micro.boundaries is None:
        return wide.sum(dim=1)
    return torch.stack([part.sum() for part in wide[0].split(micro.boundaries.diff().tolist())])


def reference_of(micro: Batch) -> torch.Tensor | None:
    """(documents,) float64 on the host. Never of samples that the pass left out: batches of these are at most built
    ahead, behind a run's last step."""
    if micro.reference is not None and micro.reference.isnan().any():
        raise RuntimeError("the run comes to samples whose reference it did not compute")
    return micro.reference


def count_targets(micro: Batch) -> torch.Tensor:
    """(documents,) float64 on the host: how many target tokens each document has."""
    return document_sums(micro.labels != IGNORED, micro)


def pair_weights(micro: Batch, weight: float) -> torch.Tensor:
    """(rows, tokens) on the host: `weight` for tokens beyond the length of the pair's shorter answer, else 1."""
    assert micro.sides is not None
    counts, real = count_targets(micro), (micro.sides != PADDING).nonzero().view(-1, 2)
    fewest = counts.clone()
    fewest[real] = counts[real].amin(dim=1, keepdim=True).expand(-1, 2)
    return weights_beyond(micro, fewest, weight)


def weights_beyond(micro: Batch, first: torch.Tensor, weight: float) -> torch.Tensor:
    """(rows, tokens) on the host: 1 for the first `first` (documents,) targets of each document, `weight` beyond."""
    is_target = micro.labels != IGNORED
    if micro.boundaries is None:
        places, most = is_target.cumsum(dim=1), first[:, None]
    else:
        sizes = micro.boundaries.diff()
        parts = is_target[0].split(sizes.tolist())
        places = torch.cat([part.cumsum(dim=0) for part in parts])[None]
        most = first.repeat_interleave(sizes)[None]
    return torch.where(places <= most, 1.0, weight)
