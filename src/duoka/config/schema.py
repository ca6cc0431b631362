"""The YAML, as types: what a run depends on, validated, frozen, every default beside its meaning.

`RunConfig` is the file; its blocks are in `schema_learning.py` and `schema_running.py`. `load.py` builds it from files,
`rules.py` checks what spans several keys. Nothing here knows torch, and nothing reads the environment.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from duoka.config.fields import Section, number_of
from duoka.config.rl import RlConfig
from duoka.config.schema_learning import (
    GRAPHS,
    DataConfig,
    DataSource,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
    TrainOnlyConfig,
)
from duoka.config.schema_running import CheckpointConfig, ClusterConfig, FaultsConfig, LogConfig, ParallelConfig
from duoka.config.stages import StageConfig

__all__ = [
    "GRAPHS",
    "NAMED_BLOCKS",
    "CheckpointConfig",
    "ClusterConfig",
    "DataConfig",
    "DataSource",
    "FaultsConfig",
    "LogConfig",
    "LoraConfig",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "RlConfig",
    "RunConfig",
    "Section",
    "StageConfig",
    "TrainConfig",
    "TrainOnlyConfig",
    "expand_short_forms",
]


class RunConfig(Section):
    """One run, from one YAML file."""

    model: ModelConfig
    stage: StageConfig = StageConfig()
    data: DataConfig
    lora: LoraConfig | None = Field(None, description="Train low-rank adapters; left out: full fine-tuning.")
    train_only: TrainOnlyConfig | None = Field(None, description="Train some layers only; left out: all weights.")
    rl: RlConfig = RlConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    parallel: ParallelConfig = ParallelConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    faults: FaultsConfig = FaultsConfig()
    cluster: ClusterConfig = ClusterConfig()
    log: LogConfig = LogConfig()
    output: str = Field("", description="The run folder; left out: runs/ and the YAML's name.")

    @property
    def sample_tokens(self) -> int:
        """The longest sample: a pair has two sequences."""
        return self.data.max_length * self.stage.kind.sequences

    def weights_type(self, precision: str) -> str:
        """In which numbers the model's weights lie where passes compute in `precision`.

        Those that are trained are as wide as steps need them; a base under adapters is only read.
        """
        return precision if self.lora is not None else self.train.weights

    @property
    def row_tokens(self) -> int:
        """The length of every row of a micro-batch; 0 where they vary."""
        return self.sample_tokens if self.stage.kind.reads_text or self.data.fixed_rows else 0

    @property
    def is_evaluated(self) -> bool:
        """Whether anything is measured while it trains: a loss over data, or scores of tasks."""
        return bool(self.data.eval or self.train.eval_tasks)

    @property
    def updates(self) -> int:
        """Optimizer steps on each global batch of data."""
        return self.rl.updates if self.stage.kind.draws else 1

    @model_validator(mode="before")
    @classmethod
    def _expand_short_forms(cls, raw: Any) -> Any:
        return expand_short_forms(raw)


# Blocks that may be written as their name alone.
NAMED_BLOCKS = ("model", "stage")


def expand_short_forms(raw: Any) -> Any:
    """`model: demo`, `stage: sft` and `train: [identity]` in their long forms; anything else as it is."""
    if not isinstance(raw, dict):
        return raw
    raw = dict(raw)
    raw |= {block: {"name": raw[block]} for block in NAMED_BLOCKS if isinstance(raw.get(block), str)}
    if isinstance(raw.get("data"), dict):
        data = dict(raw["data"])
        for key in ("train", "eval"):
            if isinstance(data.get(key), str) and (key == "train" or not _is_number(data[key])):
                data[key] = [data[key]]
            if isinstance(data.get(key), (list, tuple)):
                data[key] = [{"name": item} if isinstance(item, str) else item for item in data[key]]
        raw["data"] = data
    return raw


def _is_number(text: str) -> bool:
    return isinstance(number_of(text), float)
