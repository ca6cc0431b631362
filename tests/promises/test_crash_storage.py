"""Promise 4, storage: a full or read-only disk and a folder that vanishes end or pause a run, with one message."""

import json
import os
import shutil
import subprocess
import threading
import time
import warnings
from pathlib import Path

import pytest
from tiny import write_conversations
from worlds import leave_garbage, run_world

# Full fine-tuning of the tiny model: a checkpoint takes about 3 MB.
YAML = """
model: {model}
data: {{train: [{data}], max_length: 256}}
optim: {{lr: 2e-3}}
train: {{epochs: 2, global_batch: 8, precision: fp32}}
checkpoint: {{every: 2, keep: 1}}
output: {output}
log: {{to: []}}
"""
DISK_MB = 24
# One world tells several stories, and whichever test comes first waits for all of them, on a machine that others use.
pytestmark = pytest.mark.timeout(600)


def train_with_trouble(jobs, results):
    """Train every (name, yaml, overrides, folder, trouble) on all ranks; each rank writes down how its run ended."""
    from duoka.comm.world import end_world, start_world
    from duoka.config.load import load_config
    from duoka.errors import StorageError
    from duoka.runs.folder import RunFolder
    from duoka.train.main import read_inputs, run_in_world

    world = None
    for name, yaml, overrides, folder, trouble in jobs:
        leave_garbage()
        run = RunFolder(Path(folder))
        loaded = load_config(yaml, overrides)
        world = world or start_world(loaded.config.parallel)
        if world.is_main:
            run.make()
        world.barrier()
        inputs = read_inputs(loaded, run)
        if world.is_main:
            threading.Thread(target=globals()[trouble], args=(run,), daemon=True).start()
        try:
            ended = str(run_in_world(inputs, world))
        except StorageError as error:
            ended = f"{error.exit_code} {error}"
        (Path(results) / f"{name}-{world.rank}.txt").write_text(ended, encoding="utf-8")
        world.barrier()
    end_world(world)


def nothing(run):
    pass


def wait_for(run, words):
    deadline = time.monotonic() + 300
    log = run.events / "run.jsonl"
    while time.monotonic() < deadline:
        if log.exists() and words in log.read_text(encoding="utf-8"):
            return
        time.sleep(0.01)


def fill_after_a_save(run):
    """All but half a checkpoint's room is taken, once one is there; the log gets none of it either."""
    wait_for(run, '"type": "checkpoint"')
    with (run.path.parent / "filler").open("wb") as file:
        while shutil.disk_usage(run.path).free > 1 << 20:
            file.write(bytes(1 << 18))
            file.flush()


def fill_and_free(run):
    fill_after_a_save(run)
    wait_for(run, '"type": "warning"')
    (run.path.parent / "filler").unlink()


def mount_read_only_after_a_save(run):
    """What a kernel does to a disk that gave it errors: all can be read, nothing written."""
    wait_for(run, '"type": "checkpoint"')
    subprocess.run(["mount", "--bind", str(run.checkpoints), str(run.checkpoints)], check=True)
    deadline = time.monotonic() + 20
    while subprocess.run(["mount", "-o", "remount,bind,ro", str(run.checkpoints)], capture_output=True).returncode:
        assert time.monotonic() < deadline, "refused while a file is open for writing, and never let"


