"""docs/gallery.md: each YAML of examples/, and what its method needs for a model of 7B on three machines, by the plan.

    python benchmarks/gallery.py > docs/gallery.md
    python benchmarks/gallery.py zh > docs/gallery.zh-CN.md

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
HEAD_ZH = """\
# 示例：每种任务一个小 YAML

[examples/](../examples) 里的每个文件都是完整的，用 SmolLM2-135M（`model: demo`）和现成的数据就能跑；
每个文件用十行左右说明为什么取这些值。
测试会带着数据加载每一个文件。复制一份，换成自己的模型和数据即可。[English](gallery.md)

下表是 `duoka plan` 的回答：同一个文件，**把小模型换成 Llama 2 7B 的尺寸**、样本取 2,048 个 token 时需要什么：
`auto` 选的布局、每张 GPU 的
内存峰值、全部 GPU 合计的 tokens/s。内存有余时 `auto` 会一次多算一些，所以低于显存的数字并不是最低需求。`tensor.yaml` 按
`parallel.tensor=2` 来问，`pretrain.yaml` 和 `gpt2_small.yaml` 用它们自己的模型。这些是预测；
与公开发表的训练相差多少、哪些从未测过，见
[plan.md](plan.zh-CN.md)。本页由 `python benchmarks/gallery.py zh` 生成。

| 文件 | 用途 | 1x RTX 4090（24 GB） | 8x A100 80 GB | 2 个节点各 8x H100 80 GB |
|---|---|---|---|---|
"""
TAIL_ZH = """
**表说明了什么。** 7B 的全量微调每个参数约需 16 字节，一张 24 GB 的卡放不下；LoRA 靠把激活算两遍放得下，QLoRA
还有余地留住一部分。八张卡上什么都放得
下，比的是速度：张量、流水线、序列这些轴要付出交换或等待的代价，只有分片的数据并行单独放不下时才划算。
"""
TITLES_ZH = {
    "own_data": "用自己的对话微调", "little": "从零到会回答的模型", "lora": "LoRA 及其各个旋钮", "qlora": "QLoRA",
    "full": "全量微调", "preferences": "偏好对", "pretrain": "从零训练一个模型", "gpt2_small": "从零训练 GPT-2 small",
    "two_processes": "一台机器上两个进程", "two_machines": "一个终端管两台机器",
    "slurm": "时间用完前先保存、再自动排队的 Slurm 作业", "resume": "停止或崩溃之后继续", "tensor": "张量并行",
    "pipeline": "流水线并行", "sequence": "序列并行", "serve": "训练适配器，与别的一起提供服务",
    "export": "导出",
}  # fmt: skip
IN_CHINESE = {
    "**does not fit**: ": "**放不下**：", " a GPU": " 每张", "needs 2 GPUs": "需要 2 张 GPU",
    OF_STAGES["little"]: "双核 CPU 上几分钟：[实测](../benchmarks/little.md)",
}  # fmt: skip


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


def page(language: str = "en") -> str:
    is_zh = language == "zh"
    rows = [
        f"| [{name}.yaml](../examples/{name}.yaml) | {TITLES_ZH[name] if is_zh else title(name)} | "
        + (
            " | ".join([OF_STAGES[name], "", ""])
            if name in OF_STAGES
            else " | ".join(cell(plan(name, machines)) for machines in MACHINES)
        )
        + " |"
        for name in EXAMPLES
    ]
    if is_zh:
        for words, chinese in IN_CHINESE.items():
            rows = [row.replace(words, chinese) for row in rows]
    return (HEAD_ZH if is_zh else HEAD) + "\n".join(rows) + "\n" + (TAIL_ZH if is_zh else TAIL)


if __name__ == "__main__":
    sys.stdout.write(page(*sys.argv[1:]))
