"""PiSSA: adapters begin as the strongest directions of the weights that they stand beside, which give them up.

base + adapter is the original at the start, and what is left of the base stays frozen. lora.py (whole models) and
shards.py (models read by slices) call this; results are written as plain adapters for the base as it came.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import torch

from duoka.config.schema import LoraConfig
from duoka.errors import ConfigError
from duoka.model.box import Box


@dataclass
class PissaStarts:
    """Where each adapted matrix's adapter begins, by the module's name: (A, B) in fp32, kept to the run's end."""

    lora: LoraConfig
    seed: int
    _pairs: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    _lying: set[str] = field(default_factory=set)  # modules whose base weight is (in, out), as GPT-2 keeps them

    def add(self, module: str, weight: torch.Tensor, *, lies: bool = False) -> None:
        """Compute the start of one module's adapter from its base weight (out, in); of one that `lies`, (in, out)."""
        self._lying |= {module} if lies else set()
        self._pairs[module] = principal_parts(
            weight.mT if lies else weight, self.lora, draw_seed(f"{self.seed} {module}")
        )

    def of(self, module: str) -> tuple[torch.Tensor, torch.Tensor]:
        return self._pairs[module]

    def values(self, adapter: str) -> torch.Tensor:
        """Of a parameter such as `...q_proj.lora_A.default.weight`."""
        module, _, rest = adapter.rpartition(".lora_")
        return self._pairs[module]["AB".index(rest[0])]

    def owns(self, name: str) -> bool:
        """True for a base weight that gives its strongest directions up."""
        return name.endswith(".base_layer.weight") and name.removesuffix(".base_layer.weight") in self._pairs

    def rest_of(self, name: str, values: torch.Tensor, box: Box) -> torch.Tensor:
        """What stays of the base weight in `box`. In fp64: any cut gives the same bits."""
        module = name.removesuffix(".base_layer.weight")
        down, up = self._pairs[module]
        if module in self._lying:
            down, up = up.mT, down.mT
        taken = up[box.rows].double() @ down[:, box.columns].double()
        scale = self.lora.alpha / self.lora.rank
        return values.double().sub_(taken.mul_(scale).to(values.device)).to(values.dtype)


def check_untied(adapted: torch.nn.Module, modules: list[str]) -> None:
    """Raise ConfigError where a weight that would give its principal part up is another layer's too."""
    names: dict[int, list[str]] = {}
    for name, parameter in adapted.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    asked = {f"{module}.base_layer.weight" for module in modules}
    for shared in names.values():
        mine = [name for name in shared if name in asked]
        others = [name for name in shared if name not in mine[:1]]
        if mine and others:
            short = mine[0].removesuffix(".base_layer.weight").rpartition(".")[2]
            other = others[0].removeprefix("base_model.model.").replace(".base_layer.", ".")
            raise ConfigError(
                f"lora.init pissa takes the strongest directions out of {short}, whose weights are {other} too "
                "(this model ties them): that layer would lose them, with no adapter beside it",
                fix=f"drop {short} from lora.targets, or write   init: random",
            )


def draw_seed(text: str) -> int:
    """A number for a generator, from text alone: the same on every rank and machine."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


@torch.no_grad()
def principal_parts(weight: torch.Tensor, lora: LoraConfig, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(A, B) with B A * alpha / rank = the weight's part along its `rank` strongest directions.

    By subspace iteration in fp64, from directions that the seed draws, without ever cutting a larger space down: equal
    singular values then make no difference between machines. 0 iterations: by the whole decomposition.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else weight.device
    matrix = weight.detach().to(device, torch.float64)
    rank = min(lora.rank, *matrix.shape)
    if lora.pissa_iterations == 0:
        left, sizes, right = torch.linalg.svd(matrix, full_matrices=False)
        left, sizes, right = left[:, :rank], sizes[:rank], right[:rank]
    else:
        drawn = torch.randn(matrix.shape[1], rank, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        basis = torch.linalg.qr(matrix @ drawn.to(device)).Q
        for _ in range(lora.pissa_iterations):
            basis = torch.linalg.qr(matrix.mT @ basis).Q
            basis = torch.linalg.qr(matrix @ basis).Q
        inner, sizes, right = torch.linalg.svd(basis.mT @ matrix, full_matrices=False)
        left = basis @ inner
    roots = (sizes * (lora.rank / lora.alpha)).sqrt()
    down, up = torch.zeros(lora.rank, matrix.shape[1]), torch.zeros(matrix.shape[0], lora.rank)
    down[:rank], up[:, :rank] = (roots[:, None] * right).float().cpu(), (left * roots).float().cpu()
    if rank < lora.rank:  # a matrix narrower than the rank: the others begin as plain adapters do
        bound = matrix.shape[1] ** -0.5
        fresh = torch.Generator().manual_seed(seed + 1)
        down[rank:].uniform_(-bound, bound, generator=fresh)
    return down, up


def as_plain_adapter(state: dict[str, torch.Tensor], starts: PissaStarts) -> dict[str, torch.Tensor]:
    """An adapter of twice the rank for the base as it came: what was learned, less what it began with."""
    plain = dict(state)
    for name, value in state.items():
        if ".lora_A." in name:
            plain[name] = torch.cat([value, starts.values(name).to(value)])
        elif ".lora_B." in name:
            plain[name] = torch.cat([value, -starts.values(name).to(value)], dim=1)
    return plain
