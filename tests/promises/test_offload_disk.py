"""Promise: optimizer state on a disk changes where it lies, and not one bit of what is learned."""

import errno
import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from commands import run_duoka, start_duoka
from safetensors.torch import load_file
from tiny import write_conversations
from worlds import end_processes, run_world, start_processes, train_all

pytestmark = pytest.mark.timeout(400)

YAML = """
model: {model}
data: {{train: [{data}], max_length: 256}}
optim: {{lr: 5e-3, warmup: 0.2, clip: 0.5, weight_decay: 0.1}}
train: {{max_steps: 6, global_batch: 4, precision: fp32, seed: 7, micro_batch: "200 tokens"}}
checkpoint: {{every: 2, keep: 9}}
parallel: {{check_replicas: 3}}
log: {{to: []}}
output: {output}
"""
SLICE_BYTES = 16 * 1024  # so that the tiny model's state is many slices, and parameters lie across their edges
DISK = ["parallel.offload={optimizer: disk}"]
LORA = "lora={rank: 3, dropout: 0}"
# name -> (processes, settings)
LAYOUTS = {
    "single": (1, []),
    "single, bf16": (1, ["train.precision=bf16"]),
    "single, LoRA": (1, [LORA]),
    "ddp": (2, ["parallel.strategy=ddp"]),
    "ddp, bf16": (2, ["parallel.strategy=ddp", "train.precision=bf16"]),
    "zero1": (2, ["parallel.strategy=zero1"]),
    "zero2": (2, ["parallel.strategy=zero2"]),
    "fsdp": (2, ["parallel.strategy=fsdp"]),
    "fsdp, bf16": (2, ["parallel.strategy=fsdp", "train.precision=bf16"]),
    "fsdp, half": (2, ["parallel.strategy=fsdp"]),
    "tp": (2, ["parallel.tensor=2"]),
    # Weights and gradients too.
    "fsdp, params": (2, ["parallel.strategy=fsdp"]),
    "fsdp, bf16, params": (2, ["parallel.strategy=fsdp", "train.precision=bf16"]),
}


def on_disk(name):
    offload = {"half": "{optimizer: disk, share: 0.5}", "params": "{params: disk}"}.get(name.rpartition(", ")[2])
    return [f"parallel.offload={offload}"] if offload else DISK


def in_small_slices(jobs):
    """`train_jobs` with slices that fit the tiny model; says on stdout what lay on the disk."""
    from worlds import train_jobs

    import duoka.optim.disk

    duoka.optim.disk.SLICE_BYTES = SLICE_BYTES
    train_jobs(jobs)


def read_steps(folder):
    lines = (folder / "events" / "run.jsonl").read_text(encoding="utf-8").splitlines()
    return [one for one in map(json.loads, lines) if one["type"] == "step"]


def learned(folder):
    """Losses and norms of the run, and its weights."""
    steps = read_steps(folder)
    final = folder / "final"
    weights = final / "adapter_model.safetensors"
    weights = weights if weights.is_file() else final / "model.safetensors"
    return [(step["loss"], step["grad_norm"]) for step in steps], load_file(weights)


def assert_same_bits(one, other):
    (numbers, weights), (others, other_weights) = learned(one), learned(other)
    assert numbers == others
    for name, tensor in weights.items():
        assert tensor.equal(other_weights[name]), name


@pytest.fixture(scope="module")
def case(tmp_path_factory, tiny_model):
    folder = tmp_path_factory.mktemp("disk")
    data = write_conversations(folder / "chats.jsonl", 24, seed=3, longest=8)
    yaml = folder / "run.yaml"
    yaml.write_text(YAML.format(model=tiny_model, data=data, output=folder / "out"), encoding="utf-8")
    return folder, str(yaml)


@pytest.fixture(scope="module")
def runs(case):
    """Each layout without the disk and with it, and what goes on from checkpoints of either."""
    folder, yaml = case
    for size in (1, 2):
        jobs = []
        for name, (ranks, settings) in LAYOUTS.items():
            if ranks == size:
                jobs += [
                    (yaml, settings, str(folder / name)),
                    (yaml, settings + on_disk(name), str(folder / f"{name}, disk")),
                ]
        run_world(size, in_small_slices, jobs)
    return folder


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_bit_is_that_of_the_run_without_a_disk(runs, name):
    assert_same_bits(runs / name, runs / f"{name}, disk")


