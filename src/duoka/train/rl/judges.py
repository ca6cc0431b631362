"""Reward models that judge answers: `model:FOLDER` among rl.rewards, a run of stage reward or a model as these are.

Each answer is computed alone, by transformers' own forward pass, as `duoka score` does it: its reward depends on
nothing else. It gets the tokens that were drawn, so it must read them as the trained model does; and behind them what
the chat template writes there, for a score is read at the last token, and was learned there. An answer that was cut is
closed for that too: at a token in the middle of a sentence a score was hardly ever learned, and says little.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from duoka.config.paths import given_path
from duoka.config.rl import JUDGE
from duoka.config.schema import ModelConfig
from duoka.errors import ConfigError
from duoka.hub.base import read_base, refuse_other_base
from duoka.hub.models import gives_scores, model_folder
from duoka.model.build import load_adapter, load_model
from duoka.model.request import ModelRequest
from duoka.tasks.rewards import Rewarded
from duoka.train.rl.rollouts import Rollout

_VOCABULARY = "tokenizer.json"


class Judges:
    """The reward models of a run, each held by every rank, frozen."""

    def __init__(
        self, names: Sequence[str], base: Path, trained: Path, *, dtype: torch.dtype, device: torch.device,
        pad_id: int, behind: Mapping[int, tuple[int, ...]], closing: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """`behind`: by the token that ended it, what stands behind an answer in data; `closing`: behind one's words."""
        self._names, self.behind, self.closing = tuple(names), dict(behind), tuple(closing)
        self._models: dict[str, Any] = {}
        self.folders: list[Path] = []
        for name in names:
            if name.startswith(JUDGE):
                folder = _find(name, base)
                _check_tokens(name, folder, trained)
                lm: Any = _load(name, folder, base, dtype).to(device).eval().requires_grad_(False)
                core = lm.get_base_model() if hasattr(lm, "get_base_model") else lm
                # transformers reads scores before it. A whole model says what it was trained with; below an adapter
                # lies a base that knows nothing of scores.
                facts = core.config.get_text_config()
                if core is not lm or facts.pad_token_id is None:
                    facts.pad_token_id = pad_id
                self._models[name] = lm
                self.folders.append(folder)
        self._device = device

    def judge(
        self, rollouts: Sequence[Rollout], scored: Sequence[Rewarded], alive: Callable[[], None]
    ) -> list[Rewarded]:
        """With the models' rewards at their places among those of functions."""
        if not self._models:
            return list(scored)
        return [self._judge(one, rewarded, alive) for one, rewarded in zip(rollouts, scored, strict=False)]

    @torch.no_grad()
    def _judge(self, one: Rollout, rewarded: Rewarded, alive: Callable[[], None]) -> Rewarded:
        given, values, faults = iter(rewarded.values), list[float | None](), list(rewarded.faults)
        for name in self._names:
            if name not in self._models:
                values.append(next(given))
                continue
            behind = self.behind.get(one.ids[-1], ()) if one.ended else self.closing
            ids = torch.tensor([[*one.prompt_ids, *one.ids, *behind]], device=self._device)
            value = float(self._models[name](input_ids=ids, use_cache=False).logits[0, 0])
            values.append(value if math.isfinite(value) else None)
            faults += [] if math.isfinite(value) else [f"{name}: its score is no number"]
            alive()
        return Rewarded(tuple(values), tuple(faults))


def _find(name: str, base: Path) -> Path:
    """The folder with the model or the adapter: of a run, its result."""
    given = given_path(name.removeprefix(JUDGE))
    places = [folder / part for folder in (given, base / given) for part in ("final", "")]
    found = next((one for one in places if _is_model(one)), None)
    if found is None:
        raise ConfigError(
            f"rl.rewards is {name}, and no reward model is there", where=f"looked for {places[0]} and {places[1]}",
            fix="name a finished run of   stage: reward   or a folder with config.json or adapter_config.json",
        )  # fmt: skip
    if not gives_scores(found):
        raise ConfigError(
            f"rl.rewards is {name}, and that model says words: it has no head for a score", where=str(found),
            fix="name a run of   stage: reward",
        )  # fmt: skip
    return found


def _is_model(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("adapter_config.json", "config.json"))


def _load(name: str, folder: Path, base: Path, dtype: torch.dtype) -> torch.nn.Module:
    facts = folder / "adapter_config.json"
    if not facts.is_file():
        return load_model(ModelRequest(folder, dtype=dtype, attention="sdpa", scores=True))
    below = str(json.loads(facts.read_text(encoding="utf-8"))["base_model_name_or_path"])
    under = model_folder(ModelConfig(name=below), base)
    refuse_other_base(name, read_base(folder), under)
    return load_adapter(load_model(ModelRequest(under, dtype=dtype, attention="sdpa", scores=True)), folder)


def _check_tokens(name: str, folder: Path, trained: Path) -> None:
    """It is given token ids: under another vocabulary they are other words."""
    files = [one / _VOCABULARY for one in (folder, trained)]
    if not all(file.is_file() for file in files):
        return
    words = [json.loads(file.read_text(encoding="utf-8"))["model"].get("vocab") for file in files]
    if words[0] != words[1]:
        raise ConfigError(
            f"rl.rewards is {name}, and its tokenizer has other words than the trained model's", where=str(files[0]),
            fix="name a reward model that was made from the same family, or score its text in a function of yours",
        )  # fmt: skip
