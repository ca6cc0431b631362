"""Stage rl beside a server that draws: it has each step's weights, and is weighed where it computes otherwise."""

import json
import math

import pytest
from commands import run_duoka
from engine_stand_in import StandIn, serving
from test_any_split import read_run
from tiny import write_tiny_model
from worlds import train_all

pytestmark = pytest.mark.timeout(300)

YAML = """
model: {model}
stage: rl
data: {{train: [task:sort], max_length: 96}}
rl: {{algorithm: grpo, samples: 3, max_new_tokens: 10, temperature: 1.3, rewards: ["{file}:letters"]}}
optim: {{lr: 1e-2}}
train: {{max_steps: 3, global_batch: 2, precision: fp32, seed: 7}}
checkpoint: {{every: 100}}
log: {{to: []}}
output: {output}
"""
LORA = "lora={rank: 3, dropout: 0}"
# name -> (processes, kind, settings)
RUNS = {
    "vllm": (1, "vllm", []),
    "vllm, LoRA": (1, "vllm", [LORA]),
    "sglang, fsdp": (2, "sglang", ["parallel.strategy=fsdp"]),
    "sglang, LoRA": (2, "sglang", [LORA, "parallel.strategy=ddp"]),
}


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    folder = tmp_path_factory.mktemp("outside")
    model = write_tiny_model(folder / "model")
    text = "def letters(messages, completion, example):\n    return sum(map(ord, completion)) % 7 / 7\n"
    (folder / "mine.py").write_text(text)
    yaml = folder / "run.yaml"
    yaml.write_text(YAML.format(model=model, file="mine.py", output=folder / "out"), encoding="utf-8")
    return folder, yaml


@pytest.fixture(scope="module")
def servers(case):
    """After all runs, each with a server of its own."""
    folder, yaml = case
    found = {}
    for name, (size, kind, settings) in RUNS.items():
        found[name] = StandIn(folder / "model")
        with serving(found[name]) as url:
            train_all([(str(yaml), [f"rl.engine={kind}:{url}", *settings], str(folder / name))], size)
    found["stale"] = StandIn(folder / "model", is_stale=True)
    with serving(found["stale"]) as url:
        train_all(
            [(str(yaml), [f"rl.engine=vllm:{url}", "rl.updates=2", "rl.importance=1.05"], str(folder / "stale"))], 1
        )
    return found


def lines_of(folder, number):
    text = (folder / "rollouts" / f"step-{number:08d}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()[1:]]


@pytest.mark.parametrize("name", RUNS)
def test_each_step_is_drawn_by_its_own_weights(case, servers, name):
    run = case[0] / name
    steps = read_run(run)
    assert len(steps) == 3
    for number, step in enumerate(steps):
        assert step["logp_gap"] < 1e-5 and abs(step["importance"] - 1) < 1e-5
        versions = {one["version"] for one in lines_of(run, number)}
        assert len(versions) == 1 and versions.pop().startswith(f"step-{number:08d}-")
    assert not (run / "engine").exists(), "weights that a server was given are not left behind"
    assert all(count <= 2 for count in servers[name].seen), "nor kept once it has others"
    asked = servers[name].asked
    loads = sum("load_lora" in path or path in ("/collective_rpc", "/update_weights_from_disk") for path in asked)
    assert loads == (5 if "LoRA" in name else 3), "three, and with adapters two that were given back"
    assert len(asked) >= loads + 18 and len(servers[name].adapters) == (1 if "LoRA" in name else 0)


def test_tokens_of_older_weights_are_weighed_by_the_truncated_ratio(case, servers):
    first, _, third = read_run(case[0] / "stale")
    assert first["logp_gap"] < 1e-5 < 1e-2 < third["logp_gap"]
    found = lines_of(case[0] / "stale", 1)
    weights = [
        min(math.exp(old - drawn), 1.05) for one in found for old, drawn in zip(one["old"], one["drawn"], strict=True)
    ]
    assert abs(third["importance"] - sum(weights) / len(weights)) < 1e-6 and 1.05 in weights and min(weights) < 0.99


def test_what_is_wrong_with_a_server_is_said_at_once(case, tmp_path, monkeypatch):
    folder, yaml = case
    gone = run_duoka("train", str(yaml), f"output={tmp_path / 'a'}", "rl.engine=vllm:http://127.0.0.1:9", cwd=folder)
    assert gone.returncode == 2 and "Connection refused" in gone.stderr and "vllm serve MODEL" in gone.stderr
    assert "Traceback" not in gone.stderr
    monkeypatch.setenv("DUOKA_ENGINE_TOKEN", "wrong-one")
    with serving(StandIn(folder / "model", token="right-one")) as url:
        locked = run_duoka("train", str(yaml), f"output={tmp_path / 'b'}", f"rl.engine=sglang:{url}", cwd=folder)
    assert locked.returncode == 2 and "refused (401)" in locked.stderr and "-one" not in locked.stderr
    other = StandIn(write_tiny_model(tmp_path / "other", seed=5), is_stale=True)
    with serving(other) as url:
        wrong = run_duoka("train", str(yaml), f"output={tmp_path / 'c'}", f"rl.engine=vllm:{url}", cwd=folder)
    assert wrong.returncode == 2 and "answers with another model" in wrong.stderr, wrong.stderr
    with serving(StandIn(folder / "model", is_stale=True, says_so=True)) as url:
        old = run_duoka("train", str(yaml), f"output={tmp_path / 'd'}", f"rl.engine=sglang:{url}", cwd=folder)
    assert old.returncode == 2 and "drawn by weights 'default'" in old.stderr, old.stderr


def test_answers_that_are_none_are_refused_and_never_learned(case, tmp_path):
    folder, yaml = case
    said = {
        "answer": "an answer ended with 'abort' after 0 tokens",
        "number": "its answer is none of vLLM's: TypeError",
        "vocabulary": "an answer has a token that this model of ",
        "end": "an answer lacks the token that ended it",
    }
    for name, words in said.items():
        with serving(StandIn(folder / "model", drops=name)) as url:
            done = run_duoka("train", str(yaml), f"output={tmp_path / name}", f"rl.engine=vllm:{url}", cwd=folder)
        assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr, (name, done.stderr)
