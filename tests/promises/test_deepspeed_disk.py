"""DeepSpeed with its state and weights in files (ZeRO-Infinity): numbers of the run that keeps all in memory.

Its reader and writer are compiled for this, so `make nightly` runs it.
"""

import errno
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import test_any_split as any_split
import torch
from needs import need_deepspeed
from safetensors.torch import load_file
from test_any_split import CUT, LORA
from tiny import write_conversations, write_tiny_model
from worlds import run_world, train_all

from duoka.parallel.deepspeed_disk import remove_left
from duoka.plan.compiler import has_aio

need_deepspeed()
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

SAVING = ("checkpoint.every=2", "checkpoint.keep=10")
# Lines and weights of less than a MiB stay in memory: here some are larger than that on each rank.
SMALL = ("parallel.deepspeed.sub_group_size=400000", "parallel.deepspeed.stage3_param_persistence_threshold=100")
DEEPSPEED = ("parallel.strategy=zero3", "parallel.engine=deepspeed", *SMALL, CUT)
OPTIMIZER, PARAMS = "parallel.offload={optimizer: disk}", "parallel.offload={params: disk}"
STRIKE = {"DUOKA_INJECT": "nan_grad step=3 rank=1"}
SKIP = "faults.nonfinite=skip"
# Run -> (settings, the run and the step that it goes on from, environment); in this order, in one world of two.
RUNS = {
    "native": (("parallel.strategy=ddp", CUT, *SAVING), None, {}),
    "memory": (DEEPSPEED, None, {}),
    "state": ((*DEEPSPEED, OPTIMIZER, *SAVING), None, {}),
    "weights": ((*DEEPSPEED, PARAMS, *SAVING, "train.recompute=full"), None, {}),
    "state, from native": ((*DEEPSPEED, OPTIMIZER), ("native", 2), {}),
    "weights, from native": ((*DEEPSPEED, PARAMS), ("native", 4), {}),
    "state again": ((*DEEPSPEED, OPTIMIZER), ("state", 4), {}),
    "weights again": ((*DEEPSPEED, PARAMS), ("weights", 4), {}),
    "memory LoRA": ((*DEEPSPEED, LORA), None, {}),
    "weights LoRA": ((*DEEPSPEED, PARAMS, LORA), None, {}),
    "memory struck": ((*DEEPSPEED, SKIP), None, STRIKE),
    "state struck": ((*DEEPSPEED, OPTIMIZER, SKIP), None, STRIKE),
    "weights struck": ((*DEEPSPEED, PARAMS, SKIP), None, STRIKE),
}


def start_from(source, step, target):
    name = f"step-{step:08d}"
    shutil.copytree(source / "checkpoints" / name, target / "checkpoints" / name)


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    if not has_aio():
        pytest.skip("NO AIO: apt install g++ libaio-dev")
    folder = tmp_path_factory.mktemp("infinity")
    data = write_conversations(folder / "chats.jsonl", any_split.NUM_SAMPLES, seed=3)
    model = write_tiny_model(folder / "model", hidden=768, layers=2)
    yaml = folder / "run.yaml"
    yaml.write_text(
        any_split.YAML.replace("lr: 5e-3", "lr: 2e-4").format(model=model, data=data, output=folder / "out"),
        encoding="utf-8",
    )
    # Minutes, the first time: more than a world of processes is given.
    build = "import torch; from duoka.parallel.deepspeed_disk import build_aio\n"
    build += "from duoka.parallel.deepspeed_package import load_deepspeed as load\n"
    build += "build_aio(load(torch.device('cpu')), print)"
    subprocess.run([sys.executable, "-c", build], check=True, timeout=600, capture_output=True)
    jobs = []
    for name, (settings, before, env) in RUNS.items():
        if before is not None:
            jobs.append(partial(start_from, folder / before[0], before[1], folder / name))
        jobs.append((str(yaml), list(settings), str(folder / name), {"DUOKA_INJECT": "", **env}))
    train_all(jobs, 2)
    return folder, yaml


# A model of this width takes other orders of adding further apart: ours and DeepSpeed's in memory are at 2e-5.
NEAR = {"native": 1e-4}


