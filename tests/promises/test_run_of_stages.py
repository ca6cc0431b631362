"""A pipeline of real stages: run once, kept after, only what changed is run again, and a kill costs nothing."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import run_duoka
from safetensors.torch import load_file
from tiny import write_conversations, write_tiny_model

pytestmark = pytest.mark.timeout(550)
TEXT = """
data: {max_length: 256}
train: {global_batch: 8, precision: fp32, max_steps: 2}
log: {to: []}
checkpoint: {every: 1}
pipeline:
  mid: {stage: mid, model: {name: model}, data: {train: [talk.jsonl]}}
  sft: {data: {train: [chat.jsonl]}, lora: {rank: 2}}
  score: {eval: [sort], of: [mid, sft], limit: 4}
  ship: {export: model, of: sft, when: score.sft.sort >= 0}
  ask: {chat: ["Who are you?", "2 | 3"], of: [sft, ship]}
  never: {export: model, of: mid, when: score.sft.sort > 0.99}
output: out
"""


def make(folder):
    folder.mkdir()
    write_tiny_model(folder / "model", tied=False, layers=2)
    write_conversations(folder / "talk.jsonl", 20)
    write_conversations(folder / "chat.jsonl", 20, seed=1)
    (folder / "p.yaml").write_text(TEXT, encoding="utf-8")
    return folder


def stages_of(folder):
    return json.loads((folder / "out" / "pipeline.json").read_text(encoding="utf-8"))["stages"]


def test_stages_run_once_and_are_kept_after(tmp_path):
    place = make(tmp_path / "a")
    done = run_duoka("run", "p.yaml", cwd=place)
    assert done.returncode == 0, done.stderr
    stages = stages_of(place)
    assert {name: one["state"] for name, one in stages.items()} == {
        "mid": "done", "sft": "done", "score": "done", "ship": "done", "ask": "done",
        "never": "skipped",
    }  # fmt: skip
    ran = [one for one in stages.values() if one["state"] == "done"]
    assert all(one["seconds"] > 0 and one["cpu_seconds"] > 0 for one in ran), "what each of them took"
    assert "gate: score.sft.sort (0.000 ± 0.000, n 4) >= 0: yes" in done.stderr
    assert (place / "out" / stages["ship"]["folder"] / "model.safetensors").is_file()
    ready = f"duoka chat {Path('out', stages['ship']['folder'])}\n"
    assert ready in done.stderr and ".draft" not in done.stdout + done.stderr, "names that are still there afterwards"
    card = (place / "out" / "card.md").read_text(encoding="utf-8")
    asked = json.loads((place / "out" / stages["ask"]["folder"] / "result.json").read_text(encoding="utf-8"))
    assert set(asked) == {"sft", "ship"} and set(asked["ship"]) == {"Who are you?", "2 | 3"}
    told = run_duoka("chat", "out", "--prompt", "Who are you?", "--max-new-tokens", "96", cwd=place)
    assert told.stdout.strip() == asked["sft"]["Who are you?"].strip(), (
        "chat of the folder is the last stage that trained"
    )
    assert "| Who are you?" in card and "2 \\| 3" in card
    assert "| mid" in card and "| sort" in card and "(n 4)" in card and card.strip() in done.stdout
    before = {path: path.stat().st_mtime_ns for path in (place / "out").glob("*-*/**/*") if path.is_file()}

    again = run_duoka("run", "p.yaml", cwd=place)
    assert again.returncode == 0 and again.stderr.count("kept (") == 5, again.stderr
    assert before == {path: path.stat().st_mtime_ns for path in (place / "out").glob("*-*/**/*") if path.is_file()}


@pytest.mark.nightly
def test_only_what_changed_is_run_again_and_a_stage_runs_alone(tmp_path):
    place = make(tmp_path / "a")
    assert run_duoka("run", "p.yaml", "--until", "sft", cwd=place).returncode == 0
    stages = stages_of(place)
    changed = run_duoka("run", "p.yaml", "--until", "sft", "sft.optim.lr=1e-3", cwd=place)
    assert changed.returncode == 0, changed.stderr
    assert "mid: kept" in changed.stderr and "sft: runs: changed: optim.lr 2.0e-05 -> 0.001" in changed.stderr
    assert (place / "out" / stages["sft"]["folder"] / "final").is_dir(), "what was there stays"
    alone = next((place / "out" / "stages").glob("mid-*.yaml"))
    single = run_duoka("train", str(alone), f"output={place}/alone", cwd=place)
    assert single.returncode == 0, single.stderr
    theirs = load_file(place / "out" / stages["mid"]["folder"] / "final" / "model.safetensors")
    own = load_file(place / "alone" / "final" / "model.safetensors")
    assert all((own[name] == theirs[name]).all() for name in theirs)


@pytest.mark.nightly
@pytest.mark.parametrize("moment", ["mid-", "sft-", "score-"])
def test_a_kill_in_any_stage_costs_nothing(tmp_path, moment):
    """SIGKILL of `duoka run` once the stage's folder is there; its command and ranks end with it."""
    whole, struck = make(tmp_path / "whole"), make(tmp_path / "struck")
    assert run_duoka("run", "p.yaml", cwd=whole).returncode == 0
    process = subprocess.Popen([sys.executable, "-m", "duoka", "run", "p.yaml"], cwd=struck, start_new_session=True)
    deadline = time.monotonic() + 200
    while not list((struck / "out").glob(f"{moment}*")) and time.monotonic() < deadline:
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    time.sleep(8)  # its children hear of it
    done = run_duoka("run", "p.yaml", cwd=struck)
    assert done.returncode == 0, done.stderr
    for folder in {one["folder"] for name, one in stages_of(whole).items() if name in ("mid", "ship")}:
        files = [Path("out") / folder / part / "model.safetensors" for part in ("final", ".")]
        own = next(file for file in files if (whole / file).is_file())
        first, second = load_file(whole / own), load_file(struck / own)
        assert all((first[name] == second[name]).all() for name in first)
