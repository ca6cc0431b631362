"""A model that reads and writes many sequences: prompts in chunks, and one token each for a fixed number of rows.

Numbers of torch's matrix products depend on how many rows they have, in their last bits. So these numbers are fixed: a
prompt is cut at multiples of CHUNK, whoever waits, and a decoding pass has all its rows, used or not; unless the
compiled products compute it (model/decode.py), which compute each row by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from duoka.errors import ConfigError
from duoka.model.decode import MOST_ROWS, answer_fast
from duoka.model.layers import unrecorded
from duoka.model.own_lengths import find_stretch, find_turn
from duoka.model.slots import Rows, SequenceCache
from duoka.model.together import TOLERANCE, distance_by_rows
from duoka.serve.batching.adapters import RowAdapters

CHUNK = 128  # tokens of a prompt that are read at once
# Of logits' spread, between reading a text at once and in pieces; of fp32 TOLERANCE. A right model of 30 layers was
# off by 5% in bf16, by 1e-6 in fp32; what is wrong is off by about as much as logits differ.
_TOLERANCE_OF_HALVES = 0.25


@dataclass
class Next:
    """One row of a decoding pass: its sequence, the newest token of it, and that token's position."""

    cache: SequenceCache
    token: int
    position: int
    adapter: str | None = None


class SlotModel:
    """At most `num_rows` sequences decode together. Called by one thread."""

    def __init__(self, lm: torch.nn.Module, num_rows: int) -> None:
        self.lm = lm
        self.num_rows = num_rows
        self.adapters = RowAdapters(lm)
        self._is_row_by_row = answer_fast(lm) and num_rows <= MOST_ROWS
        self.device = next(lm.parameters()).device
        self.own_window: int = getattr(lm.config.get_text_config(), "max_position_embeddings", None) or 1 << 30  # type: ignore[operator, union-attr]
        # Beyond its turn all keys of a text would be others, and one long row would turn those beside it.
        self.window = find_turn(lm.config) or self.own_window

    @torch.no_grad()
    def read(
        self, cache: SequenceCache, tokens: Sequence[int], start: int, adapter: str | None, *, keep_all: bool = False
    ) -> torch.Tensor:
        """Tokens of a prompt from position `start` on; returns fp32 logits of the last of them, or of all."""
        ids = torch.tensor([list(tokens)], device=self.device)
        places = torch.arange(start, start + len(tokens), device=self.device)[None]
        self.adapters.set_rows([adapter])
        out = self.lm(
            input_ids=ids, position_ids=places, use_cache=False, logits_to_keep=0 if keep_all else 1,
            slots=Rows((cache,), (start,)), **unrecorded(self.lm),
        )  # fmt: skip
        logits: torch.Tensor = out.logits[0].float()
        return logits

    @torch.no_grad()
    def decode(self, rows: Sequence[Next | None]) -> torch.Tensor:
        """The logits after each row's newest token: (rows, vocab), fp32."""
        # Adapters are torch's products: a row that has one comes with all rows, always.
        is_free = self._is_row_by_row and not any(row and row.adapter for row in rows)
        padded = [*rows, *[None] * (0 if is_free else self.num_rows - len(rows))]
        ids = torch.tensor([[row.token if row else 0] for row in padded], device=self.device)
        places = torch.tensor([[row.position if row else 0] for row in padded], device=self.device)
        self.adapters.set_rows([row.adapter if row else None for row in padded])
        slots = Rows(
            tuple(row.cache if row else None for row in padded), tuple(row.position if row else 0 for row in padded)
        )
        out = self.lm(input_ids=ids, position_ids=places, use_cache=False, slots=slots, **unrecorded(self.lm))
        logits: torch.Tensor = out.logits[:, -1].float()
        return logits

    @torch.no_grad()
    def embed(self, tokens: Sequence[int], adapter: str | None) -> list[float]:
        """The mean of a text's last hidden states, of length 1."""
        ids = torch.tensor([list(tokens)], device=self.device)
        self.adapters.set_rows([adapter])
        cache = SequenceCache(len(tokens))
        out = self.lm(
            input_ids=ids, position_ids=torch.arange(len(tokens), device=self.device)[None], use_cache=False,
            logits_to_keep=1, output_hidden_states=True, slots=Rows((cache,), (0,)), **unrecorded(self.lm),
        )  # fmt: skip
        mean = out.hidden_states[-1][0].float().mean(dim=0)
        vector: list[float] = (mean / mean.norm().clamp_min(1e-12)).tolist()
        return vector

    def check(self) -> int:
        """Refuse a model that answers otherwise in pieces than at once; returns the bytes that a token takes."""
        vocabulary = int(self.lm.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
        text = [(7 * n + 3) % min(vocabulary, 997) for n in range(24)]
        whole, pieces = SequenceCache(len(text)), SequenceCache(len(text))
        try:
            wanted = self.read(whole, text, 0, None, keep_all=True)
            self.read(pieces, text[:9], 0, None)
            self.read(pieces, text[9:20], 9, None)
            found = [self.decode([Next(pieces, text[at], at)])[0] for at in range(20, 24)]
        except (RuntimeError, TypeError, AttributeError, KeyError) as error:
            raise refusal(str(error).splitlines()[0] if str(error) else type(error).__name__) from None
        wanted = wanted[20:]
        spread = float((wanted - wanted.mean(dim=-1, keepdim=True)).norm())
        off = float((torch.stack(found) - wanted).norm()) / max(spread, 1e-6)
        is_half = next(self.lm.parameters()).dtype in (torch.bfloat16, torch.float16)
        if not off < (_TOLERANCE_OF_HALVES if is_half else TOLERANCE):
            raise refusal(f"in pieces its answers are off by {off:.1%}: its layers hold more than keys and values")
        self._check_meaning()
        return whole.num_bytes // len(text)

    def _check_meaning(self) -> None:
        """Alike in pieces and at once is not yet right: layers may look elsewhere than they say (Llama 4's chunks)."""
        config = self.lm.config
        off = None if find_stretch(config) is not None else distance_by_rows(config)
        if off is not None and not off < TOLERANCE:
            raise refusal(f"a tiny copy of it is off by {off:.1%}: its layers look elsewhere than back, or back so far")


def refusal(reason: str) -> ConfigError:
    return ConfigError(
        "this architecture cannot be served: its sequences cannot be computed side by side",
        where=reason,
        fix="duoka chat answers with it, one question at a time",
    )
