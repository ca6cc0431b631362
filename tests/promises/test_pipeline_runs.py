"""Runs of `duoka train` with stages: as one process trains, through checkpoints of other layouts, stops and a death."""

import json
import signal

import pytest
from safetensors.torch import load_file
from struck import WITHIN_S, finish, start
from tiny import write_conversations, write_tiny_model
from worlds import train_all

from duoka.cluster.fault_injection import strike, wait_for_ranks
from duoka.runs.folder import RunFolder
from duoka.runs.status import read_status

YAML = """
model: {model}
data: {{train: [{data}], eval: 0.2, max_length: 256}}
optim: {{lr: 2e-3, warmup: 2, clip: 0.5}}
train: {{epochs: 2, global_batch: 8, precision: fp32, seed: 11, eval_every: 4, micro_batch: "256 tokens"}}
checkpoint: {{every: 2, keep: 100}}
parallel: {{check_replicas: 2}}
log: {{to: []}}
output: {output}
"""
PIPELINE = "parallel.pipeline=2"
LORA = "lora={rank: 4}"
MUON = ["optim.name=muon", "optim.lr=0.02", "optim.adamw_lr=2e-3", "train.epochs=1"]
HALF = [LORA, "train.precision=bf16", "train.epochs=1"]  # hidden states travel in bf16, as the frozen base is


def write_run(folder, model, conversations=40):
    data = write_conversations(folder / "chats.jsonl", conversations, seed=3)
    yaml = folder / "run.yaml"
    yaml.write_text(YAML.format(model=model, data=data, output=folder / "out"), encoding="utf-8")
    return yaml


def events_of(folder):
    return [json.loads(line) for line in (folder / "events" / "run.jsonl").read_text(encoding="utf-8").splitlines()]


def numbers_of(folder):
    events = events_of(folder)
    steps = {line["step"]: (line["loss"], line["grad_norm"], line["lr"]) for line in events if line["type"] == "step"}
    evals = {line["step"]: (line["loss"], line["accuracy"]) for line in events if line["type"] == "eval"}
    return steps, evals


def assert_same_run(folder, whole, file="model.safetensors"):
    for mine, theirs in zip(numbers_of(folder), numbers_of(whole), strict=True):
        assert mine, "steps and evaluations are there"
        for step, numbers in mine.items():
            assert numbers == pytest.approx(theirs[step], rel=3e-5), f"{folder.name}, step {step}"
    ours, theirs = (load_file(path / "final" / file) for path in (folder, whole))
    assert ours.keys() == theirs.keys()
    for name, wanted in theirs.items():
        assert float((ours[name] - wanted).norm() / wanted.norm()) < 1e-5, name


@pytest.mark.timeout(400)
def test_checkpoints_go_from_one_process_to_stages_to_replicas_and_back(tmp_path, deep_model):
    yaml = write_run(tmp_path, deep_model)
    whole, runs = tmp_path / "whole", {}
    own_head = [f"model={write_tiny_model(tmp_path / 'own', tied=False, layers=4)}"]  # one stage alone has it
    alone = [("whole", []), ("lora", [LORA]), ("muon", MUON), ("half", HALF), ("head", own_head)]
    train_all([(str(yaml), how, str(tmp_path / name)) for name, how in alone], 1)
    last = max(numbers_of(whole)[0])
    assert last == 8
    before = whole
    plan = [("staged", 2, [PIPELINE]), ("copies", 4, ["parallel.strategy=ddp"])]
    plan += [("again", 6, [PIPELINE, "parallel.schedule=interleaved", "train.recompute=full"])]
    for name, step, how in plan:
        resume = f"checkpoint.resume={before}/checkpoints/step-{step:08d}"
        runs[name] = (str(yaml), [*how, resume], str(tmp_path / name))
        before = tmp_path / name
    others = [("lora-staged", [LORA, "parallel.schedule=gpipe"]), ("muon-staged", MUON), ("half-staged", HALF)]
    others += [("head-staged", own_head)]
    staged = [(str(yaml), [PIPELINE, *how], str(tmp_path / name)) for name, how in others]
    train_all([*runs.values(), *staged], 2)
    for name, step, _ in plan:
        assert min(numbers_of(tmp_path / name)[0]) == step + 1
        assert_same_run(tmp_path / name, whole)
    assert_same_run(tmp_path / "lora-staged", tmp_path / "lora", "adapter_model.safetensors")
    assert_same_run(tmp_path / "muon-staged", tmp_path / "muon")
    assert_same_run(tmp_path / "head-staged", tmp_path / "head")
    ours, theirs = (numbers_of(tmp_path / name)[0] for name in ("half-staged", "half"))
    assert all(ours[step] == pytest.approx(theirs[step], rel=1e-2) for step in theirs)


@pytest.mark.timeout(500)
def test_a_typed_run_of_stages_stops_and_goes_on_and_names_a_dead_rank(tmp_path, deep_model):
    yaml = write_run(tmp_path, deep_model, 80)
    run = RunFolder(tmp_path / "run")
    longer = (PIPELINE, "train.epochs=10")
    process = start(yaml, run.path, *longer)
    try:
        wait_for_ranks(run, 2, lambda beat: beat.step >= 3, within_s=WITHIN_S)
        process.send_signal(signal.SIGTERM)
        code, output = finish(process)
    finally:
        process.kill()
    assert code == 75 and "Traceback" not in output, output
    stopped_at = read_status(run).step
    assert "one model over 2 processes" in output and stopped_at >= 3
    process = start(yaml, run.path, *longer, "--restarts", "0")
    try:
        ranks = wait_for_ranks(run, 2, lambda beat: beat.step >= stopped_at + 3, within_s=WITHIN_S)
        strike([ranks[1]], "SIGKILL")
        code, output = finish(process)
    finally:
        process.kill()
    assert code == 5 and f"going on from step-{stopped_at:08d}" in output, output
    assert "rank 1" in output and "SIGKILL" in output, output
