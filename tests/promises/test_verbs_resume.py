"""save_state and load_state: the run goes on as if it had never stopped, at any step, by itself or as guides do it."""

import json
import shutil

import pytest
from verbs import NUM_SAMPLES, resume_all
from worlds import run_world

# On 2 processes: 22 samples, batches of 2, two of them a step: 6 micro-batches and 3 steps an epoch, 6 steps in all.
STEPS = (1, 2, 3, 4)  # within an epoch, at its end, in the second one


def jobs_on_two():
    jobs = [("whole", "run", "ddp", None, {}), ("whole-fsdp", "run", "fsdp", None, {"kind": "sgd"})]
    jobs += [("whole-stream", "run", "ddp", None, {"streams": True})]
    for step in STEPS:
        jobs += [(f"stop-{step}", "run", "ddp", step, {}), (f"self-{step}", "self", "ddp", f"step_{step}", {})]
        jobs += [(f"guides-{step}", "guides", "ddp", f"step_{step}", {})]
    # These write over folders that are no longer needed.
    for name, strategy, step, options in (
        ("fsdp", "fsdp", 2, {"kind": "sgd"}),
        ("stream", "ddp", 1, {"streams": True}),
    ):
        jobs += [(f"stop-{name}", "run", strategy, step, options)]
        jobs += [(f"self-{name}", "self", strategy, f"step_{step}", options)]
    return jobs


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    run_world(2, resume_all, jobs_on_two(), str(folder))
    read = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    return folder, read


def both(read, name):
    return [read[f"{name}-{rank}"] for rank in (0, 1)]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("how", ["self", "guides"])
def test_going_on_is_bit_identical_on_every_rank(seen, how, step):
    """Losses, samples and their order, dropout, Python's own generator, schedule, momenta, somebody's own object."""
    _, read = seen
    for whole, stopped, resumed in zip(
        both(read, "whole"), both(read, f"stop-{step}"), both(read, f"{how}-{step}"), strict=True
    ):
        assert stopped["log"] + resumed["log"] == whole["log"]
        assert resumed["state"] == whole["state"]
        assert resumed["counter"] == whole["counter"]


def test_every_sample_is_seen_once_an_epoch_and_epochs_differ(seen):
    whole = seen[1]["whole-0"]["log"]
    epochs = [[n for _, _, numbers, _ in whole[at : at + 6] for n in numbers] for at in (0, 6)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(NUM_SAMPLES))] * 2
    assert epochs[0] != epochs[1]


def test_what_save_state_writes_stands_beside_what_people_write(seen):
    folder, _ = seen
    names = {path.name for path in (folder / "step_1").iterdir()}
    assert names == {"state", "model"}
    assert {path.name for path in (folder / "step_1" / "model").iterdir()} == {"model.safetensors"}
    assert not [path for path in folder.rglob("*") if path.suffix in (".bin", ".pt", ".pkl", ".pth")]


def test_sharded_and_streamed_loops_go_on_bit_for_bit(seen):
    _, read = seen
    for name in ("fsdp", "stream"):
        for whole, stopped, resumed in zip(
            both(read, f"whole-{name}"), both(read, f"stop-{name}"), both(read, f"self-{name}"), strict=True
        ):
            assert stopped["log"] + resumed["log"] == whole["log"], name
            assert resumed["state"] == whole["state"], name


def test_one_process_goes_on_where_two_stopped(seen):
    folder, read = seen
    run_world(1, resume_all, [("one", "self", "single", "step_4", {})], str(folder))
    resumed = json.loads((folder / "one-0.json").read_text())
    before = [n for _, _, numbers, _ in read["stop-4-0"]["log"][6:] for n in numbers]
    after = [n for _, _, numbers, _ in resumed["log"] for n in numbers]
    assert len(before) == 8 and sorted(before + after) == list(range(NUM_SAMPLES)), "each of the epoch's samples once"


def test_what_cannot_be_gone_on_from_is_named(seen, tmp_path):
    from verbs import build

    from duoka import Accelerator
    from duoka.errors import ConfigError, StorageError

    folder, _ = seen
    broken = tmp_path / "step_4"
    shutil.copytree(folder / "step_4", broken)
    shard = next(broken.glob("state/tensors-*"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    accelerator = Accelerator()
    accelerator.prepare(*build())
    with pytest.raises(ConfigError, match="saved with 1 schedulers, and 0 are prepared"):
        accelerator.load_state(folder / "step_4")
    with pytest.raises(StorageError, match="content changed"):
        accelerator.load_state(broken)
    with pytest.raises(StorageError, match="there is no such folder"):
        accelerator.load_state(tmp_path / "nowhere")
