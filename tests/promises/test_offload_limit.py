"""Promise: from a disk, a model trains to the same bits in 40% of the memory that its state would take."""

import itertools
import json
import os
import threading
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tiny import write_conversations, write_tiny_model
from worlds import run_world, train_jobs

pytestmark = pytest.mark.timeout(400)

YAML = """
model: {model}
data: {{train: [{data}], max_length: 128}}
optim: {{lr: 1e-3}}
train: {{max_steps: 2, global_batch: 4, precision: fp32, seed: 7, micro_batch: 2, recompute: full}}
checkpoint: {{every: 1, keep: 9}}
parallel: {{strategy: zero3, check_replicas: 0}}
log: {{to: []}}
output: {output}
"""
DISK = ["parallel.offload={params: disk}"]
HIDDEN, LAYERS = 320, 24


def own_bytes():
    """What this process has of its own: anonymous memory, and shared memory that is no file's."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * sum(int(lines[name].split()[0]) for name in ("RssAnon", "RssShmem"))


def watched(first, job, slices, results):
    """A first run has everything imported; then the most that the second one has of its own beside that."""
    import duoka.optim.disk

    rank = os.environ.get("RANK", "0")
    train_jobs([first])
    duoka.optim.disk.SLICE_BYTES = slices
    before, peak, done = own_bytes(), [0], threading.Event()

    def look():
        while not done.wait(0.005):
            peak[0] = max(peak[0], own_bytes())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        train_jobs([job])
    finally:
        done.set()
        thread.join()
    Path(f"{results}-{rank}.json").write_text(json.dumps({"peak_bytes": peak[0] - before}))


def compare(folder, hidden, layers, sizes, slices):
    """Runs without a disk and with it: (facts of each rank by name and number of processes, bytes of all state)."""
    data = write_conversations(folder / "chats.jsonl", 16, seed=3)
    model, small = write_tiny_model(folder / "model", hidden=hidden, layers=layers), write_tiny_model(folder / "small")
    yamls = {}
    for name, path in (("run", model), ("first", small)):
        yamls[name] = folder / f"{name}.yaml"
        yamls[name].write_text(YAML.format(model=path, data=data, output=folder / "out"), encoding="utf-8")
    state = 16 * sum(tensor.numel() for tensor in load_file(model / "model.safetensors").values())
    found = {}
    for size, (name, settings) in itertools.product(sizes, {"free": [], "limited": DISK}.items()):
        place = folder / f"{name}-{size}"
        first = (str(yamls["first"]), DISK, f"{place}-first")
        run_world(size, watched, first, (str(yamls["run"]), settings, str(place)), slices, str(place))
        found[name, size] = [json.loads(Path(f"{place}-{rank}.json").read_text()) for rank in range(size)]
    return found, state


def check(folder, found, state, sizes):
    for size in sizes:
        assert all(one["peak_bytes"] > state / size for one in found["free", size]), "without the disk it takes more"
        for facts in found["limited", size]:
            # The most is when the final model is gathered: a fourth of the state.
            assert 2.5 * facts["peak_bytes"] <= state, f"{facts['peak_bytes']:,} of its own for a state of {state:,}"
        plan = json.loads((folder / f"limited-{size}" / "plan.json").read_text())["memory"]
        planned = plan["high_bytes"] - plan["parts"]["framework"]
        assert max(one["peak_bytes"] for one in found["limited", size]) < planned, "above the plan's figure"
        runs = [folder / f"{name}-{size}" for name in ("free", "limited")]
        losses = []
        for run in runs:
            lines = (run / "events" / "run.jsonl").read_text(encoding="utf-8").splitlines()
            steps = [one for one in map(json.loads, lines) if one["type"] == "step"]
            losses.append([(step["loss"], step["grad_norm"]) for step in steps])
        assert losses[0] == losses[1] and len(losses[0]) == 2
        plain, limited = (load_file(run / "final" / "model.safetensors") for run in runs)
        assert [name for name in plain if not plain[name].equal(limited[name])] == []


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux how much memory a process has")
def test_a_model_trains_in_two_fifths_of_its_states_memory_to_the_same_bits(tmp_path):
    found, state = compare(tmp_path, HIDDEN, LAYERS, (1,), 2**20)
    print({f"{name} {size}": facts for (name, size), facts in found.items()}, f"{state:,}")
    check(tmp_path, found, state, (1,))


@pytest.mark.nightly
@pytest.mark.timeout(1500)
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux how much memory a process has")
def test_a_larger_one_does_on_two_processes_too(tmp_path):
    found, state = compare(tmp_path, 640, 24, (1, 2), 8 * 2**20)
    print({f"{name} {size}": facts for (name, size), facts in found.items()}, f"{state:,}")
    check(tmp_path, found, state, (1, 2))
