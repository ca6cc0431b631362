"""What the model that a run begins with says of its data: log-probabilities of all answers, computed in one pass.

`build_run` calls `add_references` while the engine still holds the weights that the run began with, before a checkpoint
is read: so the reference is the base, with the adapters that the run starts from, and no second model is ever held.
The numbers are kept beside the tokenized data, by a key of all that they depend on.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from duoka.config.adapters import digest, find_adapter, named_adapters
from duoka.config.schema import RunConfig
from duoka.data.feed.answers import AnswerRows
from duoka.data.feed.loader import build_batch, eval_plans
from duoka.data.prepare import PreparedData
from duoka.errors import StorageError
from duoka.hub.base import model_fingerprint
from duoka.hub.new_model import is_new
from duoka.parallel.engine import Engine
from duoka.parallel.inputs import model_inputs
from duoka.parallel.precision import compute_in
from duoka.plan.layout import Layout
from duoka.runs.cache import cache_folder, make_folder
from duoka.train.stages.documents import document_sums, pair_weights
from duoka.units import format_seconds

REFERENCE_VERSION = 2  # raise it when the same model and data would give other numbers
_WIDTH = 2  # sequences of a pair; of a labeled answer, its own and the mismatched one


@dataclass(frozen=True)
class ReferencePass:
    """What is needed to compute or find a reference; the same on every rank but for the rank's own place."""

    config: RunConfig
    base: Path  # of the YAML's relative paths
    model: Path
    pad_id: int
    layout: Layout
    engine: Engine

    def add(self, rows: AnswerRows, used: np.ndarray | None = None, kind: str = "") -> str:
        """Give the answers their reference, on all ranks together; returns what to say of it.

        `used`: those that the run will come to; others are nan, and computed by a run that does.
        """
        noun = f"{kind}{rows.noun}"
        world = self.engine.mesh.everyone
        file = _file_of(self.key(rows))
        found = world.agree(read_reference(file, len(rows)) if world.is_main else None)
        rows.reference = np.full((len(rows), _WIDTH), np.nan) if found is None else found
        used = np.arange(len(rows)) if used is None else used
        missing = used[np.isnan(rows.reference[used]).any(axis=1)]
        of_all = f" (of {len(rows):,}: the run comes to no others)" if len(used) < len(rows) else ""
        if not len(missing):
            return f"{len(used):,} {noun} from the cache{of_all}"
        began = time.monotonic()
        rows.reference[missing] = self._compute(rows, missing)[missing]
        if world.is_main:
            keep_reference(file, _with_others(rows.reference, read_reference(file, len(rows))))
        rest = f", {len(used) - len(missing):,} from the cache" if len(missing) < len(used) else ""
        return f"{len(missing):,} {noun} computed in {format_seconds(time.monotonic() - began)}{rest}{of_all}"

    def key(self, rows: AnswerRows) -> str:
        """All that the numbers depend on: weights, adapters, tokens (and so the template), precision."""
        config, lora = self.config, self.config.lora
        # PiSSA takes parts out of the base and begins with them: the sum is the base again, but for rounding.
        drawn = (
            [lora.init, lora.rank, lora.pissa_iterations, config.train.seed] if lora and lora.init != "random" else []
        )
        facts: dict[str, Any] = {
            "version": REFERENCE_VERSION,
            "model": model_fingerprint(self.model),
            "adapters": [(key, digest(find_adapter(name, self.base, key))) for key, name in named_adapters(lora)],
            "drawn": drawn,
            "packed weights": [config.model.quantization, config.model.double_quantization],
            "data": rows.fingerprint,
            # A base under adapters lies in the type that computes, trained weights in fp32.
            "precision": [self.layout.precision, lora is not None],
        }
        if self._beyond != 1:
            facts["beyond the shorter answer"] = self._beyond
        if is_new(self.model):
            facts["random weights"] = config.train.seed
        if config.weights_type(self.layout.precision) != "fp32" and lora is None:
            facts["weights"] = config.train.weights  # trained ones, as narrow as passes compute
        # Sharded layers that are trained take weights, norms' too, in half precision: they round otherwise.
        if self.layout.is_sharded and self.layout.precision != "fp32" and lora is None:
            facts["rounded"] = "by layers"
        return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).hexdigest()

    @property
    def _beyond(self) -> float:
        """What a token beyond the shorter answer's length counts, in the reference as in the trained model (LD-DPO): or
        a model that has not moved would find longer answers better than it did."""
        return 1.0 if self.config.stage.ld_alpha is None else self.config.stage.ld_alpha

    @torch.no_grad()
    def _compute(self, rows: AnswerRows, some: np.ndarray) -> np.ndarray:
        mesh, layout, device = self.engine.mesh, self.layout, self.engine.world.device
        found = torch.zeros(len(rows), _WIDTH, dtype=torch.float64)
        plans = eval_plans(
            rows, mesh.data.rank, mesh.data.size, layout.micro, packing=layout.packing,
            max_length=self.config.sample_tokens, some=some,
        )  # fmt: skip
        with self.engine.evaluate() as model:
            was_training = model.training
            model.eval()
            for plan in plans:
                mesh.everyone.heart.tell("reference")
                micro = build_batch(rows, plan, layout.packing, self.pad_id)
                columns = []
                for part in (micro, micro.mismatched):
                    if part is None:
                        continue
                    with compute_in(layout.precision, device):
                        logps, _ = model(**model_inputs(part, device), answer="logps")
                    if self._beyond != 1 and part.sides is not None:
                        logps = logps.double() * pair_weights(part, self._beyond).to(device)
                    if plan.sample_ids:
                        columns.append(document_sums(logps, part).view(len(plan.sample_ids), -1))
                if columns:
                    found[list(plan.sample_ids)] = torch.cat(columns, dim=1).cpu()
            model.train(was_training)
        # Each sample was computed by one rank; the others have zeros there.
        whole: np.ndarray = mesh.loss.sum_tensor(found.to(device)).cpu().numpy()
        return whole