def test_the_state_lay_on_the_disk_and_nothing_is_left_of_it(runs):
    for name, (ranks, _) in LAYOUTS.items():
        events = (runs / f"{name}, disk" / "events" / "run.jsonl").read_text(encoding="utf-8").splitlines()
        held = next(one["ranks"] for one in map(json.loads, events) if one["type"] == "memory")
        assert len(held) == ranks
        for rank in held:
            if name.endswith("half"):
                assert 0.3 < rank["disk_bytes"] / rank["optimizer_bytes"] <= 0.55
                continue
            assert rank["disk_bytes"] > 0.99 * rank["optimizer_bytes"] > 0 or "zero" in name, name
            if name.endswith("params"):
                parts = ("weights", "gradients", "optimizer")
                assert rank["disk_bytes"] > 0.99 * sum(rank[f"{part}_bytes"] for part in parts), name
    assert not [path for path in runs.rglob("*") if "offload" in path.name]


def test_checkpoints_are_those_of_a_run_without_a_disk(runs):
    for name in ("single", "zero1", "fsdp", "fsdp, params"):
        for step in ("step-00000002", "step-00000006"):
            parts = [runs / one / "checkpoints" / step for one in (name, f"{name}, disk")]
            assert parts[0].is_dir(), sorted(path.name for path in parts[0].parent.iterdir())
            for file in parts[0].glob("tensors-*"):
                assert file.read_bytes() == (parts[1] / file.name).read_bytes(), (name, step, file.name)


# --- what goes wrong ---


def with_a_bad_disk(jobs, results):
    """As `in_small_slices`; the disk gives an I/O error in the fourth step, and is full for the last job."""
    from duoka.errors import StorageError
    from duoka.parallel import inject

    assert inject
    write, allocate = os.pwritev, os.posix_fallocate
    calls = iter(range(10**9))

    def fails(*arguments):
        if next(calls) > 110:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return write(*arguments)

    def is_full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    ended = {}
    for name, job in jobs.items():
        os.pwritev = fails if name == "broken" else write
        os.posix_fallocate = is_full if name == "full" else allocate
        try:
            in_small_slices([job])
            ended[name] = "well"
        except StorageError as error:
            ended[name] = f"{error.exit_code} {error}"
    Path(results).write_text(json.dumps(ended), encoding="utf-8")


@pytest.fixture(scope="module")
def faults(case, runs):
    """How runs end on a bad disk; the first of them goes on afterwards, on a good one."""
    folder, yaml = case
    jobs = {
        "broken": (yaml, DISK, str(folder / "broken")),
        "full": (yaml, DISK, str(folder / "full")),
        "mended": (yaml, DISK, str(folder / "broken")),
        "from a whole run": (
            yaml,
            [*DISK, f"checkpoint.resume={folder}/single/checkpoints/step-00000002"],
            str(folder / "from a whole run"),
        ),
        "from zero1": (
            yaml,
            [*DISK, f"checkpoint.resume={folder}/zero1, disk/checkpoints/step-00000004"],
            str(folder / "from zero1"),
        ),
    }
    run_world(1, with_a_bad_disk, jobs, str(folder / "ended.json"))
    return folder, json.loads((folder / "ended.json").read_text(encoding="utf-8"))


def test_an_error_of_the_disk_ends_with_exit_code_6_and_the_run_goes_on_later(faults):
    folder, ended = faults
    assert ended["broken"].startswith("6 storage error: the optimizer's state cannot be written"), ended["broken"]
    assert "Input/output error" in ended["broken"] and "the same command goes on" in ended["broken"]
    assert ended["mended"] == "well"
    assert [step["step"] for step in read_steps(folder / "broken")][-1] == 6
    for name, tensor in learned(folder / "single")[1].items():
        assert tensor.equal(learned(folder / "broken")[1][name]), name


def test_a_full_disk_is_seen_before_the_first_step_with_the_need(faults):
    folder, ended = faults
    size = int(json.loads((folder / "single, disk" / "plan.json").read_text())["memory"]["disk_needed_bytes"])
    from duoka.units import format_bytes

    assert ended["full"].startswith("6 storage error: the optimizer's state does not fit on the disk"), ended["full"]
    assert "are free" in ended["full"] and "needed" in ended["full"]
    assert format_bytes(size).split()[0][:2] in ended["full"], (size, ended["full"])
    assert not (folder / "full" / "final").exists()


