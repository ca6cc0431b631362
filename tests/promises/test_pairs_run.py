"""A run over preference pairs from end to end: reference, resuming, evaluation, other tools' files, what follows."""

import json
import math
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_any_split import read_run
from tiny import write_pairs, write_tiny_model
from worlds import fresh_cache, run_world, train_all

from duoka.config.load import load_config
from duoka.hub.new_model import MARK
from duoka.plan.layout import Layout
from duoka.train.reference import ReferencePass

pytestmark = pytest.mark.timeout(300)

YAML = """
model: {model}
stage: {{name: dpo, beta: 0.2, sft_weight: 0.1, sft_mean: tokens}}
data: {{train: [{data}], eval: 0.3, max_length: 128}}
lora: {{rank: 4}}
optim: {{lr: 5e-3, warmup: 2}}
train: {{epochs: 2, global_batch: 4, micro_batch: "300 tokens", precision: fp32, seed: 11}}
checkpoint: {{every: 2, keep: 10}}
log: {{to: []}}
output: {output}
"""
LLAMAFACTORY = """
model_name_or_path: {model}
stage: dpo
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
lora_dropout: 0.1
pref_beta: 0.1
pref_loss: sigmoid
dataset: pairs
dataset_dir: {folder}
template: chatml
cutoff_len: 256
output_dir: {folder}/theirs
logging_steps: 10
per_device_train_batch_size: 1
gradient_accumulation_steps: 4
learning_rate: 5.0e-3
num_train_epochs: 1.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
report_to: none
"""
WHOLE, AGAIN, TWO, ON_TOP, THEIRS, TRIED = "whole", "again", "two", "on top", "theirs", "rehearsed"


