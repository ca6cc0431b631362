"""A short first config for a user's own data, from a few answers: what `duoka new` writes.

`duoka init` writes the long one, with every key explained (document.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from duoka.config.yaml_text import yaml_text
from duoka.errors import typed


@dataclass(frozen=True)
class Method:
    """What to train, and what that says in the YAML; rates are those that published recipes begin with."""

    what: str
    lr: str
    blocks: tuple[str, ...] = ()
    epochs: int = 3
    quantization: str = ""


_LORA = "lora: {rank: 16, alpha: 32, targets: all}"
METHODS: Mapping[str, Method] = {
    "lora": Method("small matrices beside a frozen model: least memory for good results", "2e-4", (_LORA,)),
    "qlora": Method(
        "the same beside a model in 4 bits: a quarter of its memory, slower (duoka[quant])",
        "2e-4",
        (_LORA,),
        quantization="nf4",
    ),
    "full": Method("every weight: 16 bytes for each parameter, all ranks together", "2e-5"),
    "dpo": Method(
        "LoRA from pairs of answers, a better and a worse one", "2e-5", ("stage: {name: dpo, beta: 0.1}", _LORA), 1
    ),
}


def first_yaml(model: str, data: list[str], method: str, max_length: int, file_name: str) -> str:
    """A config of some fifteen lines, ready to train."""
    chosen, stem = METHODS[method], file_name.rsplit(".", 1)[0] or "run"
    source = {"name": model, "quantization": chosen.quantization} if chosen.quantization else model
    return "\n".join(
        [
            f"# {method}: {chosen.what}.",
            f"# Start it, or go on after a stop:   duoka train {typed(file_name)}",
            f"model: {yaml_text(source)}",
            "data:",
            f"  train: {yaml_text(data)}",
            "  eval: 0.1                  # a tenth is kept aside to measure on",
            f"  max_length: {max_length}           # tokens; what is longer is cut",
            *chosen.blocks,
            f"optim: {{lr: {chosen.lr}, schedule: cosine, warmup: 0.03}}",
            f"train: {{epochs: {chosen.epochs}, global_batch: 16}}   # samples a step, on any number of processes",
            "checkpoint: {every: 50, keep: 2}",
            f"output: {yaml_text(f'runs/{stem}')}",
            "",
        ]
    )
