"""Promise: a model with three times the state that a process has memory for trains from a disk, to the same bits."""

import json
import os
import resource
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
HIDDEN, LAYERS = 384, 20


def own_bytes():
    """What this process has of its own: anonymous memory, and shared memory that is no file's."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * sum(int(lines[name].split()[0]) for name in ("RssAnon", "RssShmem"))


def writable_bytes():
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(lines["VmData"].split()[0])


def under_a_limit(first, job, limit_bytes, slices, results):
    """A first run has everything imported and its threads; then memory of one's own may grow by the limit only."""
    import duoka.optim.disk
    from duoka.errors import DuokaError

    rank = os.environ.get("RANK", "0")
    threading.stack_size(2**18)  # what a thread may use counts against the limit, touched or not
    train_jobs([first])
    duoka.optim.disk.SLICE_BYTES = slices
    if limit_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (writable_bytes() + limit_bytes,) * 2)
    before, peak, done = own_bytes(), [0], threading.Event()

    def look():
        while not done.wait(0.005):
            peak[0] = max(peak[0], own_bytes())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        train_jobs([job])
        ended = "well"
    except (RuntimeError, MemoryError, OSError, DuokaError) as error:
        ended = f"{type(error).__name__}: {error}"
    finally:
        done.set()
        thread.join()
    facts = {"ended": ended, "peak_bytes": peak[0] - before}
    Path(f"{results}-{rank}.json").write_text(json.dumps(facts))


def compare(folder, hidden, layers, sizes, slices):
    """Runs with and without a limit: (facts of each rank, bytes of the whole state) by number of processes."""
    data = write_conversations(folder / "chats.jsonl", 16, seed=3)
    model, small = write_tiny_model(folder / "model", hidden=hidden, layers=layers), write_tiny_model(folder / "small")
    yamls = {}
    for name, path in (("run", model), ("first", small)):
        yamls[name] = folder / f"{name}.yaml"
        yamls[name].write_text(YAML.format(model=path, data=data, output=folder / "out"), encoding="utf-8")
    state = 16 * sum(tensor.numel() for tensor in load_file(model / "model.safetensors").values())
    first = (str(yamls["first"]), DISK, str(folder / "first"))
    found = {}
    for size in sizes:
        for name, settings, limit in (("free", [], 0), ("limited", DISK, state // 3)):
            place = folder / f"{name}-{size}"
            job = (str(yamls["run"]), settings, str(place))
            run_world(size, under_a_limit, first, job, limit, slices, str(place))
            facts = [json.loads(Path(f"{place}-{rank}.json").read_text()) for rank in range(size)]
            found[name, size] = facts
    job = (str(yamls["run"]), [], str(folder / "short"))
    run_world(1, under_a_limit, first, job, state // 3, slices, str(folder / "short"))
    found["short", 1] = [json.loads((folder / "short-0.json").read_text())]
    return found, state


def check(folder, found, state, sizes):
    assert found["short", 1][0]["ended"] != "well", "without the disk it must not fit, or the limit is none"
    for size in sizes:
        for facts in found["limited", size]:
            assert facts["ended"] == "well", facts
            assert 3 * facts["peak_bytes"] <= state, f"{facts['peak_bytes']:,} of its own for a state of {state:,}"
        plan = json.loads((folder / f"limited-{size}" / "plan.json").read_text())["memory"]
        planned = plan["peak_bytes"] - plan["parts"]["framework"]
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
def test_a_state_of_three_times_the_limit_trains_to_the_same_bits(tmp_path):
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
