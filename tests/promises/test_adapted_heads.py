"""An adapter beside the head, tied to the embedding or not, learns alike on any split, and after a resume elsewhere."""

import pytest
from safetensors.torch import load_file
from tiny import write_conversations, write_tiny_model
from worlds import train_all

YAML = """
model: {model}
data: {{train: [{data}], max_length: 256}}
lora: {{rank: 3, alpha: 6, targets: [lm_head, q_proj]}}
optim: {{lr: 1e-2, warmup: 2, weight_decay: 0.1, eps: 1e-5}}
train: {{max_steps: 4, global_batch: 8, precision: fp32, micro_batch: 2}}
checkpoint: {{every: 2}}
log: {{to: []}}
"""
SPLITS = {
    "tied": ["pipeline=2", "strategy=zero3"],
    "untied": ["strategy=zero1", "strategy=zero3"],
}
FOUR = "parallel={strategy: ddp, pipeline: 2}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("heads")
    data = write_conversations(folder / "chats.jsonl", 16, seed=3)
    yamls = {}
    for kind in SPLITS:
        model = write_tiny_model(folder / kind, tied=kind == "tied")
        yamls[kind] = folder / f"{kind}.yaml"
        yamls[kind].write_text(YAML.format(model=model, data=data), encoding="utf-8")
    cells = [(kind, split) for kind, splits in SPLITS.items() for split in splits]
    train_all([(str(yamls[kind]), [], str(folder / f"{kind}-1")) for kind in SPLITS], 1)
    train_all([(str(yamls[kind]), [f"parallel.{how}"], str(folder / f"{kind}-{how}")) for kind, how in cells], 2)
    train_all([(str(yamls["tied"]), [FOUR], str(folder / "tied-four"))], 4)
    back = [
        (str(yamls[kind]), [f"checkpoint.resume={folder}/{kind}-{how}/checkpoints/step-00000002"],
         str(folder / f"{kind}-{how}-back"))
        for kind, how in cells
    ]  # fmt: skip
    train_all(back, 1)
    return folder


def adapter_of(folder):
    return load_file(folder / "final/adapter_model.safetensors")


NAMES = [(kind, f"{how}{after}") for kind, splits in SPLITS.items() for how in splits for after in ("", "-back")]


@pytest.mark.parametrize(("kind", "name"), [*NAMES, ("tied", "four")])
def test_it_learns_as_on_one_process(runs, kind, name):
    wanted, found = adapter_of(runs / f"{kind}-1"), adapter_of(runs / f"{kind}-{name}")
    assert found.keys() == wanted.keys() and "base_model.model.lm_head.lora_B.weight" in wanted
    assert wanted["base_model.model.lm_head.lora_B.weight"].abs().max() > 1e-3, "it has learned nothing"
    for key, value in wanted.items():
        assert (found[key] - value).abs().max() < 5e-6, key
