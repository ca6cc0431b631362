"""From a micro-batch of the loader to what the model takes."""

from __future__ import annotations

import torch

from duoka.data.feed.loader import Batch


def model_inputs(micro: Batch, device: torch.device) -> dict[str, torch.Tensor | None]:
    """What LossModel.forward takes, on the device. Padding needs no mask: it stands right of all that looks back."""
    return {
        "input_ids": micro.input_ids.to(device, non_blocking=True),
        "labels": micro.labels.to(device, non_blocking=True),
        "position_ids": micro.position_ids.to(device, non_blocking=True),
        "token_keys": None if micro.token_keys is None else micro.token_keys.to(device, non_blocking=True),
        "boundaries": micro.boundaries,  # stays on the host: attention cuts the row by it
    }
