"""A run over labeled answers from end to end: resuming, evaluation, pairs split in two, other tools' files, metrics."""

import json
import shutil
from importlib.util import find_spec

import pytest
import torch
from needs import need_deepspeed
from safetensors.torch import load_file
from test_any_split import read_run
from tiny import write_labeled, write_pairs, write_tiny_model
from worlds import fresh_cache, train_all

pytestmark = pytest.mark.timeout(300)

YAML = """
model: {model}
stage: {{name: kto, beta: 0.2, undesirable_weight: 1.5}}
data: {{train: [{data}], eval: 0.3, max_length: 128}}
lora: {{rank: 4}}
optim: {{lr: 5e-3, warmup: 2}}
train: {{epochs: 2, global_batch: 4, micro_batch: "150 tokens", precision: fp32, seed: 11}}
checkpoint: {{every: 2, keep: 10}}
log: {{to: []}}
output: {output}
"""
LLAMAFACTORY = """
model_name_or_path: {model}
stage: kto
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
lora_dropout: 0.1
pref_beta: 0.2
kto_chosen_weight: 1.2
kto_rejected_weight: 0.9
dataset: labeled
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
WHOLE, AGAIN, TWO, THEIRS, TRIED, SPLIT = "whole", "again", "two", "theirs", "rehearsed", "split"
FULL, DEEP = "full", "deepspeed"
BY_DEEPSPEED = ("parallel.engine=deepspeed", "train.recompute=selective", "data.packing=false", "train.micro_batch=2")
NUMBERS = ("loss", "kl", "reward_chosen", "reward_rejected", "logp_chosen", "logp_rejected", "accuracy", "drift")


def events_of(folder, kind):
    lines = (folder / "events" / "run.jsonl").read_text(encoding="utf-8").splitlines()
    return [event for line in lines if (event := json.loads(line))["type"] == kind]


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    folder = tmp_path_factory.mktemp("labeled-run")
    model = write_tiny_model(folder / "model", layers=2)
    data = write_labeled(folder / "labeled.jsonl", 24, seed=4)
    yaml = folder / "run.yaml"
    yaml.write_text(YAML.format(model=model, data=data, output=folder / "out"), encoding="utf-8")
    # As LLaMA-Factory's own example set has it (kto_en_demo): messages, and a label column that the registry names.
    records = [
        {
            "messages": [
                {"role": "user", "content": one["prompt"]},
                {"role": "assistant", "content": one["completion"]},
            ],
            "label": one["label"],
        }
        for one in map(json.loads, data.read_text(encoding="utf-8").splitlines())
    ]
    (folder / "kto.json").write_text(json.dumps(records), encoding="utf-8")
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    columns = {"messages": "messages", "kto_tag": "label"}
    info = {"labeled": {"file_name": "kto.json", "formatting": "sharegpt", "columns": columns, "tags": tags}}
    (folder / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")
    theirs = folder / "theirs.yaml"
    theirs.write_text(LLAMAFACTORY.format(model=model, folder=folder), encoding="utf-8")
    pairs = write_pairs(folder / "pairs.jsonl", 7, seed=5)
    cache = fresh_cache(folder / "cache")
    few = ["data.eval=0", "train.max_steps=3"]
    train_all([
        (str(yaml), [], str(folder / WHOLE), cache),
        (str(theirs), [], str(folder / THEIRS), cache),
        (str(yaml), [f"data.train=[{pairs}]", *few], str(folder / SPLIT), cache),
    ], 1)  # fmt: skip
    resumed = folder / AGAIN
    (resumed / "checkpoints").mkdir(parents=True)
    shutil.copytree(folder / WHOLE / "checkpoints" / "step-00000004", resumed / "checkpoints" / "step-00000004")
    train_all([
        # With another cache: the reference is computed again, from the start's weights and not the checkpoint's.
        (str(yaml), [], str(resumed), fresh_cache(folder / "elsewhere")),
        (str(yaml), ["train.rehearse=true", "train.max_steps=3"], str(folder / TRIED), cache),
    ], 1)  # fmt: skip
    jobs = [(str(yaml), ["parallel.strategy=fsdp"], str(folder / TWO), cache)]
    if find_spec("deepspeed"):
        full = ["parallel.strategy=zero3", "lora=null", "data.eval=0", "train.max_steps=3"]
        jobs.append((str(yaml), full, str(folder / FULL), cache))
        jobs.append((str(yaml), [*full, *BY_DEEPSPEED], str(folder / DEEP), fresh_cache(folder / "deep")))
    train_all(jobs, 2)
    return folder


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(case):
    def numbers(name):
        return [(one["step"], one["loss"], one["kl"], one["grad_norm"]) for one in read_run(case / name)]

    assert numbers(AGAIN) == numbers(WHOLE)[4:] and len(numbers(AGAIN)) == len(numbers(WHOLE)) - 4 > 2
    ours, theirs = (load_file(case / name / "final" / "adapter_model.safetensors") for name in (AGAIN, WHOLE))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_evaluations_are_one_batch_and_the_same_on_two_processes(case):
    one, two = (events_of(case / name, "eval") for name in (WHOLE, TWO))
    assert len(one) == len(two) >= 1
    for ours, theirs in zip(one, two, strict=True):
        assert ours["num_samples"] == theirs["num_samples"] == 7 and ours["perplexity"] is None
        for key in NUMBERS:
            assert abs(ours[key] - theirs[key]) < 1e-5 * abs(theirs[key]) + 1e-6, key
    assert one[-1]["reward_chosen"] > one[-1]["reward_rejected"], "good answers have words of their own"
    first = read_run(case / WHOLE)[0]
    assert first["drift"] < 1e-6 and abs(first["kl"]) < 1e-6


def test_deepspeed_computes_layers_again_behind_a_pass_of_the_reference(case):
    """It lets go of weights at other places then than in the first pass of a step, and torch refused to compute on."""
    need_deepspeed()
    keys = ("loss", "kl", "grad_norm")
    ours, theirs = ([[step[key] for key in keys] for step in read_run(case / name)] for name in (FULL, DEEP))
    assert theirs == [pytest.approx(step, rel=1e-4, abs=1e-5) for step in ours]


def test_a_rehearsal_changes_no_number(case):
    assert [one["loss"] for one in read_run(case / TRIED)] == [one["loss"] for one in read_run(case / WHOLE)[:3]]


def test_a_file_of_llamafactory_runs_as_it_stands(case):
    steps = read_run(case / THEIRS)
    assert len(steps) == 6 and 0.45 <= steps[0]["loss"] <= 0.6
    assert steps[0]["loss"] in [pytest.approx((1.2 * good + 0.9 * (4 - good)) / 8) for good in range(5)]
    assert steps[-1]["reward_chosen"] > steps[-1]["reward_rejected"]
    facts = json.loads((case / THEIRS / "final" / "adapter_config.json").read_text(encoding="utf-8"))
    assert facts["lora_dropout"] == 0 and facts["r"] == 8


def test_pairs_are_split_in_two(case):
    steps = read_run(case / SPLIT)
    assert [step["num_samples"] for step in steps] == [4, 4, 4]
    assert steps[0]["loss"] in [pytest.approx((1.0 * good + 1.5 * (4 - good)) / 8) for good in range(5)]


def test_who_stands_in_for_whom_is_fixed_by_the_data(case):
    from duoka.config.load import load_config
    from duoka.data.prepare import prepare_data

    lines = [json.loads(line) for line in (case / "labeled.jsonl").read_text(encoding="utf-8").splitlines()]
    loaded = load_config(case / "run.yaml", ["data.eval=0"])
    rows = prepare_data(loaded.config, case, case / "model").train
    assert len(rows) == len(lines) and rows.is_good.tolist() == [one["label"] for one in lines]
    asked = [one["prompt"] for one in lines]
    for place, partner in enumerate(rows.partners.tolist()):
        between = [asked[(place + step) % 24] for step in range(1, (partner - place) % 24)]
        assert asked[partner] != asked[place] and set(between) <= {asked[place], asked[partner]}
    assert rows.partners.tolist()[-1:] + rows.partners.tolist()[:4] == [1, 2, 3, 3, 4], "0 and 23 have one prompt"
    pairs = load_config(case / "run.yaml", [f"data.train=[{case / 'pairs.jsonl'}]", "data.eval=0"])
    prepared = prepare_data(pairs.config, case, case / "model")
    assert len(prepared.train) == 14 and prepared.report.num_good == 7
    assert any("split in two" in note for note in prepared.report.notes)
    partners = prepared.train.partners
    assert partners.tolist()[:4] == [2, 3, 4, 5] and partners.tolist()[-2:] == [0, 1]
    assert prepared.train.is_good[partners].mean() == 0.5, "z0 of good answers alone would move with the goal"


def test_answers_to_one_prompt_alone_are_refused(case):
    from duoka.config.load import load_config
    from duoka.data.prepare import prepare_data
    from duoka.errors import DataError

    file = case / "one.jsonl"
    answers = [{"prompt": "cat", "completion": word, "label": word != "ring"} for word in ("sum", "ring", "dog")]
    file.write_text("\n".join(map(json.dumps, answers)), encoding="utf-8")
    loaded = load_config(case / "run.yaml", [f"data.train=[{file}]", "data.eval=0"])
    with pytest.raises(DataError, match="one prompt") as found:
        prepare_data(loaded.config, case, case / "model")
    assert "stage: dpo" in found.value.fix
    # A small share held out of many prompts may be of one alone: that is said of data.eval, and of no other.
    loaded = load_config(case / "run.yaml", ["data.eval=0.02"])
    with pytest.raises(DataError, match=r"of data\.eval are to one prompt") as found:
        prepare_data(loaded.config, case, case / "model")
    assert "eval: 0" in found.value.fix and "held out" in found.value.where


def test_the_report_shows_rewards_and_duoka_eval_refuses_labels(case):
    from duoka.config.load import load_config, resolved_yaml
    from duoka.errors import ConfigError
    from duoka.runs.folder import RunFolder
    from duoka.serve.evaluate import read_eval_data
    from duoka.serve.load_run import find_trained
    from duoka.watch.report import end_lines, write_report

    run = RunFolder(case / WHOLE)
    run.config.write_text(resolved_yaml(load_config(case / "run.yaml")), encoding="utf-8")
    text = "\n".join(end_lines(run))
    assert "good " in text and "z0 " in text and "7 answers" in text
    assert "Answers on their side of z0" in write_report(run).read_text(encoding="utf-8")
    with pytest.raises(ConfigError, match="labeled answers"):
        read_eval_data(find_trained(str(run.path), say=print), (), say=print)
