"""Where DeepSpeed's ZeRO stages keep a rank's part of gradients, weights and optimizer state, by parameter.

Stages 1 and 2 lay the parameters of a group end to end and cut that line over ranks; stage 3 cuts each parameter. What
checkpoints hold are the parameters themselves, so a part knows its place in one (flat_shard.py). For deepspeed.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from duoka.optim.clip import shorten_all
from duoka.parallel.flat_shard import FlatShard, real_shape
from duoka.parallel.tensor_part import part_of
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

    def __init__(self, zero: Any, named: Named, tensor_rank: int = 0) -> None:
        self.zero = zero  # DeepSpeed's optimizer, around the one that it was given
        self.named = named
        self.tensor_rank = tensor_rank  # among those that share every matrix

    @abstractmethod
    def lines(self) -> list[torch.Tensor]:
        """What the optimizer steps on."""

    @abstractmethod
    def place_of(self, parameter: torch.nn.Parameter) -> Part:
        """Where this rank has what of a parameter."""

    @abstractmethod
    def named_gradients(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        """This rank's parts of the summed gradients, live, and whose; padding is left out."""

    def gradients(self) -> list[torch.Tensor]:
        return [gradient for _, gradient in self.named_gradients()]

    @abstractmethod
    def refresh(self) -> None:
        """Bring the weights that passes use up to date with the lines."""

    def values_of(self, line: torch.Tensor) -> torch.Tensor:
        """A line's weights, live."""
        return line

    def norm_square(self) -> torch.Tensor:
        """Of this rank's parts of the gradients; what tensor ranks all have counts on the first of them."""
        gradients = self.gradients()
        if self.tensor_rank:
            gradients = [gradient for parameter, gradient in self.named_gradients() if part_of(parameter)]
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
        return {name: self._shard(one, values[id(self.place_of(one).line)]) for name, one in self.named.items()}

    def state(self) -> dict[str, torch.Tensor]:
        """The optimizer's state as `kind.parameter-name`; what was never stepped is made first, as zeros."""
        found: dict[str, torch.Tensor] = {}
        states = {id(line): self._state_of(line) for line in self.lines()}
        for name, parameter in self.named.items():
            line = self.place_of(parameter).line
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
        part = self.place_of(parameter)
        values = line.detach().narrow(0, part.at, part.length)
        return FlatShard(values, real_shape(parameter), part.start, part_of(parameter))


def in_whole(tensor: torch.Tensor, parameter: torch.nn.Parameter) -> torch.Tensor:
    """What lies whole on this rank of a parameter (it, or its state) as a part of what AutoTP cut; else as it is."""
    part = part_of(parameter)
    return FlatShard(tensor.view(-1), tensor.shape, 0, part) if part is not None and tensor.ndim else tensor


class Zero12(ZeroState):
    """Stages 1 and 2: a line per parameter group."""

    def lines(self) -> list[torch.Tensor]:
        return list(self.zero.single_partition_of_fp32_groups)

    def place_of(self, parameter: torch.nn.Parameter) -> Part:
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

    def named_gradients(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        if self.zero.cpu_offload:
            for parameter in self.named.values():
                part = self.place_of(parameter)
                if part.length and part.line.grad is not None:
                    yield parameter, part.line.grad.narrow(0, part.at, part.length)
            return
        for number, group in self.zero.averaged_gradients.items():
            found = [one for one in group or () if one is not None and not getattr(one, "_zero_padding", False)]
            # Without a parameter of its own, a rank has zeros.
            yield from zip(self.zero.params_in_partition[number], found, strict=False)

    def refresh(self) -> None:
        self.zero.update_lp_params()


class Zero3(ZeroState):
    """Stage 3: each parameter is cut in equal parts, and the parts of a group lie end to end."""

    def lines(self) -> list[torch.Tensor]:
        return list(self.zero.fp32_partitioned_groups_flat)

    def place_of(self, parameter: torch.nn.Parameter) -> Part:
        group, at, padded = self.zero.grad_position[self.zero.get_param_id(parameter)]
        own: Any = parameter
        start = padded * torch.distributed.get_rank(own.ds_process_group)
        whole = real_shape(parameter).numel()
        return Part(self.lines()[group], at, min(start, whole), max(0, min(padded, whole - start)))

    def named_gradients(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        for number, group in enumerate(self.zero.fp16_groups):
            for at, parameter in enumerate(group):
                part = self.place_of(parameter)
                if self.zero.offload_optimizer:
                    if part.line.grad is not None:  # else: put away in files
                        yield parameter, part.line.grad.narrow(0, part.at, part.length)
                elif self.zero.averaged_gradients.get(number):  # else: before the first backward pass, or after a step
                    yield parameter, self.zero.averaged_gradients[number][at][: part.length]

    def refresh(self) -> None:
        zero = self.zero
        # Small ones stay gathered, and were gathered from the older values. But no others: in its first pass DeepSpeed
        # learns who reads a module's weights from outside (a head's) by their not being there.
        kept = [one for one in zero.persistent_parameters if one.numel() == one.ds_numel]
        zero.empty_partition_cache()
        zero.invalidate_secondary_tensor()  # a node's copies are of the older values
        with torch.no_grad():
            self._cut_again()
        if kept:
            kept[0].all_gather(kept)

    def _cut_again(self) -> None:
        """The parts that passes gather, from the lines."""
        for cut, line in zip(self.zero.fp16_partitioned_groups_flat, self.lines(), strict=True):
            cut.copy_(line)
