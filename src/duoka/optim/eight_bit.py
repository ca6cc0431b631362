"""AdamW whose state has 8 bits, by bitsandbytes: two bytes per weight and a scale per 256 of them, instead of eight.

Called by build.py. Every rank keeps all of it (single, dp, ddp); tensors below 4,096 numbers keep 32 bits.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch

from duoka.config.rules_optim import GET_BITSANDBYTES, NO_BITSANDBYTES
from duoka.errors import ConfigError

_CODES = ("qmap1", "qmap2")  # what the 256 values stand for: the same in every state


def build_eight_bit(groups: list[dict[str, Any]], **adamw: Any) -> torch.optim.Optimizer:
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(NO_BITSANDBYTES, fix=GET_BITSANDBYTES)
    optimizer: torch.optim.Optimizer = _kind()(groups, **adamw)
    return optimizer


@functools.cache
def _kind() -> Any:
    from bitsandbytes.optim import AdamW8bit  # type: ignore[attr-defined]

    class AdamW8bitSaved(AdamW8bit):  # type: ignore[misc]
        """bitsandbytes counts steps in a plain number, which no checkpoint of tensors would hold."""

        def fresh_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
            """State before the first step."""
            place = next(
                (g, p)
                for g, group in enumerate(self.param_groups)
                for p, one in enumerate(group["params"])
                if one is parameter
            )
            self.init_state(self.param_groups[place[0]], parameter, *place)
            return dict(self.state[parameter])

        def init_state(self, group: dict[str, Any], p: torch.Tensor, gindex: int, pindex: int) -> None:
            super().init_state(group, p, gindex, pindex)
            self.state[p]["num_steps"] = torch.zeros((), dtype=torch.float32)

        def to_gpu(self) -> None:
            super().to_gpu()
            for state in self.state.values():
                state["num_steps"] = state["num_steps"].cpu()  # read at every step

        def update_step(self, group: dict[str, Any], p: torch.Tensor, gindex: int, pindex: int) -> None:
            state = self.state[p]
            state["step"] = int(state["num_steps"])
            super().update_step(group, p, gindex, pindex)
            state["num_steps"] += 1

        def saved_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
            state = self.state[parameter]
            return {k: v for k, v in state.items() if isinstance(v, torch.Tensor) and k not in _CODES}

    return AdamW8bitSaved
