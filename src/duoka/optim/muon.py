"""Muon for matrices and AdamW for the rest, as one optimizer.

Muon updates a matrix by its orthogonalized momentum (Newton-Schulz, five steps): the orthogonal matrix nearest to it.
That needs whole matrices: `Sharing` brings them to their owners and takes the results back (parallel/matrices.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from duoka.optim.host import local_part
from duoka.optim.owners import Bucket, share_matrices

# The quintic that pushes all singular values towards 1, fast rather than exactly.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NUM_STEPS = 5
SMALL = 128  # rows, below which a product is not worth two calls


class Sharing(Protocol):
    """How matrices lie over ranks. Buckets name places in `matrices`, whose order is not that of parameter groups."""

    @property
    def matrices(self) -> Sequence[torch.Tensor]: ...

    @property
    def buckets(self) -> Sequence[Bucket]: ...

    def holds(self, parameter: torch.Tensor) -> bool:
        """Whether this rank keeps state of the matrix, or of a part of it."""

    def to_owners(self, bucket: Bucket, parts: list[torch.Tensor]) -> torch.Tensor:
        """This rank's own matrices, whole (num_own, rows, columns), from the parts that every rank holds."""

    def from_owners(self, bucket: Bucket, whole: torch.Tensor) -> list[torch.Tensor]:
        """The way back."""

    def publish(self) -> None:
        """After a step: send updated weights to the ranks that hold copies."""


class WholeMatrices:
    """Every rank has every matrix and its whole gradient: nothing travels (one process, DP, DDP)."""

    def __init__(self, matrices: Sequence[torch.Tensor]) -> None:
        self.matrices = matrices
        self.buckets: Sequence[Bucket] = share_matrices([(m.shape[0], m.shape[1]) for m in matrices], 1)

    def holds(self, parameter: torch.Tensor) -> bool:
        return True

    def to_owners(self, bucket: Bucket, parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(parts)

    def from_owners(self, bucket: Bucket, whole: torch.Tensor) -> list[torch.Tensor]:
        return list(whole.unbind())

    def publish(self) -> None:
        pass


class MuonAdamW(torch.optim.AdamW):
    """Groups with `kind: muon` are updated by Muon, others by the parent class; state and groups are one."""

    def __init__(
        self, groups: list[dict[str, Any]], sharing: Sharing, *, momentum: float, scale: str = "shape", **adamw: Any
    ) -> None:
        super().__init__(groups, **adamw)
        self.sharing = sharing
        self.momentum = momentum
        self.scale = scale
        own = {id(p) for group in self.param_groups if group["kind"] == "muon" for p in group["params"]}
        assert own == {id(matrix) for matrix in sharing.matrices}, "matrices that nobody would step on"

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        all_groups = self.param_groups
        self.param_groups = [group for group in all_groups if group["kind"] != "muon"]
        try:
            super().step()
        finally:
            self.param_groups = all_groups
        settings = {id(p): g for g in all_groups if g["kind"] == "muon" for p in g["params"]}
        for bucket in self.sharing.buckets:
            self._step_bucket(bucket, settings)
        self.sharing.publish()

    def _step_bucket(self, bucket: Bucket, settings: dict[int, dict[str, Any]]) -> None:
        matrices = [self.sharing.matrices[place] for place in bucket.members]
        held = [m for m in matrices if self.sharing.holds(m)]
        if held and all(m.grad is None for m in held):
            return  # unused, on every rank alike
        length = step_length(*bucket.shape, self.scale)
        moves = self.sharing.from_owners(
            bucket, orthogonalise(self.sharing.to_owners(bucket, [self._blend(m) for m in held]))
        )
        for matrix, move in zip(held, moves, strict=True):
            if matrix.grad is None:
                continue
            group = settings[id(matrix)]
            own = local_part(matrix)
            own.mul_(1 - group["lr"] * group["weight_decay"])
            own.add_(move.to(own.dtype), alpha=-group["lr"] * length)

    def _blend(self, matrix: torch.Tensor) -> torch.Tensor:
        """Nesterov momentum: the gradient, interpolated towards its moving average."""
        if not self.state[matrix]:
            self.state[matrix] = self.fresh_state(matrix)
        if matrix.grad is None:
            return torch.zeros_like(local_part(matrix))
        gradient = local_part(matrix.grad)
        mean = local_part(self.state[matrix]["momentum"])
        mean.lerp_(gradient, 1 - self.momentum)
        return gradient.lerp(mean, self.momentum)

    def fresh_state(self, matrix: torch.Tensor) -> dict[str, torch.Tensor]:
        """State of a matrix before its first step; {} on ranks that keep none of it."""
        return {"momentum": torch.zeros_like(matrix)} if self.sharing.holds(matrix) else {}


def step_length(rows: int, columns: int, scale: str) -> float:
    """What an orthogonal move is multiplied with. `adamw`: entries of about 0.2, as AdamW's are."""
    return 0.2 * math.sqrt(max(rows, columns)) if scale == "adamw" else math.sqrt(max(1.0, rows / columns))


def orthogonalise(matrices: torch.Tensor) -> torch.Tensor:
    """The nearest matrices with singular values about 1, of a stack (number, rows, columns).

    In bf16 on a GPU, where that is fast and known to be enough; in fp32 on a CPU, so that splits agree closely.
    """
    if not matrices.numel():
        return matrices
    tall = matrices.shape[-2] > matrices.shape[-1]
    wide = matrices.mT if tall else matrices
    done = _on_gpu(wide.bfloat16()) if wide.is_cuda else torch.stack([_on_cpu(one.float()) for one in wide])
    return (done.mT if tall else done).to(matrices.dtype)


def _on_gpu(x: torch.Tensor) -> torch.Tensor:
    a, b, c = NEWTON_SCHULZ
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(NUM_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def _on_cpu(x: torch.Tensor) -> torch.Tensor:
    """One matrix: a CPU gains nothing by many at once, and products that are symmetric need three quarters only."""
    a, b, c = NEWTON_SCHULZ
    x = x / (x.norm() + 1e-7)
    for _ in range(NUM_STEPS):
        gram = _times_itself(x)
        x = torch.addmm(x, _times_itself(gram).mul_(c).add_(gram, alpha=b), x, beta=a)
    return x


def _times_itself(x: torch.Tensor) -> torch.Tensor:
    """x @ x.T, one of whose corners is the other's mirror."""
    rows = len(x)
    if rows < SMALL:
        return x @ x.T
    half = rows // 2
    out = x.new_empty(rows, rows)
    torch.mm(x, x[:half].T, out=out[:, :half])
    torch.mm(x[half:], x[half:].T, out=out[half:, half:])
    out[:half, half:] = out[half:, :half].T
    return out
