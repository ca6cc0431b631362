"""docs/gallery.md: each YAML of examples/, and what its method needs for a model of 7B on three machines, by the plan.

    python benchmarks/gallery.py > docs/gallery.md

Nothing is run and no GPU is asked: the figures are those of `duoka plan`. Seconds.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from duoka.config.load import Start, load_config
from duoka.config.schema import RunConfig
from duoka.errors import DuokaError, Fault
from duoka.plan.catalog import parse_cluster
from duoka.plan.choose import check_machine
from duoka.plan.report import Plan, make_plan
from duoka.plan.shape import facts_of_new, read_facts, shape_from_config
from duoka.units import format_bytes

ROOT = Path(__file__).parents[1]
MACHINES = ("1xRTX4090", "8xA100-80G", "2x8xH100")
# In the order of a first reading.
EXAMPLES = (
    "own_data", "little", "lora", "qlora", "full", "preferences", "pretrain", "gpt2_small", "two_processes",
    "two_machines", "slurm", "resume", "tensor", "pipeline", "sequence", "serve", "export",
)  # fmt: skip
# Several stages in one file: they make a model of their own, and are planned one by one as they run.
OF_STAGES = {"little": "minutes on two cores of a CPU: [measured](../benchmarks/little.md)"}
# Llama 2 7B's sizes, in place of the demo model; all samples as long as this.
LARGE = {"model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
         "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32}  # fmt: skip
OWN_MODELS = {
    "pretrain": lambda model: facts_of_new(model, 49152),
    "gpt2_small": lambda model: {**read_facts(ROOT / "examples" / model.name), "vocab_size": 49152},
}
SAMPLES = ("data.max_length=2048",)
# The demo model's three heads of keys and values take an axis of 3 and no other; the large one's 32 take one of 2.
INSTEAD = {"tensor": ("parallel.tensor=2",)}
HEAD = """\
# Gallery: a small YAML for each task

Each file of [examples/](../examples) is whole and runs as it is, with SmolLM2-135M (`model: demo`) and data that is
there; each says in ten lines why its values are what they are. A test loads each with its data. Copy one, and change
model and data.

The table asks `duoka plan` what the same file needs with **a model of Llama 2 7B's sizes in place of the small one**
and samples of 2,048 tokens: the layout that `auto` takes, memory per GPU at its highest, and tokens per second of all
GPUs together. Where there is room, `auto` computes more at once, so a figure below the card's memory is no least
need. `tensor.yaml` is asked with `parallel.tensor=2`, `pretrain.yaml` and `gpt2_small.yaml` with their own models.
These are predictions; how far off they are on published runs, and what was never measured: [plan.md](plan.md). This
page is written by `python benchmarks/gallery.py`.

| file | for what | 1x RTX 4090 (24 GB) | 8x A100 80 GB | 2 nodes of 8x H100 80 GB |
|---|---|---|---|---|
"""
TAIL = """
**What the table says.** Full fine-tuning of 7B needs about 16 bytes a parameter and is out of reach of one 24 GB
card; LoRA fits it by computing activations twice, and QLoRA leaves room to keep some. On eight cards everything fits,
and speed decides: axes (tensor, pipeline, sequence) cost exchange or waiting, and pay where sharded data parallelism
alone does not fit.
"""


def plan(name: str, machines: str) -> Plan | str:
    """The plan of an example on other machines, or why it is refused there."""
    cluster = parse_cluster(machines)
    node = cluster.machine()

    def check(config: RunConfig, _: Path) -> list[Fault]:
        return check_machine(config, node, cluster.num_devices, cluster.per_node)

    path = ROOT / "examples" / f"{name}.yaml"
    overrides = () if name in OWN_MODELS else (*SAMPLES, *INSTEAD.get(name, ()))
    try:
        loaded = load_config(path, overrides, checks=(check,), start=Start(cluster.num_devices, True))
        facts = OWN_MODELS[name](loaded.config.model) if name in OWN_MODELS else LARGE
        shape, ranks = shape_from_config(facts), cluster.num_devices
        return make_plan(loaded.config, shape, node, ranks, local_size=cluster.per_node, cluster=cluster)
    except DuokaError as error:
        return "needs 2 GPUs" if cluster.num_devices == 1 else error.lines()[0].split(": ", 1)[-1]


def cell(found: Plan | str) -> str:
    if isinstance(found, str):
        return found
    memory = f"{format_bytes(found.memory.peak_bytes)} a GPU"
    if found.verdict == "does not fit":
        return f"**does not fit**: {memory}"
    tokens = found.speed.tokens_per_s
    speed = f"{tokens / 1000:,.1f}k" if tokens < 10_000 else f"{tokens / 1000:,.0f}k"
    return f"{found.layout.name}, {memory}, {speed} tokens/s"


def title(name: str) -> str:
    """The first line of the file, up to its first colon or comma."""
    line = (ROOT / "examples" / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
    return re.split(r"[.:,] |[.:]$| \(", line)[0]


def page() -> str:
    rows = [
        f"| [{name}.yaml](../examples/{name}.yaml) | {title(name)} | "
        + (
            " | ".join([OF_STAGES[name], "", ""])
            if name in OF_STAGES
            else " | ".join(cell(plan(name, machines)) for machines in MACHINES)
        )
        + " |"
        for name in EXAMPLES
    ]
    return HEAD + "\n".join(rows) + "\n" + TAIL


if __name__ == "__main__":
    sys.stdout.write(page())