def events_of(folder, kind):
    lines = (folder / "events" / "run.jsonl").read_text(encoding="utf-8").splitlines()
    return [event for line in lines if (event := json.loads(line))["type"] == kind]


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs-run")
    model = write_tiny_model(folder / "model", layers=2)
    data = write_pairs(folder / "pairs.jsonl", 24, seed=4)
    yaml = folder / "run.yaml"
    yaml.write_text(YAML.format(model=model, data=data, output=folder / "out"), encoding="utf-8")
    # As LLaMA-Factory registers a ranking set, ShareGPT's form.
    records = [
        {
            "conversations": [{"from": "human", "value": one["prompt"]}],
            "chosen": {"from": "gpt", "value": one["chosen"]},
            "rejected": {"from": "gpt", "value": one["rejected"]},
        }
        for one in map(json.loads, data.read_text(encoding="utf-8").splitlines())
    ]
    (folder / "ranking.json").write_text(json.dumps(records), encoding="utf-8")
    columns = {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"}
    info = {"pairs": {"file_name": "ranking.json", "ranking": True, "formatting": "sharegpt", "columns": columns}}
    (folder / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")
    theirs = folder / "theirs.yaml"
    theirs.write_text(LLAMAFACTORY.format(model=model, folder=folder), encoding="utf-8")
    cache = fresh_cache(folder / "cache")
    first = (str(yaml), [], str(folder / WHOLE), cache)
    train_all([first, (str(theirs), [], str(folder / THEIRS), cache)], 1)
    resumed = folder / AGAIN
    (resumed / "checkpoints").mkdir(parents=True)
    shutil.copytree(folder / WHOLE / "checkpoints" / "step-00000004", resumed / "checkpoints" / "step-00000004")
    on_top = [f"lora.adapter={folder / WHOLE / 'final'}", "train.max_steps=3"]
    train_all(
        [
            # With another cache: the reference is computed again, from the start's weights and not the checkpoint's.
            (str(yaml), [], str(resumed), fresh_cache(folder / "elsewhere")),
            (str(yaml), on_top, str(folder / ON_TOP), cache),
            (str(yaml), ["train.rehearse=true", "train.max_steps=3"], str(folder / TRIED), cache),
        ],
        1,
    )
    train_all([(str(yaml), ["parallel.strategy=fsdp"], str(folder / TWO), cache)], 2)
    return folder


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(case):
    def numbers(name):
        return [(one["step"], one["loss"], one["margin"], one["grad_norm"]) for one in read_run(case / name)]

    assert numbers(AGAIN) == numbers(WHOLE)[4:] and len(numbers(AGAIN)) == len(numbers(WHOLE)) - 4 > 2
    ours, theirs = (load_file(case / name / "final" / "adapter_model.safetensors") for name in (AGAIN, WHOLE))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_evaluations_are_the_same_on_two_processes_and_have_the_stages_numbers(case):
    one, two = (events_of(case / name, "eval") for name in (WHOLE, TWO))
    assert len(one) == len(two) >= 1
    for ours, theirs in zip(one, two, strict=True):
        assert ours["num_samples"] == theirs["num_samples"] == 7 and ours["perplexity"] is None
        for key in ("loss", "margin", "reward_chosen", "reward_rejected", "logp_chosen"):
            assert abs(ours[key] - theirs[key]) < 1e-5 * abs(theirs[key]) + 1e-6, key
        assert ours["accuracy"] == theirs["accuracy"]
    assert one[-1]["accuracy"] > 0.9, "better answers have words of their own"


def test_an_adapter_that_goes_on_is_its_own_reference(case):
    first = read_run(case / ON_TOP)[0]
    assert first["drift"] < 1e-6 and abs(first["margin"]) < 1e-5
    log = [one["logp_chosen"] for one in (first, read_run(case / WHOLE)[0])]
    assert abs(log[0] - log[1]) > 1, "and not the base, from which it has moved"


def test_weights_of_another_seed_and_narrower_ones_have_a_reference_of_their_own(case, tmp_path):
    """A new model's folder holds no weights: what lies there says nothing of the seed that they are drawn from."""
    shutil.copy(case / "model" / "config.json", tmp_path)
    rows = SimpleNamespace(fingerprint="x")

    def key(folder, *overrides):
        config = load_config(str(case / "run.yaml"), ["lora=null", *overrides]).config
        return ReferencePass(config, case, folder, 0, Layout(precision="bf16"), engine=None).key(rows)

    assert key(tmp_path, "train.seed=1") == key(tmp_path, "train.seed=2")
    (tmp_path / MARK).write_text("{}")
    assert key(tmp_path, "train.seed=1") == key(tmp_path, "train.seed=1") != key(tmp_path, "train.seed=2")
    assert key(case / "model") != key(case / "model", "train.weights=bf16", "train.precision=bf16")


def test_a_file_of_llamafactory_runs_as_it_stands(case):
    steps = read_run(case / THEIRS)
    assert len(steps) == 6 and abs(steps[0]["loss"] - math.log(2)) < 1e-6
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.01
    facts = json.loads((case / THEIRS / "final" / "adapter_config.json").read_text(encoding="utf-8"))
    assert facts["lora_dropout"] == 0 and facts["r"] == 8


def test_a_rehearsal_changes_no_number(case):
    assert [one["loss"] for one in read_run(case / TRIED)] == [one["loss"] for one in read_run(case / WHOLE)[:3]]


def refuse_in_world(yaml, folder, cache):
    from duoka.comm.world import end_world, start_world
    from duoka.config.load import load_config
    from duoka.errors import ConfigError
    from duoka.runs.folder import RunFolder
    from duoka.train.main import read_inputs, run_in_world

    os.environ["DUOKA_CACHE"] = cache
    run = RunFolder(Path(folder))
    run.make()
    loaded = load_config(yaml, [])
    world = start_world(loaded.config.parallel)
    try:
        run_in_world(read_inputs(loaded, run), world)
    except ConfigError as error:
        Path(folder, "said.txt").write_text(str(error), encoding="utf-8")
    end_world(world)


def test_a_reference_that_is_not_the_start_ends_the_run_at_its_first_step(case):
    cache = case / "stale"
    shutil.copytree(case / "cache", cache)
    for file in (cache / "reference").glob("*.npy"):  # as of other weights under the same name
        np.save(file, np.load(file) * 1.05)
    run_world(1, refuse_in_world, str(case / "run.yaml"), str(case / "refused"), str(cache))
    said = (case / "refused" / "said.txt").read_text(encoding="utf-8")
    assert "the model is not the reference" in said and "dropout" in said
    assert not events_of(case / "refused", "checkpoint")


@pytest.fixture
def whole(case):
    """The run folder with the config that a launcher leaves there."""
    from duoka.config.load import load_config, resolved_yaml
    from duoka.runs.folder import RunFolder

    run = RunFolder(case / WHOLE)
    run.config.write_text(resolved_yaml(load_config(case / "run.yaml")), encoding="utf-8")
    return run


def test_the_report_shows_margins_and_the_result_chats(whole):
    from duoka.serve.load_run import find_trained, load_trained
    from duoka.watch.report import end_lines, write_report

    text = "\n".join(end_lines(whole))
    assert "margin" in text and "better answer ahead in" in text and "7 pairs" in text
    assert "Margin of rewards" in write_report(whole).read_text(encoding="utf-8")
    lm = load_trained(find_trained(str(whole.path), say=print), dtype=torch.float32)
    assert lm(input_ids=torch.arange(3, 20)[None]).logits.isfinite().all()


def test_duoka_eval_refuses_pairs_and_says_where_their_loss_is(whole):
    from duoka.errors import ConfigError
    from duoka.serve.evaluate import read_eval_data
    from duoka.serve.load_run import find_trained

    with pytest.raises(ConfigError, match="preference pairs"):
        read_eval_data(find_trained(str(whole.path), say=print), (), say=print)


def test_nothing_drops_beside_a_reference():
    from transformers import FalconConfig, FalconForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    from duoka.model.dropout import stop_dropout

    small = {"vocab_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16}
    models = [
        GPT2LMHeadModel(GPT2Config(vocab_size=32, n_layer=1, n_head=2, n_embd=16, n_positions=32)),
        LlamaForCausalLM(LlamaConfig(**small, intermediate_size=32, attention_dropout=0.5)),
        FalconForCausalLM(FalconConfig(**small, hidden_dropout=0.5)),  # whose layers read the share in the config
    ]
    ids = torch.arange(12)[None]
    for model in models:
        model.train()
        drops = [float((model(ids).logits - model(ids).logits).detach().abs().max())]
        stop_dropout(model)
        drops.append(float((model(ids).logits - model(ids).logits).detach().abs().max()))
        assert drops[0] > 1e-4 and drops[1] == 0.0, type(model).__name__
    assert models[2].config.hidden_dropout == 0.5, "what is saved says what the model came with"


@pytest.mark.parametrize("stage", ["{name: dpo, loss: simpo}", "{name: dpo, loss: sigmoid}", "{name: reward}"])
def test_a_models_own_dropout_is_off_where_answers_are_judged(case, stage):
    """As in TRL. What lora.dropout asks for stays, where nothing is compared with a reference."""
    from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel

    from duoka.config.schema import LoraConfig
    from duoka.model.lora import apply_lora
    from duoka.train.stages.stage import build_stage

    unread = ["stage.beta=null", "stage.sft_weight=null", "stage.sft_mean=null"]
    config = load_config(case / "run.yaml", [f"stage={stage}", *unread]).config
    scores = config.stage.kind.scores
    small = GPT2Config(vocab_size=32, n_layer=1, n_head=2, n_embd=16, n_positions=32, num_labels=1)
    base = (GPT2ForSequenceClassification if scores else GPT2LMHeadModel)(small)
    model = apply_lora(base, LoraConfig(rank=2, dropout=0.1), scores=scores)
    build_stage(config).wrap(model)
    shares = {"own": set(), "of adapters": set()}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Dropout):
            shares["of adapters" if ".lora_dropout." in name else "own"].add(module.p)
    assert shares == {"own": {0.0}, "of adapters": {0.0 if config.stage.has_reference else 0.1}}


def test_two_runs_may_keep_the_same_reference_at_once(tmp_path, monkeypatch):
    from duoka.train.reference import keep_reference, read_reference

    file, plain, others = tmp_path / "reference" / "abc.npy", np.save, []

    def save(out, values, **how):
        plain(out, values[: len(values) // 2], **how)  # half of it is there when the other run comes
        if not others:
            others.append(1)
            keep_reference(file, values)
            assert read_reference(file, len(values)) is not None
        out.seek(0)
        plain(out, values, **how)

    monkeypatch.setattr(np, "save", save)
    values = np.arange(10.0).reshape(5, 2)
    keep_reference(file, values)
    assert (read_reference(file, 5) == values).all() and [one.name for one in file.parent.iterdir()] == ["abc.npy"]


def test_half_precision_of_sharded_layers_has_a_reference_of_its_own(case):
    folder = case
    cache = fresh_cache(folder / "rounded")
    settings = ["lora=null", "train.precision=bf16", "train.max_steps=1", "data.eval=0", "optim.warmup=0"]
    yaml = str(folder / "run.yaml")
    train_all([(yaml, settings, str(folder / "half"), cache)], 1)
    train_all([(yaml, [*settings, "parallel.strategy=fsdp"], str(folder / "half, fsdp"), cache)], 2)
    for name in ("half", "half, fsdp"):
        (step,) = read_run(folder / name)
        assert step["drift"] < 1e-5 and abs(step["margin"]) < 1e-5, name
    assert len(list((folder / "rounded" / "reference").glob("*.npy"))) == 2
