"""The numbers of the user's own config for a topic, as lines: one small function per topic, all from the plan's rooms.

Nothing is estimated here; where the model or the data is not at hand, that is said instead of a number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from duoka.config.loaded import Loaded
from duoka.config.schema import RunConfig
from duoka.explain.find import Language
from duoka.plan.report import Plan
from duoka.units import format_bytes, format_count, parse_amount, parse_seconds


@dataclass(frozen=True)
class Own:
    """A user's config with its plan for `num_ranks` processes."""

    loaded: Loaded
    plan: Plan
    num_ranks: int
    language: Language

    @property
    def config(self) -> RunConfig:
        return self.loaded.config

    def say(self, en: str, zh: str) -> str:
        return zh if self.language == "zh" else en


def numbers_for(topic: str, own: Own) -> list[str]:
    return TOPICS[topic](own) if topic in TOPICS else []


def value_of(key: str, own: Own) -> list[str]:
    """The config's own value of a key, with the place it comes from."""
    from duoka.config.catalog import leaves
    from duoka.config.write import with_secrets
    from duoka.config.yaml_text import yaml_text

    found = {name: value for name, value in leaves(own.config).items() if name == key or name.startswith(f"{key}.")}
    said = {
        "default": "默认",
        "command line": "命令行",
        "from depth": "由 depth 推出",
        "from lora.adapter": "取自 lora.adapter",
    }
    lines = []
    for name, value in found.items():
        origin = own.loaded.origins.get(name, "default")
        shown = with_secrets(value, name, own.loaded.secrets)
        text = own.say("left out", "未写") if value is None else yaml_text(shown)
        lines.append(f"{name}: {text}   ({own.say(origin, said.get(origin, origin))})")
    return lines


def _zero(own: Own) -> list[str]:
    from duoka.plan.recipe import static_table

    plan, ranks = own.plan, max(own.num_ranks, 2)
    layout = replace(plan.layout, strategy="ddp", dp=ranks, shard=1, offload="none")
    work = plan.work
    total, trained = format_count(work.shape.num_parameters), format_count(work.num_trainable)
    head = own.say(
        f"{total} parameters, {trained} trained, {ranks} processes; weights, gradients, optimizer per process:",
        f"{total} 个参数，其中训练 {trained} 个，{ranks} 个进程；每个进程的权重、梯度与优化器：",
    )
    rows = static_table(work, layout)
    return [head, *(f"  {row.strategy:<7} {format_bytes(row.total_bytes):>10}   {row.formula}" for row in rows)]


def _precision(own: Own) -> list[str]:
    trained = own.plan.work.num_trainable
    full, most = 16 * trained, 18 * trained
    return [
        own.say(
            f"{format_count(trained)} trained parameters: 16 bytes each are {format_bytes(full)}, with a bf16 copy "
            f"18 or {format_bytes(most)}; precision is {own.plan.layout.precision}",
            f"训练 {format_count(trained)} 个参数：每个 16 字节共 {format_bytes(full)}，加 bf16 副本 18 字节共 "
            f"{format_bytes(most)}；精度为 {own.plan.layout.precision}",
        ),
        # 16P + A in fp32, 18P + A/2 in mixed precision.
        own.say(
            f"mixed precision takes less memory where activations in fp32 exceed 4 bytes for each of them, "
            f"{format_bytes(4 * trained)}",
            f"fp32 激活值超过每参数 4 字节，即 {format_bytes(4 * trained)} 时，混合精度才更省内存",
        ),
    ]


def _batch(own: Own) -> list[str]:
    return [own.plan.batch.sentence()]


def _learning_rate(own: Own) -> list[str]:
    lr, batch = own.config.optim.lr, parse_amount(own.config.train.global_batch)
    lines = [own.say(f"lr {lr:g} at global_batch {batch}", f"global_batch {batch} 时 lr 为 {lr:g}")]
    for times in (2, 4, 8):
        larger = replace(batch, count=batch.count * times)
        lines.append(
            own.say(
                f"  {larger}: sqrt {lr * times**0.5:.3g}, linear {lr * times:.3g}",
                f"  {larger}：平方根 {lr * times**0.5:.3g}，线性 {lr * times:.3g}",
            )
        )
    return lines


def _resume(own: Own) -> list[str]:
    every, keep = own.config.checkpoint.every, own.config.checkpoint.keep
    return [
        own.say(
            f"saved every {every} (a number: steps), the newest {keep} are kept: a crash costs at most that much",
            f"每 {every}（数字为步数）保存一次，保留最新 {keep} 个：崩溃最多损失这么多",
        )
    ]


def _memory(own: Own) -> list[str]:
    parts = sorted(own.plan.memory.parts.items(), key=lambda part: -part[1])
    return [
        own.plan.memory_sentence(),
        *(f"  {name:<14} {format_bytes(size):>10}" for name, size in parts if size),
    ]


def _traffic(own: Own) -> list[str]:
    ranks, size = max(own.num_ranks, 2), 4 * own.plan.work.num_trainable
    sent = 2 * (ranks - 1) / ranks * size
    per_s = {"1 GbE": 0.125e9, "10 GbE": 1.25e9, "NVLink 4 (450 GB/s)": 450e9}
    times = ", ".join(f"{name} {sent / speed:.2g} s" for name, speed in per_s.items())
    return [
        own.say(
            f"gradients {format_bytes(size)}, {ranks} processes: each sends 2 x {ranks - 1}/{ranks} of it, "
            f"{format_bytes(int(sent))} a step; at full speed: {times}",
            f"梯度 {format_bytes(size)}，{ranks} 个进程：每个每步发送其 2 × {ranks - 1}/{ranks}，即 "
            f"{format_bytes(int(sent))}；按满速计：{times}",
        )
    ]


def _lora(own: Own) -> list[str]:
    work = own.plan.work
    if own.config.lora is None:
        return [own.say("this config trains in full: it has no lora block", "该配置为全参数训练：没有 lora 块")]
    share = work.num_trainable / work.shape.num_parameters
    return [
        own.say(
            f"rank {own.config.lora.rank}: {work.num_trainable:,} weights are trained, {share:.2%} beside the model's "
            f"{work.shape.num_parameters:,}",
            f"秩 {own.config.lora.rank}：训练 {work.num_trainable:,} 个权重，相当于模型 "
            f"{work.shape.num_parameters:,} 的 {share:.2%}",
        )
    ]


def _timeout(own: Own) -> list[str]:
    seconds = parse_seconds(own.config.parallel.timeout)
    return [own.say(f"parallel.timeout is {seconds:g} s", f"parallel.timeout 为 {seconds:g} 秒")]


TOPICS: dict[str, Callable[[Own], list[str]]] = {
    "zero": _zero,
    "strategies": _zero,
    "precision": _precision,
    "batch": _batch,
    "learning_rate": _learning_rate,
    "resume": _resume,
    "memory": _memory,
    "traffic": _traffic,
    "lora": _lora,
    "timeout": _timeout,
}
