"""Which model lies in a folder: told from another one in a moment, written beside what was trained on it, compared.

Checkpoints keep the identity of their base in the manifest, adapters in a file of their own (base.json). Knows no
torch and reads no tensor whole.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from duoka.errors import ConfigError
from duoka.plan.in_files import read_header

BASE = "base.json"  # in an adapter's folder
_SAMPLE_BYTES, _NUM_SAMPLES = 4096, 64  # spread over each file of weights
_TENSOR_BYTES, _MOST_TENSORS = 512, 4096  # and from the middle of each tensor
# What a tool that writes the same model again puts otherwise, and no computation reads.
_NOT_COMPUTED = ("transformers_version", "_name_or_path", "dtype", "torch_dtype")


@dataclass(frozen=True)
class BaseIdentity:
    """Digests of a model's config.json and of samples of its weights; `commit` when it is a snapshot of the Hub."""

    config: str = ""
    weights: str = ""
    commit: str = ""

    @classmethod
    def of(cls, folder: Path) -> BaseIdentity:
        return cls(_config_digest(folder / "config.json"), _weights_digest(folder), _commit_of(folder))

    def is_same(self, other: BaseIdentity) -> bool:
        return (self.config, self.weights) == (other.config, other.weights)

    def __str__(self) -> str:
        commit = f", commit {self.commit[:12]}" if self.commit else ""
        return f"config {self.config[:8]}, weights {self.weights[:12]}{commit}"


def model_fingerprint(folder: Path) -> str:
    """Equal on two machines when the same model lies there."""
    identity = BaseIdentity.of(folder)
    return identity.config + identity.weights


def write_base(base: Path, folder: Path) -> None:
    """Write beside an adapter which model it was trained on."""
    (folder / BASE).write_text(json.dumps(asdict(BaseIdentity.of(base)), indent=2) + "\n", encoding="utf-8")


def read_base(folder: Path) -> BaseIdentity | None:
    """What an adapter says of its base; None for one that another tool wrote."""
    try:
        return read_identity(json.loads((folder / BASE).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


def read_identity(facts: Any) -> BaseIdentity | None:
    """From a manifest or an adapter's file; None when it says nothing."""
    try:
        return BaseIdentity(**{name: str(facts[name]) for name in ("config", "weights", "commit")})
    except (KeyError, TypeError):
        return None


def other_base(trained_on: BaseIdentity | None, base: Path) -> str:
    """ "" when `base` is what something was trained on, or nobody knows; else both, for a message."""
    if trained_on is None or not trained_on.config:
        return ""
    here = BaseIdentity.of(base)
    return "" if here.is_same(trained_on) else f"trained on: {trained_on}\nin {base} now: {here}"


def refuse_other_base(name: str, trained_on: BaseIdentity | None, base: Path) -> None:
    """Refuse to compute what was trained on one model with the weights of another one."""
    if differs := other_base(trained_on, base):
        raise ConfigError(
            f"the base model of {name} is not the one that it was trained on: its answers would be others",
            where=differs,
            fix="bring that model back to its place; or train anew on the new one",
        )


def _config_digest(path: Path) -> str:
    facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    computed = {name: value for name, value in facts.items() if name not in _NOT_COMPUTED}
    return hashlib.blake2b(json.dumps(computed, sort_keys=True).encode(), digest_size=8).hexdigest()


def _weights_digest(folder: Path) -> str:
    """The bytes of 64 places of each file and of one in each tensor: also one changed matrix is seen."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb", buffering=0) as file:
            # Spread over the file: models of one family have the same header and differ in every tensor.
            for place in range(0, size, max(_SAMPLE_BYTES, size // _NUM_SAMPLES)):
                file.seek(place)
                digest.update(file.read(_SAMPLE_BYTES))
            for place, length in _tensor_samples(path):
                file.seek(place)
                digest.update(file.read(length))
    return digest.hexdigest()


def _tensor_samples(path: Path) -> Iterator[tuple[int, int]]:
    """(offset, bytes) of the middle of each tensor of a file, of the first few thousand in the file's order."""
    try:
        begin, header = read_header(path)
        spans = sorted(tuple(one["data_offsets"]) for one in header.values())
    except (ValueError, struct.error, KeyError, TypeError, AttributeError):
        return  # a damaged file: reading its tensors reports it
    for start, end in spans[:_MOST_TENSORS]:
        length = min(_TENSOR_BYTES, end - start)
        yield begin + start + (end - start - length) // 2, length


def _commit_of(folder: Path) -> str:
    """The commit, of a folder in the Hub's cache (models--ORG--NAME/snapshots/COMMIT)."""
    is_snapshot = folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--")
    return folder.name if is_snapshot else ""
