"""QLoRA: the packed base is what the paper's table says, and training, evaluating and merging mean the same weights."""

import json
import subprocess
import sys

import pytest
import torch
from tiny import write_conversations, write_tiny_model

from duoka.cli import run as duoka
from duoka.model.build import load_model
from duoka.model.lora import count_parameters
from duoka.model.quantize import Packing

pytest.importorskip("bitsandbytes", reason="duoka[quant] is not installed")

# Dettmers et al. 2023, appendix E.
NF4 = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
       -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
       0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)  # fmt: skip


def test_packed_weights_are_the_nearest_of_the_table_by_blocks_of_64(tiny_model):
    packing = Packing("nf4", double=False, unpacked=True)
    got = load_model(tiny_model, dtype=torch.float32, packing=packing).state_dict()
    plain = load_model(tiny_model, dtype=torch.float32).state_dict()
    for name, weight in plain.items():
        if "proj" not in name:
            assert got[name].equal(weight), name
            continue
        blocks = weight.reshape(-1, 64)
        sizes = blocks.abs().amax(1, keepdim=True)
        codes = (blocks[..., None] / sizes[..., None] - torch.tensor(NF4)).abs().argmin(-1)
        wanted = (torch.tensor(NF4)[codes] * sizes).reshape(weight.shape)
        # Where a weight lies between two values, rounding may take either.
        assert ((got[name] - wanted).abs() > 1e-6).float().mean() < 0.01, name


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A short run on a packed base, an adapter that has learned."""
    folder = tmp_path_factory.mktemp("packed")
    base = write_tiny_model(folder / "base", tied=False)
    data = write_conversations(folder / "talks.jsonl", 12)
    (folder / "x.yaml").write_text(
        f"model: {{name: {base}, quantization: nf4}}\ndata: {{train: [{data}], eval: 0.25, max_length: 128}}\n"
        f"lora: {{rank: 4, dropout: 0.1}}\noptim: {{lr: 0.02, warmup: 0}}\ntrain: {{max_steps: 3, global_batch: 3}}\n"
        f"parallel: {{strategy: single}}\ncheckpoint: {{every: 2}}\noutput: {folder}/run\n"
    )
    assert duoka(["train", str(folder / "x.yaml")]) == 0
    return folder / "run"


def test_evaluation_of_a_run_packs_its_base_as_training_did(run, capsys):
    events = [json.loads(line) for line in (run / "events/run.jsonl").read_text().splitlines()]
    trained = [event["loss"] for event in events if event["type"] == "eval"][-1]
    losses = {}
    for name in ("run", "step"):
        assert duoka(["eval", str(run), "--json", *(["--checkpoint", "3"] if name == "step" else [])]) == 0
        losses[name] = json.loads(capsys.readouterr().out)["loss"]
    assert losses == {"run": pytest.approx(trained, rel=1e-6), "step": pytest.approx(trained, rel=1e-6)}


def test_what_is_exported_answers_as_packed_base_and_adapter(run, tmp_path, capsys):
    assert duoka(["export", str(run), "-o", str(tmp_path / "merged"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["max_difference"] < 1e-4
    merged = load_model(tmp_path / "merged", dtype=torch.float32).state_dict()
    assert not any("quant" in name or "absmax" in name for name in merged)
    assert "quantization_config" not in json.loads((tmp_path / "merged/config.json").read_text())


def test_a_packed_model_has_as_many_parameters_as_it_came_with(tiny_model):
    plain, packed = (load_model(tiny_model, dtype=torch.float32, packing=p) for p in (None, Packing("fp4", True)))
    assert count_parameters(packed)[0] == count_parameters(plain)[0]


def test_only_packed_models_import_the_packer(tiny_model):
    """A fresh process: bitsandbytes would take a quarter of its start. Afterwards it can still be had."""
    script = (
        "import sys; from pathlib import Path; import torch\n"
        "from duoka.config.schema import LoraConfig; from duoka.model.build import load_model\n"
        f"given = dict(folder=Path({str(tiny_model)!r}), dtype=torch.float32, lora=LoraConfig(rank=2))\n"
        "model = load_model(**given)\n"
        "assert 'bitsandbytes' not in sys.modules and 'peft' in sys.modules\n"
        "from duoka.model.quantize import Packing\n"
        "packing = Packing('nf4', double=False, unpacked=False)\n"
        "model = load_model(**given, packing=packing)\n"
        "kinds = {type(module).__module__ for module in model.modules()}\n"
        "assert 'peft.tuners.lora.bnb' in kinds, kinds\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
