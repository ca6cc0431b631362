"""What a plan advises is written into the config word for word: no rule refuses it, and it gives what was promised."""

import re

import pytest
import yaml
from test_plan_report import CPU, GIB, LLAMA_8B

from duoka.config.rules import check_rules
from duoka.config.schema import RunConfig
from duoka.errors import Faults
from duoka.plan.catalog import cluster_of, parse_cluster
from duoka.plan.changes import single_changes
from duoka.plan.hardware import Machine
from duoka.plan.report import make_plan
from duoka.plan.shape import demo_shape

CLUSTERS = ("1 CPU", "4 CPU", "1xH100", "8xRTX4090", "2x8xH100-80G", "2x8xA100-80G@1x25GbE")
FIXED = {"micro_batch": "8192 tokens", "recompute": "none"}
WAYS = (
    {},
    {"lora": {"rank": 16}},
    {"train_only": {"layers": 2}},
    {"stage": "dpo", "train": FIXED},
    {"stage": "reward"},
    {"train": FIXED},
    {"train": {"recompute": "selective", "micro_batch": 4}},
    {"train": {"precision": "bf16", "weights": "bf16", "micro_batch": 8}},
    {"train": {"precision": "fp8", **FIXED}},
    {"optim": {"name": "muon"}, "train": FIXED},
    {"optim": {"name": "adamw8bit"}},
    {"parallel": {"strategy": "ddp"}, "train": FIXED},
    {"parallel": {"strategy": "fsdp", "reshard": False}, "train": FIXED},
    {"parallel": {"strategy": "fsdp", "reshard": "node"}, "train": FIXED},
    {"parallel": {"pipeline": 2}},
    {"parallel": {"tensor": 2}},
    {"parallel": {"sequence": 2}},
    {"parallel": {"compress": "powersgd"}},
    {"parallel": {"engine": "deepspeed"}},
    {"parallel": {"layout": "ddp4"}},
    {"parallel": {"offload": {"activations": "disk"}}, "train": FIXED},
)


def written(facts, words):
    """The config with the advice written into it, as someone would who reads it."""
    facts = {key: dict(value) if isinstance(value, dict) else value for key, value in facts.items()}
    for part in re.split(r" and (?=[a-z_.]+: )", words):
        key, value = part.split(": ", 1)
        block, _, name = key.partition(".")
        whole = facts.get(block, {}) if isinstance(facts.get(block, {}), dict) else {"name": facts[block]}
        facts[block] = {**whole, name: yaml.safe_load(value)} if name else yaml.safe_load(value)
    return facts


def is_refused(config):
    return any(not rule.is_note for rule in check_rules(config))


def planned(facts, shape, on):
    """The plan, or None where a rule or the world does not go with it."""
    config = RunConfig.model_validate(facts)
    if is_refused(config):
        return None
    if "CPU" in on:
        machine, ranks = Machine(8, 64 * GIB, int(on[0]) * 2 * GIB), int(on[0])
        cluster = cluster_of(machine, 1, ranks)
    else:
        cluster = parse_cluster(on)
        machine, ranks = cluster.machine(), cluster.num_devices
    try:
        return make_plan(config, shape, machine, ranks, local_size=cluster.per_node, cluster=cluster)
    except Faults:
        return None


def cases(on):
    length, shape = (512, demo_shape()) if "CPU" in on else (8192, LLAMA_8B)
    for way in WAYS:
        facts = {"model": "demo", **way, "data": {"train": ["x"], "max_length": length}}
        facts["train"] = {"global_batch": 64, **way.get("train", {})}
        plan = planned(facts, shape, on)
        if plan is not None:
            yield facts, shape, plan


@pytest.mark.parametrize("on", CLUSTERS)
def test_what_would_fit_fits(on):
    num = 0
    for facts, shape, plan in cases(on):
        for words in plan.smaller:
            told = f"{words} for {facts} on {on}"
            again = planned(written(facts, words), shape, on)
            assert again is not None, f"{told} is refused"
            assert again.verdict != "does not fit", f"{told}: {again.memory_sentence()}"
            num += 1
    assert num > (2 if "2x8" not in on else 0)


@pytest.mark.parametrize("on", CLUSTERS)
def test_a_single_change_is_accepted_and_gives_what_it_says(on):
    num = 0
    for facts, shape, plan in cases(on):
        config = RunConfig.model_validate(facts)
        for change in single_changes(config, plan.task, plan.layout, plan.cluster, plan.available_bytes):
            told, changed = f"{change.words} for {facts} on {on}", written(facts, change.words)
            assert not is_refused(RunConfig.model_validate(changed)), told
            again = planned(changed, shape, on)
            assert again is not None, told
            if again.layout.name == plan.layout.name or "strategy" in change.words:
                assert again.memory.peak_bytes == pytest.approx(change.peak_bytes, rel=0.01), told
                assert again.speed.tokens_per_s == pytest.approx(change.tokens_per_s, rel=0.01), told
                assert "does not fit" not in change.mark or again.verdict == "does not fit", told
                num += 1
    assert num > 10


@pytest.mark.parametrize(("share", "mark"), [(0.8, ""), (0.94, "tight"), (1.2, "does not fit")])
def test_a_change_is_called_what_its_plan_is_called(share, mark):
    """`share`: of the memory that is there, what the change takes."""
    train = {"micro_batch": 4, "recompute": "none"}
    config = RunConfig.model_validate({"model": "demo", "data": {"train": ["x"], "max_length": 512}, "train": train})
    plan = make_plan(config, demo_shape(), CPU, 1)

    def selective(available):
        changes = single_changes(config, plan.task, plan.layout, plan.cluster, available)
        return next(one for one in changes if "selective" in one.words)

    assert selective(int(selective(plan.available_bytes).peak_bytes / share)).mark == mark


def test_of_a_disk_without_room_nothing_else_is_advised():
    from dataclasses import replace

    config = RunConfig.model_validate(
        {"model": "demo", "data": {"train": ["x"]}, "parallel": {"offload": {"activations": "disk"}}}
    )
    plan = make_plan(config, demo_shape(), replace(CPU, disk_free_bytes=1 << 20), 1)
    assert plan.disk.verdict == plan.verdict == "does not fit" and plan.smaller == ()
