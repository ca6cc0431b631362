"""How the next token is chosen from logits, by a draw that is counted: a hash of (seed, sample, position).

No generator is kept, so a request's draws are the same alone, in a batch, and begun again; of each position one
uniform number is taken, and the token at which the kept probabilities, in the order of the vocabulary, pass it.
Serving chooses a token at a time; training, for its rollouts, one for each of many rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

_COLDEST = 1e-9  # below, logits over it may be more than a number can be, and the likeliest is all there is
_LIKELIEST = 2048  # top_p and min_p look at these first: sorting a whole vocabulary for each token costs milliseconds


@dataclass(frozen=True)
class Sampling:
    """Temperature 0 takes the likeliest. `top_k` 0, `top_p` 1 and `min_p` 0 keep every token.

    The penalties are taken from logits: `presence` once, `frequency` for each time that a token was generated;
    `bias` is added to the logits of single tokens.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    max_new_tokens: int = 256
    seed: int = 0
    top_k: int = 0
    min_p: float = 0.0
    presence: float = 0.0
    frequency: float = 0.0
    bias: Mapping[int, float] = field(default_factory=dict)

    @property
    def changes_logits(self) -> bool:
        return bool(self.bias or self.presence or self.frequency)

    @property
    def keeps_all(self) -> bool:
        """Every token may be drawn."""
        return not self.top_k and self.top_p >= 1 and self.min_p <= 0


def uniform(*counts: int) -> float:
    """In [0, 1), the same on every machine, of (seed, sample, position) or whatever else a draw is counted by."""
    digest = hashlib.blake2b("/".join(map(str, counts)).encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)


def choose_token(
    logits: torch.Tensor, sampling: Sampling, position: int, *, sample: int = 0, counts: Mapping[int, int] | None = None
) -> int:
    """The token at `position` of the answer. logits: (vocab,), fp32; `counts`: how often each was generated so far."""
    if sampling.changes_logits:
        logits = _changed(logits, sampling, counts or {})
    if sampling.temperature < _COLDEST:
        return int(logits.argmax())
    tokens, chances = _kept(logits.double() / sampling.temperature, sampling)
    return _draw(tokens, chances, uniform(sampling.seed, sample, position))


def _draw(tokens: torch.Tensor, chances: torch.Tensor, number: float) -> int:
    passed = chances.cumsum(0)
    place = int(torch.searchsorted(passed, number * passed[-1], right=True))
    return int(tokens[min(place, len(tokens) - 1)])


def draw_rows(logits: torch.Tensor, sampling: Sampling, numbers: Sequence[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """A token for each row of (rows, vocab), drawn by its number in [0, 1), and its log-probability among all tokens.

    As `choose_token` at a temperature above 0, for many rows in one pass over them.
    """
    scores = logits.double()
    scores = scores if sampling.temperature == 1 else scores / sampling.temperature
    scores = scores - scores.amax(dim=-1, keepdim=True)  # (rows, vocab)
    passed = scores.exp().cumsum_(dim=-1)
    if sampling.keeps_all:
        wanted = torch.tensor(numbers, dtype=passed.dtype, device=passed.device)[:, None] * passed[:, -1:]
        tokens = torch.searchsorted(passed, wanted, right=True).clamp_(max=passed.shape[1] - 1)
    else:
        drawn = [
            _draw(*_kept(row / sampling.temperature, sampling), number)
            for row, number in zip(logits.double(), numbers, strict=True)
        ]
        tokens = torch.tensor(drawn, device=logits.device)[:, None]
    return tokens.squeeze(1), (scores.gather(1, tokens) - passed[:, -1:].log()).squeeze(1)


def _changed(logits: torch.Tensor, sampling: Sampling, counts: Mapping[int, int]) -> torch.Tensor:
    logits = logits.clone()
    for token, count in counts.items():
        logits[token] -= sampling.presence + sampling.frequency * count
    for token, bias in sampling.bias.items():
        logits[token] += bias
    return logits


def _kept(scores: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens that may be drawn, in the order of the vocabulary, and their probabilities before others were left."""
    chances = scores.softmax(dim=-1)
    everything = torch.arange(len(chances), device=chances.device)
    if sampling.keeps_all:
        return everything, chances
    number = min(_LIKELIEST, len(chances))
    ranked, order = chances.topk(number)
    if sampling.top_k == 0 and number < len(chances) and not _is_enough(ranked, sampling):
        ranked, order = chances.sort(descending=True)
    if sampling.top_k:
        ranked, order = chances.topk(min(sampling.top_k, len(chances)))
    # A token stays while those before it sum to less than top_p, of all or of what top_k kept, as in transformers and
    # vLLM; so the likeliest always stays.
    share = sampling.top_p * (ranked.sum() if sampling.top_k else 1.0)
    stays = (ranked.cumsum(0) - ranked < share) & (ranked >= sampling.min_p * ranked[0])
    tokens = order[stays].sort().values
    return tokens, chances[tokens]


def _is_enough(ranked: torch.Tensor, sampling: Sampling) -> bool:
    """Whether what is left out behind these would be left out anyway."""
    return bool(ranked.sum() >= sampling.top_p) or bool(ranked[-1] < sampling.min_p * ranked[0])
