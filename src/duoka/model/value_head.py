"""`ValueModel`: a language model with a head that says of each token what reward is still to come.

The head reads the hidden states that the words' head reads, beside the model, not in it: a saved model is the one that
it would be without. It begins at zero, so that the model answers as before and no draw of the head's is needed.
"""

from __future__ import annotations

from typing import Any

import torch

from duoka.model.build import Answer, LossModel
from duoka.model.chunks import Places
from duoka.model.documents import Documents

FILE = "value_head.safetensors"  # beside a model's own files, by the name and keys that TRL has for it


class ValueModel(LossModel):
    """Called as a LossModel; asked for `values` it answers with (log p, (2, rows, tokens): entropy and value)."""

    def __init__(self, lm: torch.nn.Module, *, own_logits: bool = False) -> None:
        super().__init__(lm, own_logits=own_logits)
        core: Any = self.core
        self.v_head = torch.nn.ModuleDict({"summary": torch.nn.Linear(core.config.get_text_config().hidden_size, 1)})
        for parameter in self.v_head.parameters():
            torch.nn.init.zeros_(parameter)

    def _answer(
        self,
        entry: torch.Tensor,
        labels: torch.Tensor,
        position_ids: torch.Tensor,
        boundaries: Documents | None,
        places: Places | None,
        answer: Answer,
        temperature: float = 1.0,
        hands_on: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        inputs = (entry, labels, position_ids, boundaries, places)
        if answer != "values":
            return super()._answer(*inputs, answer, temperature, hands_on)
        core: Any = self.core
        seen: list[torch.Tensor] = []
        handle = core.get_decoder().register_forward_hook(lambda _, __, output: seen.append(output.last_hidden_state))
        try:
            logps, entropy = super()._answer(*inputs, "entropy", temperature)
        finally:
            handle.remove()
        head: Any = self.v_head["summary"]
        # Outside of autocast: a value in half precision has too few digits for differences of neighbors.
        with torch.autocast(entry.device.type, enabled=False):
            values = head(seen[0].to(head.weight.dtype)).squeeze(-1)  # called: sharded by itself it gathers then
        if boundaries is not None:
            values = boundaries.expand(values)
        assert entropy is not None
        return logps, torch.stack((entropy.to(values.dtype), values))
