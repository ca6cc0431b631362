"""A trained adapter is trained further, or lies below a new one: as PEFT does it, in any layout, over a resume too."""

import json

import peft
import pytest
import torch
from oracle import train as oracle_train
from safetensors.torch import load_file
from test_any_split import read_run, relative, worst
from tiny import write_conversations
from transformers import AutoModelForCausalLM
from worlds import train_all

from duoka.config.load import load_config, resolved_yaml
from duoka.errors import Faults
from duoka.model.lora import save_adapter
from duoka.runs.folder import RunFolder
from duoka.serve.load_run import find_trained, find_trained_on, load_trained

RECIPE = {"lr": 5e-3, "warmup": 0.5, "clip": 0.5, "weight_decay": 0.1}
YAML = """
model: {model}
data: {{train: [{data}], max_length: 512}}
lora: {{rank: 3, alpha: 6, dropout: 0}}
optim: {{lr: 5e-3, warmup: 0.5, clip: 0.5, weight_decay: 0.1}}
train: {{max_steps: 2, global_batch: 8, precision: fp32, seed: 7, micro_batch: 300 tokens}}
checkpoint: {{every: 1}}
log: {{to: []}}
output: {output}
"""
FURTHER = "lora={adapter: first, dropout: 0}"
ABOVE = "lora={rank: 2, targets: [q_proj, up_proj], dropout: 0, merge: [first, other]}"
RUNS = {
    "first": [],
    "further": [FURTHER],
    "further, sharded": [FURTHER, "parallel.strategy=zero3"],
    "further, resumed": [FURTHER, "checkpoint.resume=further/checkpoints/step-00000001"],
    "above": [ABOVE],
    "above, sharded": [ABOVE, "parallel.strategy=zero3"],
}


@pytest.fixture(scope="module")
def case(tmp_path_factory, tiny_model):
    folder = tmp_path_factory.mktemp("adapters")
    data = write_conversations(folder / "chats.jsonl", 16, seed=3)
    (folder / "x.yaml").write_text(YAML.format(model=tiny_model, data=data, output=folder / "out"), encoding="utf-8")
    adapted = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(tiny_model),
        peft.LoraConfig(r=4, lora_alpha=6, use_rslora=True, target_modules=["v_proj", "up_proj"]),
    )
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(2)
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
    adapted.save_pretrained(folder / "other")
    train_all([(str(folder / "x.yaml"), more, str(folder / name)) for name, more in RUNS.items()], 2)
    return folder, tiny_model, data


def batches_of(case):
    from duoka.data.feed.epoch_plan import EpochPlan
    from duoka.data.prepare import prepare_data
    from duoka.units import parse_amount

    folder, model, _ = case
    store = prepare_data(load_config(folder / "x.yaml").config, folder, model).train
    plan = EpochPlan(
        store.lengths, store.num_targets, fingerprint=store.fingerprint, seed=7, global_batch=parse_amount(8)
    )
    return [plan.batch(0, index).tolist() for index in range(2)]


def final_of(folder):
    return load_file(folder / "final/adapter_model.safetensors")


@pytest.fixture(scope="module")
def oracles(case):
    """PEFT itself loads, merges and trains: nothing of duoka but the order of samples, and how a new one begins."""
    from duoka.config.schema import LoraConfig
    from duoka.model.lora import apply_lora

    folder, model, data = case

    def further(base):
        return peft.PeftModel.from_pretrained(base, folder / "first/final", is_trainable=True)

    def above(base):
        for below in ("first/final", "other"):
            base = peft.PeftModel.from_pretrained(base, folder / below).merge_and_unload()
        return apply_lora(base, LoraConfig(rank=2, alpha=6.0, targets=("q_proj", "up_proj"), dropout=0.0), seed=7)

    return {
        name: oracle_train(data, model, batches_of(case), **RECIPE, adapt=adapt)
        for name, adapt in (("further", further), ("above", above))
    }


@pytest.mark.parametrize("name", ["further", "further, sharded", "above", "above, sharded"])
def test_it_is_what_peft_does(case, oracles, name):
    losses, norms, _, weights = oracles[name.split(",")[0]]
    steps = read_run(case[0] / name)
    assert losses[0] < 0.99 * read_run(case[0] / "first")[0]["loss"], "it did not begin where the other ended"
    assert relative([step["loss"] for step in steps], losses) < 1e-5
    assert relative([step["grad_norm"] for step in steps], norms) < 1e-5
    if name.startswith("further"):
        theirs = {key.replace(".default.", "."): value for key, value in weights.items()}
        assert worst(final_of(case[0] / name), theirs)[0] < 1e-5


def test_resumed_it_is_the_same_to_the_bit(case):
    whole, resumed = (final_of(case[0] / name) for name in ("further", "further, resumed"))
    assert all(value.equal(whole[name]) for name, value in resumed.items())
    assert read_run(case[0] / "further, resumed")[0]["loss"] == read_run(case[0] / "further")[1]["loss"]


def test_the_result_is_one_plain_adapter_of_the_base_as_it_came(case, oracles):
    """Final folder (by PEFT alone), checkpoint (by duoka), and the oracle's own model answer alike."""
    folder, model, _ = case
    ids = torch.arange(3, 43)[None]
    facts = json.loads((folder / "above/final/adapter_config.json").read_text("utf-8"))
    assert facts["r"] == 2 + 3 + 4 and set(facts["target_modules"]) >= {"q_proj", "up_proj", "v_proj", "down_proj"}
    with pytest.raises(Faults, match="would count twice"):  # as a file of LLaMA-Factory's would name them
        find_trained_on(str(model), [str(folder / "other"), str(folder / "above/final")], say=print)
    for name, asked in (("above", ABOVE), ("further", FURTHER)):
        RunFolder(folder / name).config.write_text(resolved_yaml(load_config(folder / "x.yaml", [asked])), "utf-8")
    for name, below in (("above", "other"), ("further", "first/final")):  # in a copy too
        again = load_trained(find_trained(str(folder / name), say=print), dtype=torch.float32)
        save_adapter(again, copy := folder / f"copy of {name}")
        with pytest.raises(Faults, match="would count twice"):
            find_trained_on(str(model), [str(folder / below), str(copy)], say=print)
    base = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        final = peft.PeftModel.from_pretrained(base, folder / "above/final").eval()(input_ids=ids).logits
        lm = load_trained(find_trained(str(folder / "above"), step=2, say=print), dtype=torch.float32)
        ours = lm(input_ids=ids).logits
        merged = AutoModelForCausalLM.from_pretrained(model)
        for below in ("first/final", "other"):
            merged = peft.PeftModel.from_pretrained(merged, folder / below).merge_and_unload()
        plain = merged(input_ids=ids).logits
    assert (final - ours).abs().max() < 1e-4 < (final - plain).abs().max()