def compare(folder, name, whole, first=0):
    near = NEAR.get(whole, any_split.TOLERANCE)
    steps, wanted = any_split.read_run(folder / name), any_split.read_run(folder / whole)[first:]
    assert [step["step"] for step in steps] == [step["step"] for step in wanted]
    for key in ("loss", "grad_norm", "lr"):
        error = any_split.relative([step[key] for step in steps], [step[key] for step in wanted])
        assert error < near, f"{key} of {name} is off by {error}"
    file = "adapter_model.safetensors" if "LoRA" in name else "model.safetensors"
    mine, theirs = (load_file(folder / one / "final" / file) for one in (name, whole))
    error, tensor = any_split.worst(mine, theirs)
    assert error < near, f"{tensor} of {name} is off by {error}"


@pytest.mark.parametrize(
    ("name", "whole", "first"),
    [
        ("memory", "native", 0), ("state", "memory", 0), ("weights", "memory", 0), ("state, from native", "native", 2),
        ("weights, from native", "native", 4), ("weights LoRA", "memory LoRA", 0),
        ("state struck", "memory struck", 0), ("weights struck", "memory struck", 0),
    ],
)  # fmt: skip
def test_files_give_the_numbers_of_memory(case, name, whole, first):
    compare(case[0], name, whole, first)


@pytest.mark.parametrize("name", ["state", "weights"])
def test_a_run_goes_on_bit_for_bit(case, name):
    steps = [step["loss"] for step in any_split.read_run(case[0] / f"{name} again")]
    assert steps == [step["loss"] for step in any_split.read_run(case[0] / name)[4:]]
    mine, theirs = (load_file(case[0] / one / "final" / "model.safetensors") for one in (f"{name} again", name))
    assert all(torch.equal(mine[tensor], theirs[tensor]) for tensor in theirs)


def test_one_native_process_goes_on_with_it(case):
    folder, yaml = case
    start_from(folder / "weights", 6, folder / "native on 1")
    train_all([(str(yaml), ["parallel.strategy=single", CUT], str(folder / "native on 1"))], 1)
    compare(folder, "native on 1", "native", 6)


def test_one_process_alone_keeps_its_weights_on_the_disk(case):
    """Where what a gather gives is the buffer itself, through which other weights pass before the backward pass."""
    folder, yaml = case
    settings = [*DEEPSPEED, PARAMS, "train.recompute=none"]
    train_all([(str(yaml), settings, str(folder / "weights on 1"))], 1)
    compare(folder, "weights on 1", "native")


def test_the_next_run_removes_what_a_killed_one_left(tmp_path):
    """By a lock that goes with its process, and not by age or number."""
    hold = "import sys, time; from pathlib import Path; from duoka.parallel.deepspeed_disk import SwapFolder as S\n"
    hold += (
        "s = S(Path(sys.argv[1]), S); (s.path / 'x.swp').write_bytes(b'x'); print(s.path, flush=True); time.sleep(99)"
    )
    with subprocess.Popen([sys.executable, "-c", hold, tmp_path], stdout=subprocess.PIPE, text=True) as other:
        left = Path(other.stdout.readline().strip())
        remove_left(tmp_path)
        assert (left / "x.swp").exists()
        other.kill()
        other.wait()
    remove_left(tmp_path)
    assert not left.exists()


def on_a_full_disk(job, room, told):
    """In a world: the disk has room for so many files, and how the job ends is written down."""
    from worlds import train_jobs

    from duoka.errors import StorageError

    allocate, calls = os.posix_fallocate, iter(range(10**9))

    def take(*arguments):
        if next(calls) >= room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return allocate(*arguments)

    os.posix_fallocate = take
    try:
        train_jobs([job])
    except StorageError as error:
        Path(told).write_text(f"{error.exit_code} {error}", encoding="utf-8")


@pytest.mark.parametrize(("name", "room", "fix"), [("full", 0, "of another disk"), ("filled", 3, "is intact")])
def test_a_full_disk_ends_with_exit_code_6_and_the_need(case, name, room, fix):
    """Before the first step, or, where others fill it after that, at the first write of the file that has no room."""
    folder, yaml = case
    told = folder / f"{name}.txt"
    run_world(1, on_a_full_disk, (str(yaml), [*DEEPSPEED, OPTIMIZER], str(folder / name)), room, str(told))
    said = told.read_text(encoding="utf-8")
    assert said.startswith("6 storage error: what DeepSpeed keeps on the disk does not fit on the disk"), said
    assert "are free" in said and "needed by this process" in said and fix in said, said
    assert not (folder / name / "final").exists()


def test_no_file_is_left_behind(case):
    assert not list(case[0].rglob("*.swp"))
