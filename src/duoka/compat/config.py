"""`Config.from_yaml`: any YAML that `duoka train` reads, and its blocks as the guides name them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from duoka.config.load import load_config
from duoka.config.loaded import Loaded
from duoka.config.schema import RunConfig
from duoka.process.environ import get_dist_info

STEP_SAMPLES = "samples of an optimizer step"  # of all ranks and micro-batches, as the loop's loader gives them


@dataclass(frozen=True)
class Part:
    """One block of a config; it knows the others, since a model needs to know of its adapters."""

    loaded: Loaded
    sections: tuple[str, ...]
    found: dict[str, int] = field(default_factory=dict, compare=False)  # by one part, for others

    @property
    def run(self) -> RunConfig:
        return self.loaded.config

    def __getattr__(self, name: str) -> Any:
        for section in self.sections:
            block = getattr(self.loaded.config, section)
            if hasattr(block, name):
                return getattr(block, name)
        raise AttributeError(f"{' and '.join(self.sections)} have no {name!r}; see docs/config.md")


@dataclass(frozen=True)
class Config:
    loaded: Loaded
    found: dict[str, int] = field(default_factory=dict, compare=False)

    @classmethod
    def from_yaml(cls, path: str | Path) -> Config:
        """Raises errors that name file, line and key. A batch per device counts for the processes of this world."""
        import torch

        from duoka.config.load import Start

        size = get_dist_info()[3]
        return cls(load_config(path, start=Start(num_ranks=size, has_gpu=torch.cuda.is_available())))

    @property
    def data(self) -> Part:
        return Part(self.loaded, ("data",), self.found)

    @property
    def model(self) -> Part:
        return Part(self.loaded, ("model",), self.found)

    @property
    def trainer(self) -> Part:
        return Part(self.loaded, ("train", "optim"), self.found)
