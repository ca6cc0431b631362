"""Published measurements of other projects' runs, to validate the planner against (tables/published.csv).

Each row says where it comes from and which program ran it; `split` says whether constants may be fitted to it (fit)
or whether it only judges them (judge). A row whose settings are not all stated is kept, with why it is not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from duoka.config.schema import LoraConfig
from duoka.plan.catalog import Cluster, parse_cluster, read_rows
from duoka.plan.layout import Layout, Precision, Recompute, parse_layout
from duoka.plan.memory import Memory, estimate_memory
from duoka.plan.recipe import Program, Work
from duoka.plan.shape import Linear, ModelShape
from duoka.plan.speed import RATES, Load, Rates, Speed, estimate_speed
from duoka.units import Amount

_BF16 = Program("bf16 throughout", 2, 2, 0, 4, kept_hidden=0, kept_hidden_split=20, kept_ffn=8, kept_kv=4, logits=0.5)
_MEGATRON = Program("Megatron", 2, 2, 4, 8, kept_scores=5, logits=8, selective="all but scores")
# What is known of each program's way to keep numbers, from its own documents and code.
PROGRAMS: Mapping[str, Program] = {
    "llm-foundry": Program("FSDP, fp32 masters", 2, 4, 2, 8, kept_hidden_split=6, logits=4),
    "llm-foundry pure": Program("FSDP, reduced in bf16", 2, 2, 2, 8, kept_hidden_split=6, logits=4),
    "megatron": _MEGATRON,
    "megatron-deepspeed": replace(_MEGATRON, name="Megatron-DeepSpeed", masters=8),
    "megatron-deepspeed fp32 grads": replace(_MEGATRON, name="Megatron-DeepSpeed", gradients=6),
    # Its selective recompute by operators keeps every second product. Whole logits in fp32: what the softmax gave, and
    # two gradients of that in the backward pass.
    "torchtitan": Program("torchtitan", 4, 4, 0, 8, logits=12, shares_rows=True, selective="every second product"),
    "torchtune full logits": replace(_BF16, logits=10),
    "torchtune": _BF16,
    "torchtune in backward": replace(_BF16, in_place=True),
    "torchtune offload": replace(_BF16, in_place=True, offloads_kept=True),
    "torchtune 8-bit": replace(_BF16, in_place=True, offloads_kept=True, state=2.06),
    "torchtune lora": replace(_BF16, offloads_kept=True),
    "torchtune qlora": replace(_BF16, offloads_kept=True, weights=0.6),
}


@dataclass(frozen=True)
class PublishedRun:
    """One published run: what it was, what was measured, and what the plan says of it."""

    id: str
    model: str
    shape: ModelShape
    work: Work
    layout: Layout
    cluster: Cluster
    load: Load
    micro: int
    step_s: float | None
    memory_bytes: float | None
    ran: bool
    flops_share: float | None  # as printed, by `flops_formula`
    flops_formula: str
    split: str
    source: str

    def plan_memory(self) -> Memory:
        tokens = round(self.load.tokens)
        accumulation = max(1, round(self.load.accumulation))
        return estimate_memory(
            self.work, self.layout, tokens, later=tokens if accumulation > 1 else 0, accumulation=accumulation,
            length=round(self.load.length),
        )  # fmt: skip

    @property
    def project(self) -> str:
        """The project that published it."""
        return self.source.split(":")[0].split(" ")[0].split("/")[-1]

    def plan_speed(self, rates: Rates = RATES) -> Speed:
        return estimate_speed(self.work, self.layout, self.cluster, self.load, rates=rates)


def read_points() -> tuple[list[PublishedRun], dict[str, int]]:
    """(all rows that say enough, how many are left out by reason)."""
    points: list[PublishedRun] = []
    unused: dict[str, int] = {}
    for row in read_rows("published.csv"):
        if row["why_unused"]:
            unused[row["why_unused"]] = unused.get(row["why_unused"], 0) + 1
        else:
            points.append(_point(row))
    return points, unused


def _point(row: Mapping[str, str]) -> PublishedRun:
    shape, program = _shape(row), PROGRAMS[row["program"]]
    layout = replace(
        parse_layout(row["layout"]),
        precision=_precision(row["precision"]),
        recompute=_recompute(row["recompute"]),
        compile=row["compile"] == "yes",
        packing=False,
        micro=Amount(int(row["micro_batch"]), "samples"),
    )
    cluster = parse_cluster(row["on"])
    length, micro, samples = int(row["length"]), int(row["micro_batch"]), int(row["global_batch"])
    tokens = float(samples * length)
    load = Load(samples / layout.dp / micro, micro * length, length, tokens)
    step = float(row["step_s"]) if row["step_s"] else None
    if row["tokens_per_s_per_device"]:
        step = tokens / (float(row["tokens_per_s_per_device"]) * cluster.num_devices)
    unit = 2**30 if row["memory_unit"].startswith("GiB") else 1e9
    lora = LoraConfig(rank=8) if row["task"] in ("lora", "qlora") else None
    return PublishedRun(
        id=row["id"],
        model=row["model"],
        shape=shape,
        work=Work(shape, lora, "cuda", program=program),
        layout=layout,
        cluster=cluster,
        load=load,
        micro=micro,
        step_s=step,
        memory_bytes=float(row["memory"]) * unit if row["memory"] else None,
        ran=row["outcome"] == "ran",
        flops_share=float(row["flops_share"]) / 100 if row["flops_share"] else None,
        flops_formula=row["flops_formula"],
        split=row["split"],
        source=row["source"],
    )


def _precision(text: str) -> Precision:
    return "fp16" if text == "fp16" else "bf16"


def _recompute(text: str) -> Recompute:
    """Of rows that say `yes` or nothing, none: their programs are described with what they keep."""
    return text if text in ("full", "selective") or "/" in text else "none"


def _shape(row: Mapping[str, str]) -> ModelShape:
    """The model of a row, from the sizes that its source states."""
    hidden, ffn, heads = int(row["hidden"]), int(row["ffn"]), int(row["heads"])
    kv_heads, gated = int(row["kv_heads"]), row["kind"].startswith("gated")
    head_dim = hidden // heads
    kv = kv_heads * head_dim
    linears = [
        Linear("q", hidden, hidden),
        Linear("k", hidden, kv),
        Linear("v", hidden, kv),
        Linear("o", hidden, hidden),
    ]
    linears += [Linear("gate", hidden, ffn)] if gated else []
    linears += [Linear("up", hidden, ffn), Linear("down", ffn, hidden)]
    return ModelShape(
        model_type=row["model"],
        hidden_size=hidden,
        intermediate_size=ffn,
        num_layers=int(row["layers"]),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=int(row["vocab"]),
        tied=row["kind"].endswith(" tied"),
        linears=tuple(linears),
        num_norm_parameters_per_layer=2 * hidden,
        num_final_norm_parameters=hidden,
        gated=gated,
        num_positions=int(row["positions"] or 0),
    )
