"""From a micro-batch of the loader to what the model takes."""

from __future__ import annotations

from typing import Any

import torch

from duoka.data.feed.loader import Batch
from duoka.model.chunks import Places
from duoka.model.documents import Documents


def model_inputs(micro: Batch, device: torch.device) -> dict[str, Any]:
    """What LossModel.forward takes, on the device. Padding needs no mask: it stands right of all that looks back."""
    return {
        "input_ids": micro.input_ids.to(device, non_blocking=True),
        "labels": micro.labels.to(device, non_blocking=True),
        "position_ids": micro.position_ids.to(device, non_blocking=True),
        "token_keys": None if micro.token_keys is None else micro.token_keys.to(device, non_blocking=True),
        "places": None if micro.target_places is None else Places(micro.target_places.to(device, non_blocking=True)),
        # Measured while they are on the host: DDP and FSDP bring every tensor to the device, and to ask it for them
        # back would wait for all that it has to do.
        "boundaries": None if micro.boundaries is None else Documents.of(micro.boundaries, device, micro.input_ids),
    }
