"""`ScoreModel`: what is parallelized and trained where the model answers with scores."""

from __future__ import annotations

from typing import Any

import torch

from duoka.model.build import Answer, LossModel
from duoka.model.chunks import Places
from duoka.model.documents import Documents


class ScoreModel(LossModel):
    """Called as a LossModel; answers with (rows, tokens) fp32: the score of what stands until each token."""

    def __init__(self, lm: torch.nn.Module, pad_id: int) -> None:
        super().__init__(lm, own_logits=True)
        core: Any = self.core
        core.config.get_text_config().pad_token_id = pad_id  # transformers reads scores by it

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
        core: Any = self.core
        options: dict[str, Any] = {"use_cache": False, "position_ids": position_ids, "input_ids": entry}
        if boundaries is not None:
            edges = boundaries.edges
            options.update(documents=boundaries, cu_seq_lens_q=edges, cu_seq_lens_k=edges)
        hidden = core.get_decoder()(**options).last_hidden_state
        # Outside of autocast: a score in half precision has too few digits to be compared.
        with torch.autocast(entry.device.type, enabled=False):
            # Under adapters the head lies there twice, as it came and as it is trained.
            weight = max(core.score.parameters(), key=lambda one: one.requires_grad)
            scores: torch.Tensor = core.score(hidden.to(weight.dtype)).squeeze(-1).float()
        return scores if boundaries is None else boundaries.expand(scores), None