def delete_after_a_save(run):
    wait_for(run, '"type": "checkpoint"')
    # A file that the run writes while it is emptied keeps a folder, and what is above it.
    for _ in range(1000):
        shutil.rmtree(run.path, ignore_errors=True)
        if not run.path.exists():
            return


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    """A small file system of its own, where the machine lets us make one."""
    folder = tmp_path_factory.mktemp("disk")
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if made.returncode:
        warnings.warn(f"no small disk could be mounted, full disks are NOT tested: {made.stderr.strip()}", stacklevel=1)
        pytest.skip("mounting a small disk needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture(scope="module")
def yaml(tmp_path_factory, deep_model):
    folder = tmp_path_factory.mktemp("storage")
    data = write_conversations(folder / "chats.jsonl", 40, seed=2)
    path = folder / "run.yaml"
    path.write_text(YAML.format(model=deep_model, data=data, output=folder / "out"), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def ended(disk, yaml, tmp_path_factory):
    """How each story ended, on each rank: (name, rank) -> exit code and message."""
    results = tmp_path_factory.mktemp("results")
    slow = "train.epochs=6"  # time enough for the trouble to come
    jobs = [
        ("stop", yaml, [slow], disk / "stop" / "run", "fill_after_a_save"),
        ("deleted", yaml, [slow], results / "deleted", "delete_after_a_save"),
        ("read-only", yaml, [slow], results / "read-only", "mount_read_only_after_a_save"),
    ]
    try:
        run_world(2, train_with_trouble, jobs, str(results))
    finally:
        subprocess.run(["umount", "-l", str(results / "read-only" / "checkpoints")], capture_output=True)
    (disk / "stop" / "filler").unlink()
    kept = sorted(path.name for path in (disk / "stop" / "run" / "checkpoints").iterdir())
    (results / "kept").write_text(json.dumps(kept), encoding="utf-8")
    jobs = [("again", yaml, [slow], disk / "stop" / "run", "nothing")]
    for policy in ("wait", "skip"):
        jobs.append((policy, yaml, [slow, f"checkpoint.on_error={policy}"], disk / policy / "run", "fill_and_free"))
    run_world(2, train_with_trouble, jobs, str(results))
    return results


def both(ended, name):
    first, second = ((ended / f"{name}-{rank}.txt").read_text(encoding="utf-8") for rank in (0, 1))
    assert first == second, "all ranks hear of it"
    return first


def test_a_full_disk_ends_the_run_with_needed_and_free_bytes(ended):
    said = both(ended, "stop")
    assert said.startswith("6 storage error: the checkpoint of step")
    assert "No space left" in said and "are free there" in said and "needed" in said and "is intact" in said
    kept = json.loads((ended / "kept").read_text())
    assert len(kept) == 1 and kept[0].startswith("step-"), "the earlier checkpoint, and nothing half-written"


def test_with_space_again_the_same_command_ends_well(ended):
    assert both(ended, "again") == "0"


def warnings_of(folder):
    lines = [json.loads(line) for line in (folder / "events" / "run.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line["text"] for line in lines if line["type"] == "warning"]


def test_a_run_that_may_wait_goes_on_when_there_is_space(ended, disk):
    assert both(ended, "wait") == "0"
    said = warnings_of(disk / "wait" / "run")
    assert any("training waits" in text for text in said) and any("can be written now" in text for text in said)


def test_a_run_that_may_skip_trains_on(ended, disk):
    assert both(ended, "skip") == "0"
    assert any("goes on without it" in text for text in warnings_of(disk / "skip" / "run"))


def test_a_deleted_run_folder_is_named_and_nobody_hangs(ended):
    said = both(ended, "deleted")
    assert said.startswith("6 ") and "is gone: it was deleted" in said


def test_a_disk_that_becomes_read_only_is_named_and_the_earlier_checkpoint_stays(ended):
    said = both(ended, "read-only")
    assert said.startswith("6 storage error: the checkpoint of step") and "Read-only file system" in said
    # A draft that was begun before cannot be taken away from a disk that nobody writes to.
    whole = [one.name for one in (ended / "read-only" / "checkpoints").iterdir() if one.suffix != ".draft"]
    # On a slow machine one more is whole before the disk is closed.
    failed = int(said.partition("the checkpoint of step ")[2].split()[0])
    assert "is intact" in said and 1 <= len(whole) <= 2
    assert all(int(name.removeprefix("step-")) < failed for name in whole)


def test_a_disk_too_small_for_one_checkpoint_is_refused_before_the_first_step(disk, yaml, tmp_path):
    filler = disk / "filler"
    with filler.open("wb") as file:
        while shutil.disk_usage(disk).free > 1 << 20:
            file.write(bytes(1 << 18))
            file.flush()
    try:
        run_world(1, train_with_trouble, [("small", yaml, [], disk / "small", "nothing")], str(tmp_path))
    finally:
        filler.unlink()
    said = (tmp_path / "small-0.txt").read_text(encoding="utf-8")
    assert said.startswith("6 storage error: not even one checkpoint fits") and "free" in said
    assert not list((disk / "small").glob("checkpoints/*"))


def test_a_read_only_output_is_refused_by_the_command(disk, yaml, capsys):
    from duoka import cli

    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    try:
        code = cli.run(["train", str(yaml), f"output={disk / 'read-only'}"])
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    said = capsys.readouterr().err
    assert code == 6 and "Read-only file system" in said and "Traceback" not in said


def test_an_output_that_is_a_file_is_refused_by_the_command(yaml, tmp_path, capsys):
    from duoka import cli

    (tmp_path / "file").write_text("mine")
    assert cli.run(["train", str(yaml), f"output={tmp_path / 'file'}"]) == 6
    assert "which is a file" in capsys.readouterr().err and (tmp_path / "file").read_text() == "mine"
    assert os.listdir(tmp_path) == ["file"]
