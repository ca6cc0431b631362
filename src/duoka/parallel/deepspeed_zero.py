"""Where DeepSpeed's ZeRO stages keep a rank's part of gradients, weights and optimizer state, by parameter.

Stages 1 and 2 lay the parameters of a group end to end and cut that line over ranks; stage 3 cuts each parameter. What
checkpoints hold are the parameters themselves, so a part knows its place in one (flat_shard.py). For deepspeed.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from duoka.optim.clip import shorten_all
from duoka.parallel.flat_shard import FlatShard, real_shape
from duoka.torch_private import foreach_norm

Named = Mapping[str, torch.nn.Parameter]


class Part(NamedTuple):
    """Of a parameter: elements from `start` on lie in `line`, this rank's, from `at` on."""

    line: torch.Tensor
    at: int
    start: int
    length: int


class ZeroState(ABC):
    """One rank's lines: fp32 weights that the optimizer steps on, with its state of the same length."""

    def __init__(self, zero: Any, named: Named) -> None:
        self.zero = zero  # DeepSpeed's optimizer, around the one that it was given
        self.named = named

    @abstractmethod
    def lines(self) -> list[torch.Tensor]:
        """What the optimizer steps on."""

    @abstractmethod
    def part_of(self, parameter: torch.nn.Parameter) -> Part:
        """Where this rank has what of a parameter."""

    @abstractmethod
    def gradients(self) -> list[torch.Tensor]:
        """This rank's parts of the summed gradients, live; padding is left out."""

    @abstractmethod
    def refresh(self) -> None:
        """Bring the weights that passes use up to date with the lines."""

    def values_of(self, line: torch.Tensor) -> torch.Tensor:
        """A line's weights, live."""
        return line

    def norm_square(self) -> torch.Tensor:
        """Of this rank's parts of the gradients."""
        gradients = self.gradients()
        return torch.stack(foreach_norm(gradients)).float().square().sum() if gradients else torch.zeros(())

    def shorten(self, norm: torch.Tensor, max_norm: float) -> None:
        """Shorten the gradients, whose norm over all ranks is `norm`; 0: let them be."""
        shorten_all(self.gradients(), norm, max_norm)

    def disk_bytes(self) -> int:
        return 0

    def discard(self) -> None:
        """Drop the gradients as DeepSpeed does it after an overflow, which it is made to see."""
        # Of gradients that lie on the host it looks at norms that it noted before, and keeps the memory.
        on_host = [line.grad for line in self.lines() if line.grad is not None]
        noted = getattr(self.zero, "norm_for_param_grads", {})
        noted |= {key: torch.tensor(torch.inf) for key in noted}
        for gradient in [] if on_host else self.gradients()[:1]:
            gradient.fill_(torch.inf)
        was = getattr(self.zero, "check_grad_overflow", None)
        self.zero.check_grad_overflow = True
        self.zero.step()
        self.zero.check_grad_overflow = was
        for gradient in on_host:
            gradient.zero_()

    def trained(self) -> dict[str, torch.Tensor]:
        """Weights by name."""
        values = {id(line): self.values_of(line) for line in self.lines()}
        return {name: self._shard(one, values[id(self.part_of(one).line)]) for name, one in self.named.items()}

    def state(self) -> dict[str, torch.Tensor]:
        """The optimizer's state as `kind.parameter-name`; what was never stepped is made first, as zeros."""
        found: dict[str, torch.Tensor] = {}
        states = {id(line): self._state_of(line) for line in self.lines()}
        for name, parameter in self.named.items():
            line = self.part_of(parameter).line
            for kind, value in states[id(line)].items():
                found[f"{kind}.{name}"] = self._shard(parameter, value) if value.ndim else value
        return found

    def _state_of(self, line: torch.Tensor) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self.zero.optimizer.state[line]
        if not state:
            values = line.detach()
            state["step"] = torch.zeros((), dtype=torch.float32, device=line.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(values), torch.zeros_like(values)
        return state

    def _shard(self, parameter: torch.nn.Parameter, line: torch.Tensor) -> torch.Tensor:
        part = self.part_of(parameter)
        values = line.detach().narrow(0, part.at, part.length)
        return FlatShard(values, real_shape(parameter), part.start)


class Zero12(ZeroState):
    """Stages 1 and 2: a line per parameter group."""

    def lines(self) -> list[torch.Tensor]:
        return list(self.zero.single_partition_of_fp32_groups)

    def part_of(self, parameter: torch.nn.Parameter) -> Part:
        mapping: Any = parameter._hp_mapping
        if mapping is None:  # none of it is this rank's
            return Part(self._line_of(parameter), 0, 0, 0)
        place, own = mapping.hp_fragment_address, mapping.lp_fragment_address
        return Part(self.lines()[mapping.param_group_index], place.start, own.start, own.numel)

    def _line_of(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        for line, group in zip(self.lines(), self.zero.bit16_groups, strict=True):
            if any(one is parameter for one in group):
                return line
        raise KeyError("a parameter that DeepSpeed does not train")

    def gradients(self) -> list[torch.Tensor]:
        if self.zero.cpu_offload:
            return [line.grad for line in self.lines() if line.grad is not None]
        return [
            gradient
            for group in self.zero.averaged_gradients.values()
            for gradient in group or ()
            if gradient is not None and not getattr(gradient, "_zero_padding", False)
        ]

    def refresh(self) -> None:
        self.zero.update_lp_params()


class Zero3(ZeroState):
    """Stage 3: each parameter is cut in equal parts, and the parts of a group lie end to end."""

    def lines(self) -> list[torch.Tensor]:
        return list(self.zero.fp32_partitioned_groups_flat)

    def part_of(self, parameter: torch.nn.Parameter) -> Part:
        group, at, padded = self.zero.grad_position[self.zero.get_param_id(parameter)]
        start, whole = padded * torch.distributed.get_rank(), real_shape(parameter).numel()
        return Part(self.lines()[group], at, min(start, whole), max(0, min(padded, whole - start)))

    def gradients(self) -> list[torch.Tensor]:
        found = []
        for number, group in enumerate(self.zero.fp16_groups):
            for place, parameter in enumerate(group):
                part = self.part_of(parameter)
                if self.zero.offload_optimizer:
                    if part.line.grad is not None:  # else: put away in files
                        found.append(part.line.grad.narrow(0, part.at, part.length))
                elif self.zero.averaged_gradients.get(number):  # else: before the first backward pass, or after a step
                    found.append(self.zero.averaged_gradients[number][place][: part.length])
        return found

    def refresh(self) -> None:
        zero = self.zero
        zero.empty_partition_cache()
        zero.invalidate_secondary_tensor()  # a node's copies are of the older values
        with torch.no_grad():
            for cut, line in zip(zero.fp16_partitioned_groups_flat, self.lines(), strict=True):
                cut.copy_(line)
        self._gather_kept()

    def _gather_kept(self) -> None:
        kept = self.zero.persistent_parameters
        if kept:  # these stay gathered, and were gathered from the older values
            kept[0].all_gather(kept)
