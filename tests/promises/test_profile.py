"""`duoka profile` says where a step's time goes: rows that add up, a trace a viewer reads, and no run left behind."""

import gzip
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from commands import run_duoka
from tiny import write_conversations

from duoka.cli import run
from duoka.cli.profile import advice
from duoka.train.profile import StepProfile

pytestmark = pytest.mark.timeout(240)


PHASES = {"data": 0.01, "forward": 0.4, "backward": 0.5, "wait": 0.05, "optimizer": 0.04}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, "nothing stands out"),
        ({"wait": 0.6}, "ranks wait for each other in 39% of a step"),
        ({"data": 0.3}, "batches come late (23%)"),
    ],
)
def test_advice_follows_the_bottleneck(changed, words):
    phases = {**PHASES, **changed}
    found = StepProfile(3, 2, "ddp2", "cpu", 8, 4096, 1, sum(phases.values()), 1.2, phases, (), (), "trace")
    assert advice(found)[0].startswith(words)


def test_a_gpu_with_few_tokens_is_told_so():
    found = StepProfile(3, 2, "ddp2", "cuda", 8, 1600, 4, 1.0, 1.2, PHASES, (), (), "trace")
    assert advice(found)[0].startswith("200 tokens a micro-batch")


def test_a_gpu_that_waits_for_its_host_is_told_so():
    found = StepProfile(3, 1, "single", "cuda", 8, 160000, 4, 1.0, 1.2, PHASES, (), (), "trace", busy_share=0.35)
    assert advice(found)[0].startswith("the GPU is idle for 65% of a step")
    assert "idle" not in advice(replace(found, busy_share=0.97))[0]


@pytest.fixture
def yaml(tmp_path, tiny_model):
    data = write_conversations(tmp_path / "chats.jsonl", 40)
    path = tmp_path / "run.yaml"
    text = f"model: {tiny_model}\ndata: {{train: [{data}], packing: false}}\nlora: {{rank: 4}}\n"
    path.write_text(f"{text}train: {{global_batch: 4, micro_batch: 2, epochs: 1}}\noutput: {tmp_path}/runs/a\n")
    return path


def test_a_profile_that_is_stopped_leaves_no_empty_folder(yaml, tmp_path, monkeypatch):
    monkeypatch.setattr("duoka.cli.worlds.run_same_command", lambda *given: 130)
    words = ["profile", str(yaml), "--nproc", "2", "--out", str(tmp_path / "out")]
    assert run(words) == 130 and not (tmp_path / "out").exists()


def profile(yaml, *arguments):
    done = run_duoka("profile", yaml, "--steps", "2", *arguments, timeout=200)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def test_rows_add_up_and_the_trace_can_be_read(yaml, tmp_path):
    found = json.loads(profile(yaml, "--json"))
    assert found["num_steps"] == 2 and found["num_samples"] == 4 and found["num_micro_batches"] == 2
    assert sum(found["phases"].values()) <= found["step_s"] * 1.01
    assert sum(row["share"] for row in found["operators"]) == pytest.approx(1)
    modules = {row["name"]: row for row in found["modules"]}
    assert {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm", "embedding"} <= set(modules)
    # Two layers, two micro-batches a step; what they call is inside.
    assert modules["self_attn"]["calls"] == modules["mlp"]["calls"] == 4 and modules["embedding"]["calls"] == 2
    forward_ms = sum(row["seconds"] for row in found["modules"])
    assert 0 < forward_ms < found["profiled_step_s"]
    names = {row["name"] for row in found["operators"]}
    assert any("mm" in name for name in names), names
    folder = tmp_path / "runs" / "a-profile"
    with gzip.open(folder / "trace-rank00000.json.gz") as file:
        events = json.load(file)["traceEvents"]
    assert sum(event.get("name") == "forward pass" for event in events) >= 4
    assert json.loads((folder / "profile.json").read_text()) == found
    assert sorted(path.name for path in folder.iterdir()) == ["profile.json", "trace-rank00000.json.gz"]
    assert not (tmp_path / "runs" / "a").exists(), "no run is begun"


def test_updates_on_the_same_answers_are_profiled_with_their_drawing(tmp_path, tiny_model):
    rewards, path = tmp_path / "rewards.py", tmp_path / "rl.yaml"
    rewards.write_text("def length(messages, completion, example):\n    return float(len(completion))\n", "utf-8")
    path.write_text(
        f"model: {tiny_model}\nstage: rl\ndata: {{train: [task:sort], max_length: 96}}\n"
        f"rl: {{algorithm: grpo, samples: 2, max_new_tokens: 8, updates: 3, rewards: [{rewards}:length]}}\n"
        f"train: {{global_batch: 2, max_steps: 4, precision: fp32}}\noutput: {tmp_path}/runs/a\n",
        "utf-8",
    )
    parts = []
    for _ in range(3):  # on a busy machine a process may stand still between two parts
        found = json.loads(profile(path, "--json"))
        assert found["num_samples"] == 4 and found["phases"]["rollouts"] > 0 and "data" not in found["phases"]
        parts.append(sum(found["phases"].values()) / found["step_s"])
        if parts[-1] == pytest.approx(1, rel=0.2):
            return
    raise AssertionError(f"what a step waits for is a part: {parts} of it are known")


def test_two_ranks_leave_two_traces_and_one_page(yaml, tmp_path):
    # Fewer steps in an epoch than are taken, and fewer of these than the warm-up has.
    out = profile(yaml, "train.global_batch=20", "optim.warmup=100", "--nproc", "2", "--out", str(tmp_path / "seen"))
    assert out.count("2 ranks, ddp2") == out.count("  change  ") == out.count("tokens/s") == 1, out
    assert "wait" in out and "self_attn" in out
    names = sorted(path.name for path in (tmp_path / "seen").iterdir())
    assert names == ["profile.json", "trace-rank00000.json.gz", "trace-rank00001.json.gz"]


def test_a_gpus_kernels_are_counted_once():
    """torch tells them by themselves, and as their operators' time; ranges of modules come from host and GPU."""
    from torch.autograd import DeviceType

    from duoka.train.profile import rows_of

    def event(key, on_gpu, device_us, own_us):
        kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
        return SimpleNamespace(
            key=key, device_type=kind, device_time_total=device_us, self_device_time_total=own_us, count=2,
            cpu_time_total=7.0, self_cpu_time_total=7.0, is_user_annotation="#" in key,
        )  # fmt: skip

    events = [
        event("aten::mm", False, 60.0, 60.0), event("nvjet_kernel", True, 60.0, 60.0),
        event("aten::linear", False, 60.0, 0.0), event("Command Buffer Full", True, 99.0, 99.0),
        event("Optimizer.step#AdamW.step", False, 5.0, 5.0), event("fused_adamw", True, 5.0, 5.0),
        event("module: mlp", False, 80.0, 0.0), event("module: mlp", True, 70.0, 70.0),
    ]  # fmt: skip
    modules, operators = rows_of(events, 1, on_gpu=True)
    assert [(row.name, row.seconds) for row in modules] == [("mlp", pytest.approx(70e-6))]
    assert [(row.name, row.share) for row in operators] == [("aten::mm", 1.0), ("aten::linear", 0.0)]
    modules, operators = rows_of(events[::2], 1, on_gpu=False)
    assert [row.name for row in modules] == ["mlp"] and len(operators) == 3
