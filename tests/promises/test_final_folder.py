"""The final folder is written by all ranks, each its own part: the files that one process writes, nothing gathered."""

import errno
import os
from pathlib import Path

import pytest
import torch
from tiny import write_conversations, write_tiny_model
from worlds import run_world

from duoka.errors import StorageError

SPLIT = "100KB"  # several files for a model of 0.7 MB
LAYOUTS = {
    1: ["fsdp", "single"],  # the group that one needs does no harm to the other
    2: ["ddp", "fsdp", "zero2"],
    4: ["fsdp", "ddp", "hsdp"],
}


def write_all(folder, models, strategies, split, processes):
    """A result per model and strategy; what each rank put into files is counted, and gathering is forbidden."""
    import duoka.store.final_folder as room
    from duoka.comm.world import end_world, start_world
    from duoka.config.load import load_config
    from duoka.runs.folder import RunFolder
    from duoka.train.main import read_inputs
    from duoka.train.run import build_run

    def never(*_):
        raise AssertionError("a whole tensor was gathered")

    torch.distributed.tensor.DTensor.full_tensor = room.gather_state = never
    split_by_size(split)
    written = []
    write_box = room.write_box
    room.write_box = lambda handle, start, values, *rest: (
        written.append(values.nbytes),
        write_box(handle, start, values, *rest),
    )
    world = None
    for model in models:
        for strategy in strategies:
            overrides = [f"model={folder / model}", f"parallel.strategy={strategy}"]
            overrides += ["parallel.shard_ranks=2"] if strategy == "hsdp" else []
            loaded = load_config(folder / "run.yaml", overrides)
            run = RunFolder(folder / f"{model}-{strategy}-{processes}")
            run.make()
            inputs = read_inputs(loaded, run)
            world = world or start_world(loaded.config.parallel)
            built = build_run(inputs, world)
            built.store.close()
            plan, mesh = built.plan, built.mesh
            lm, sources = built.contents.engine.bare.lm, room.ResultSources(inputs.folder, inputs.folder)
            written.clear()
            room.write_final(lm, mesh, lambda sources=sources: sources, run.final)
            whole = {id(p): p.numel() * torch.finfo(room.base_dtype(inputs.folder)).bits // 8 for p in lm.parameters()}
            own, total = sum(written), sum(whole.values())
            assert sum(world.gather(own)) == total, "not every byte was written once"
            if plan.layout.is_sharded:
                ranks = plan.layout.shard
                assert max(written) <= max(whole.values()) / ranks + 4096, "more than this rank's rows of a tensor"
                assert own <= 1.2 * total / ranks
            elif world.size > 1:
                assert own <= 0.8 * total, "one rank wrote nearly all"
    end_world(world)


def split_by_size(split):
    """Files of at most so much, where nobody says so: a real model is larger than 50 GB before it has two."""
    from transformers import PreTrainedModel

    PreTrainedModel.save_pretrained.__defaults__ = tuple(
        split if value in ("50GB", SPLIT) else value for value in PreTrainedModel.save_pretrained.__defaults__
    )


def files_of(folder):
    return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Two models, and for each what one process that holds it whole writes by transformers' own means."""
    from duoka.model.build import load_model
    from duoka.model.request import ModelRequest
    from duoka.model.result import write_result

    folder = tmp_path_factory.mktemp("final")
    write_tiny_model(folder / "tied", dtype="bfloat16")
    write_tiny_model(folder / "odd", tied=False, odd=True)
    data = write_conversations(folder / "chats.jsonl", 8)
    (folder / "run.yaml").write_text(
        f"model: {folder / 'tied'}\ndata: {{train: [{data}]}}\ntrain: {{precision: fp32}}\n", encoding="utf-8"
    )
    from transformers import PreTrainedModel

    before = PreTrainedModel.save_pretrained.__defaults__
    try:
        for model in ("tied", "odd"):
            lm = load_model(ModelRequest(folder / model, dtype=torch.float32))
            for split in ("50GB", SPLIT):
                split_by_size(split)
                write_result(lm, folder / model, folder / f"{model}-oracle-{split}")
    finally:
        PreTrainedModel.save_pretrained.__defaults__ = before
    return folder


@pytest.mark.timeout(180)
@pytest.mark.parametrize("processes", sorted(LAYOUTS))
def test_all_ranks_write_the_files_that_one_process_writes(place, processes):
    run_world(processes, write_all, place, ("tied", "odd"), LAYOUTS[processes], SPLIT, processes)
    for model in ("tied", "odd"):
        want = files_of(place / f"{model}-oracle-{SPLIT}")
        assert "model.safetensors.index.json" in want, "one file: this test shows little"
        for strategy in LAYOUTS[processes]:
            run = place / f"{model}-{strategy}-{processes}"
            assert files_of(run / "final") == want, f"{model}, {strategy}"
            assert not list(run.glob(".final*"))


def write_once(folder, fails_on):
    """One result of two ranks; a disk that is full on one of them."""
    import duoka.store.final_folder as room
    from duoka.comm.world import World, end_world, start_world
    from duoka.config.schema import ParallelConfig
    from duoka.model.build import load_model
    from duoka.model.request import ModelRequest
    from duoka.parallel.mesh import build_mesh
    from duoka.plan.layout import Layout

    world: World = start_world(ParallelConfig())
    mesh = build_mesh(Layout(dp=2, strategy="ddp"), world)
    lm = load_model(ModelRequest(folder / "odd", dtype=torch.float32))
    sources = room.ResultSources(folder / "odd", folder / "odd")
    target = folder / "full-disk" / "final"
    if world.is_main:
        target.parent.mkdir(exist_ok=True)
    world.barrier()
    write_run = room.write_run
    calls = []

    def full(handle, raw, where, heart):
        calls.append(where)
        if world.rank == fails_on and len(calls) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_run(handle, raw, where, heart)

    room.write_run = full
    with pytest.raises(StorageError, match="No space left"):
        room.write_final(lm, mesh, lambda: sources, target)
    world.barrier()  # rank 0 has cleaned up when it is here
    assert not list(target.parent.iterdir()), "half a result was left"
    world.barrier()
    room.write_run = write_run
    room.write_final(lm, mesh, lambda: sources, target)
    end_world(world)


@pytest.mark.timeout(120)
def test_a_full_disk_on_one_rank_is_told_by_all_and_leaves_nothing(place):
    run_world(2, write_once, place, 1)
    assert files_of(place / "full-disk" / "final") == files_of(place / "odd-oracle-50GB")


def write_adapters_once(folder, target):
    """One result of two ranks that rank 0 alone writes, by a library that raises no OSError for a full disk."""
    import resource

    from peft import LoraConfig, get_peft_model

    from duoka.comm.world import end_world, start_world
    from duoka.config.schema import ParallelConfig
    from duoka.model.build import load_model
    from duoka.model.request import ModelRequest
    from duoka.parallel.mesh import build_mesh
    from duoka.plan.layout import Layout
    from duoka.store.final_folder import ResultSources, write_final

    world = start_world(ParallelConfig())
    mesh = build_mesh(Layout(dp=2, strategy="ddp"), world)
    lm = get_peft_model(load_model(ModelRequest(folder / "odd", dtype=torch.float32)), LoraConfig())
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    with pytest.raises(StorageError, match=r"File too large[\s\S]*ulimit -f"):
        write_final(lm, mesh, lambda: ResultSources(folder / "odd", folder / "odd"), target)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    world.barrier()
    assert not list(target.parent.iterdir()), "half a result was left"
    end_world(world)


@pytest.mark.timeout(120)
def test_adapters_that_find_no_room_are_told_by_all_too(place, tmp_path):
    """safetensors' own error left rank 0 as a bug, and the others in a wait for it."""
    run_world(2, write_adapters_once, place, tmp_path / "final")


def die_in_the_middle(folder, target):
    import duoka.store.final_folder as room
    from duoka.comm.world import World
    from duoka.model.build import load_model
    from duoka.model.request import ModelRequest
    from duoka.parallel.mesh import Mesh

    room.write_run = lambda *_: os._exit(9)
    lm = load_model(ModelRequest(folder / "odd", dtype=torch.float32))
    sources = room.ResultSources(folder / "odd", folder / "odd")
    room.write_final(lm, Mesh(World()), lambda: sources, target)


@pytest.mark.timeout(120)
def test_a_crash_in_the_middle_leaves_what_was_there_before(place, tmp_path):
    from duoka.model.build import load_model
    from duoka.model.request import ModelRequest
    from duoka.parallel.mesh import Mesh
    from duoka.store.final_folder import ResultSources, write_final

    target = tmp_path / "final"
    target.mkdir()
    (target / "old").write_text("result", encoding="utf-8")
    with pytest.raises(AssertionError, match="exit codes"):
        run_world(1, die_in_the_middle, place, target)
    assert files_of(target) == {"old": b"result"}
    lm = load_model(ModelRequest(place / "odd", dtype=torch.float32))
    write_final(lm, Mesh(), lambda: ResultSources(place / "odd", place / "odd"), target)
    assert files_of(target) == files_of(place / "odd-oracle-50GB")
    assert [path.name for path in tmp_path.iterdir()] == ["final"], "drafts of the process that died are left"