def add_references(make: ReferencePass, prepared: PreparedData, used: np.ndarray) -> str:
    """References of the answers of a run, `used` ones of its training and all of its evaluation; what to say of it
    before the first step."""
    start = "the model as it begins"
    lora = make.config.lora
    if lora is not None:
        start = f"the starting adapter {lora.adapter}" if lora.adapter else "the base, without the new adapter"
    said = []
    for name, rows in (("", prepared.train), ("evaluation ", prepared.eval)):
        if isinstance(rows, AnswerRows):
            said.append(make.add(rows, used if rows is prepared.train else None, name))
    return f"{start}; log-probabilities of {', '.join(said)}"


def _file_of(key: str) -> Path:
    return cache_folder() / "reference" / f"{key}.npy"


def read_reference(file: Path, count: int) -> np.ndarray | None:
    """Samples that nobody computed yet are nan. None for a file that is not there, was cut, or is of other data."""
    try:
        found: np.ndarray = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return found if found.shape == (count, _WIDTH) and not np.isinf(found).any() else None


def _with_others(own: np.ndarray, found: np.ndarray | None) -> np.ndarray:
    """With what another run computed meanwhile."""
    return own if found is None else np.where(np.isnan(own), found, own)


def keep_reference(file: Path, values: np.ndarray) -> None:
    """Aside first, so that the name is of a whole file."""
    draft = None
    try:
        # A name of its own: another run may begin with the same model and data at the same time.
        handle, draft = tempfile.mkstemp(dir=make_folder(file.parent), prefix=f".{file.name}.")
        with os.fdopen(handle, "wb") as out:
            np.save(out, values, allow_pickle=False)
        os.replace(draft, file)
    except OSError as error:
        if draft is not None:
            Path(draft).unlink(missing_ok=True)
        raise StorageError(
            f"cannot keep the reference's log-probabilities: {error.strerror or error}", where=str(file.parent),
            fix="make room, or set DUOKA_CACHE to another folder",
        ) from None  # fmt: skip
