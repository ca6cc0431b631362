"""Words that loops compare with: kinds of worlds, trackers, precisions, hooks of gradients."""

from __future__ import annotations

from enum import Enum

FP8_ELSEWHERE = (
    'a YAML has it (`duoka train`, train.precision: fp8); in a loop of your own write mixed_precision="bf16"'
)


class Word(str, Enum):
    """A member equals its text."""

    def __str__(self) -> str:
        return str(self.value)

    @classmethod
    def list(cls) -> list[str]:
        return [str(one.value) for one in cls]


class DistributedType(Word):
    """What kind of world there is. `Accelerator.distributed_type` is one of NO, MULTI_CPU, MULTI_GPU and FSDP (any
    strategy that shards); the others are there to be compared with."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    TPU = "XLA"
    MEGATRON_LM = "MEGATRON_LM"


class LoggerType(Word):
    """Trackers that `log_with` may name; those that duoka has none for are refused there."""

    ALL = "all"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"
    COMETML = "comet_ml"
    AIM = "aim"
    MLFLOW = "mlflow"
    CLEARML = "clearml"
    DVCLIVE = "dvclive"
    SWANLAB = "swanlab"


class PrecisionType(Word):
    """What `mixed_precision` may be here."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"


class DDPCommunicationHookType(Word):
    """How gradients travel."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"
