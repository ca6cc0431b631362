"""Promise 1 for bases that came packed: an adapter beside them learns the same on one process and on two."""

import math
import shutil

import pytest
import torch
from tiny import write_conversations, write_tiny_model
from worlds import train_all

from duoka.runs.events import read_steps
from duoka.runs.folder import RunFolder

pytestmark = pytest.mark.timeout(400)

YAML = """
model: {model}
data: {{train: [{data}], max_length: 256}}
lora: {{rank: 4, dropout: 0}}
optim: {{lr: 1e-2}}
train: {{max_steps: 3, global_batch: 4, precision: fp32, micro_batch: "256 tokens"}}
log: {{to: []}}
output: {output}
"""


def write_packed(folder, plain, bits):
    """As transformers saves a model that bitsandbytes packed."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    ways = {4: {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}}
    how = BitsAndBytesConfig(**ways.get(bits, {"load_in_8bit": True}))
    model = AutoModelForCausalLM.from_pretrained(plain, quantization_config=how, device_map={"": "cpu"})
    model.save_pretrained(folder)
    for path in plain.glob("token*"):
        shutil.copy(path, folder)
    return folder


@pytest.mark.parametrize("bits", [4, pytest.param(8, marks=pytest.mark.nightly)])
def test_two_processes_learn_beside_a_packed_base_what_one_learns(tmp_path, bits):
    pytest.importorskip("bitsandbytes")
    base = write_packed(tmp_path / "packed", write_tiny_model(tmp_path / "plain", hidden=128), bits)
    data = write_conversations(tmp_path / "talks.jsonl", 12)
    losses = {}
    shared = ["fsdp"] if bits == 4 else []  # of 8 bits it is refused: test_model_source.py
    for size, strategies in ((1, ["single"]), (2, ["ddp", "zero2", *shared])):
        jobs = []
        for strategy in strategies:
            (yaml := tmp_path / f"{strategy}.yaml").write_text(
                YAML.format(model=base, data=data, output=tmp_path / "runs"), encoding="utf-8"
            )
            jobs.append((str(yaml), [f"parallel.strategy={strategy}"], str(tmp_path / strategy)))
        train_all(jobs, size)
        losses |= {one: [step["loss"] for step in read_steps(RunFolder(tmp_path / one))] for one in strategies}
    single = losses.pop("single")
    assert len(single) == 3 and single[0] - single[2] > 0.1, "it learns"
    for strategy, found in losses.items():
        assert all(math.isclose(a, b, rel_tol=1e-5) for a, b in zip(found, single, strict=True)), (
            strategy,
            found,
            single,
        )
