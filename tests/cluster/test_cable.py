"""What passes between machines, counted by their cable and not by us: the ledger's bytes, and what packing saves.

The machines are network namespaces with an sshd each. SKIPPED, loudly, where they cannot be.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from namespaces import Network, machines, why_not
from tiny import build_tiny_tokenizer, write_conversations, write_tiny_model

from duoka.runs.events import read_steps
from duoka.runs.folder import RunFolder

WHY_NOT = why_not()
pytestmark = [
    pytest.mark.skipif(bool(WHY_NOT), reason=f"NO MACHINES: {WHY_NOT}"), pytest.mark.nightly, pytest.mark.timeout(1200),
]  # fmt: skip
YAML = (
    "model: {model}\ndata: {{train: [{data}], max_length: 64}}\noptim: {{lr: 2e-3}}\n"
    "train: {{epochs: 100, global_batch: 8, micro_batch: 2, precision: fp32}}\n"
    "checkpoint: {{every: 1000}}\nlog: {{every: 1, to: []}}\n"
)
PACKED = "parallel.compress={weights: int8, gradients: int4}"
# One rank on each machine: all that a rank sends passes the cable.
AXES = {
    "ddp": ["parallel.strategy=ddp"],
    "zero2": ["parallel.strategy=zero2"],
    "fsdp": ["parallel.strategy=fsdp"],
    "tensor": ["parallel.tensor=2"],
    "pipeline": ["parallel.pipeline=2"],
    "sequence": ["parallel.sequence=2"],
    "expert": ["parallel.strategy=zero1", "parallel.expert=2", "model=MIXTURE"],
}
# Two on each: what stays inside does not.
NODES = {
    "plain": ["parallel.strategy=zero3"],
    "packed": ["parallel.strategy=zero3", PACKED],
    "packed, copies": ["parallel.strategy=zero3", PACKED, "parallel.reshard=node"],
}
FEW, MORE = 3, 11


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Network, Path, Path]]:
    folder = tmp_path_factory.mktemp("cable")
    home = folder / "home"
    home.mkdir()
    model = write_tiny_model(folder / "model", hidden=256, layers=4)
    write_mixture(folder / "mixture")
    data = write_conversations(home / "chats.jsonl", 40, seed=2)
    (home / "run.yaml").write_text(YAML.format(model=model, data=data), encoding="utf-8")
    with machines(folder / "net") as net:
        yield net, home, model


def write_mixture(folder: Path) -> None:
    """Wide enough that tokens on their way to experts are more than all that is said beside them."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    tokenizer = build_tiny_tokenizer()
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=256, intermediate_size=256, moe_intermediate_size=256, head_dim=64,
        num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, num_experts=8, num_experts_per_tok=2,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def through_the_cable(net: Network) -> int:
    """Bytes that b has sent so far."""
    name = "/sys/class/net/eth0/statistics/tx_bytes"
    return int(subprocess.run(net.inside(1, "cat", name), capture_output=True, text=True, check=True).stdout)


def train(net: Network, home: Path, settings: list[str], ranks: int, steps: int) -> tuple[int, RunFolder]:
    """Bytes that b sent for a whole run of so many steps."""
    name = f"run-{len(list(home.iterdir()))}"
    before = through_the_cable(net)
    words = ["run.yaml", "--hosts", "a,b", "--nproc", str(ranks), f"train.max_steps={steps}", f"output={name}"]
    done = subprocess.run(
        net.inside(0, sys.executable, "-m", "duoka", "train", *words, *settings), cwd=home, text=True,
        env={**os.environ, "DUOKA_SSH": net.ssh}, stdin=subprocess.DEVNULL, capture_output=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return through_the_cable(net) - before, RunFolder(home / name)


def a_step(net: Network, home: Path, settings: list[str], ranks: int) -> tuple[float, RunFolder]:
    """What starts and ends send is in both runs."""
    few, _ = train(net, home, settings, ranks, FEW)
    more, run = train(net, home, settings, ranks, MORE)
    return (more - few) / (MORE - FEW), run


@pytest.mark.parametrize("name", AXES)
def test_the_ledger_s_bytes_are_the_cable_s(case: tuple[Network, Path, Path], name: str) -> None:
    net, home, _ = case
    sent, run = a_step(net, home, [one.replace("MIXTURE", str(home.parent / "mixture")) for one in AXES[name]], 1)
    lines = (run.events / "rank00001.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) >= MORE and len(read_steps(run)) == MORE
    told = [json.loads(line)["sent_bytes"] for line in lines if '"sent_bytes"' in line]
    wanted = statistics.mean(told[FEW:])
    print(f"{name}: {sent:,.0f} bytes a step by the cable, {wanted:,.0f} by the ledger, {sent / wanted:.3f}")
    assert 1.0 <= sent / wanted < 1.1, "frames, acknowledgments and small messages come on top"


def test_packed_weights_and_gradients_send_less_than_half_between_machines(case: tuple[Network, Path, Path]) -> None:
    net, home, model = case
    found = {name: a_step(net, home, settings, 2)[0] for name, settings in NODES.items()}
    weights = sum(one.stat().st_size for one in model.glob("*.safetensors"))
    print({name: round(size / weights, 3) for name, size in found.items()}, "times the weights")
    assert found["plain"] > weights, "gathers and sums of fp32 weights pass the cable"
    assert found["packed"] < 0.45 * found["plain"]
    assert found["packed, copies"] < found["packed"], "backward passes gather inside a machine"