def test_it_goes_on_from_a_run_without_a_disk_and_from_another_layout(faults):
    folder, ended = faults
    assert ended["from a whole run"] == ended["from zero1"] == "well"
    whole = {step["step"]: step["loss"] for step in read_steps(folder / "single")}
    exact = {step["step"]: step["loss"] for step in read_steps(folder / "from a whole run")}
    assert exact == {step: whole[step] for step in (3, 4, 5, 6)}
    near = {step["step"]: step["loss"] for step in read_steps(folder / "from zero1")}
    assert set(near) == {5, 6}
    for step, loss in near.items():
        assert abs(loss / whole[step] - 1) < 1e-5, step


def slowly(jobs):
    write = os.pwritev

    def later(*arguments):
        time.sleep(0.01)
        return write(*arguments)

    os.pwritev = later
    in_small_slices(jobs)


def test_a_kill_while_the_state_is_written_leaves_nothing_and_costs_time_only(case, runs):
    folder, yaml = case
    fast = folder / "fast"
    job = (yaml, [f"parallel.offload={{optimizer: disk, folder: {fast}}}"], str(folder / "killed"))
    processes = start_processes(1, slowly, [job])
    try:
        deadline = time.monotonic() + 120
        while not (folder / "killed" / "checkpoints" / "step-00000002").exists():
            assert time.monotonic() < deadline and processes[0].is_alive()
            time.sleep(0.01)
        held = [os.readlink(one) for one in Path(f"/proc/{processes[0].pid}/fd").iterdir() if one.is_symlink()]
        assert any(str(fast) in one for one in held), held
        os.kill(processes[0].pid, signal.SIGKILL)
    finally:
        end_processes(processes)
    assert list(fast.iterdir()) == []
    assert not (folder / "killed" / "final").exists(), "it must have been killed on its way"
    train_all([job], 1)
    for name, tensor in learned(folder / "single")[1].items():
        assert tensor.equal(learned(folder / "killed")[1][name]), name


def test_a_disk_that_is_taken_away_under_mapped_weights_is_exit_code_6_and_the_run_goes_on(case):
    folder, yaml = case
    settings = ["parallel.strategy=fsdp", f"parallel.offload={{params: disk, folder: {folder}/pulled}}"]
    settings += ["train.max_steps=40", "checkpoint.every=5"]
    words = ["train", yaml, *settings, f"output={folder}/taken"]
    command = start_duoka(*words)
    try:
        deadline = time.monotonic() + 120
        while not (folder / "taken" / "checkpoints" / "step-00000005").exists():
            assert time.monotonic() < deadline and command.poll() is None, command.said()
            time.sleep(0.01)
        ranks = psutil.Process(command.pid).children(recursive=True)
        for rank in ranks:
            rank.suspend()
        held = [Path(f"/proc/{rank.pid}/fd/{one}") for rank in ranks for one in os.listdir(f"/proc/{rank.pid}/fd")]
        held = [one for one in held if one.is_symlink() and str(folder / "pulled") in os.readlink(one)]
        for one in held:
            os.truncate(one, 0)  # whoever reads what it has mapped of it is sent SIGBUS
        for rank in ranks:
            rank.resume()
        said, _ = command.communicate(120)
    finally:
        command.kill()
    assert held and command.returncode == 6, said
    # Most meet it where weights are mapped; a rank that comes to a read first is told by that, which names the folder.
    if "storage error: a file that was mapped into memory could not be read or written" in said:
        assert "SIGBUS" in said and "the same command goes on from the newest checkpoint" in said, said
    else:
        assert "cannot be read" in said or "came back from the disk other than it was written" in said, said
        assert str(folder / "pulled") in said and "the newest checkpoint is intact: the same command goes on" in said
    assert not (folder / "taken" / "final").exists(), "it must have been struck on its way"
    done = run_duoka(*words)
    assert done.returncode == 0, done.stderr
    assert run_duoka("train", yaml, *settings, f"output={folder}/not taken").returncode == 0
    for name, tensor in learned(folder / "not taken")[1].items():
        assert tensor.equal(learned(folder / "taken")[1][name]), name
