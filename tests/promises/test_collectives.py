"""`duoka comm test` in a world that stands already, and the forms of collectives that strategies use."""

import contextlib
import io
import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from worlds import run_world

from duoka.bench.collectives import check_collectives
from duoka.comm import collectives
from duoka.comm.ledger import LEDGER
from duoka.comm.world import end_world, start_world
from duoka.config.schema import ParallelConfig
from duoka.errors import WorkerFailed
from duoka.units import parse_bytes

KINDS = (
    "all-reduce", "reduce-scatter", "all-gather", "all-to-all", "broadcast", "reduce", "scatter", "gather",
    "send/recv", "barrier",
)  # fmt: skip


def see_it_all(folder):
    """As a member of somebody else's world: the command, then what it is made of."""
    from duoka.cli import run

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert run(["comm", "test", "--size", "4 KiB", "--rounds", "2", "--json"]) == 0
    world = start_world(ParallelConfig())
    if world.is_main:
        Path(folder, f"report-{world.size}.json").write_text(said.getvalue())
    else:
        assert not said.getvalue(), "said once, not once per rank"
    compare_with_sums(world)
    for name in ("all_reduce", "all_to_all_single", "broadcast", "gather"):
        tell_a_lie(world, name)
    end_world(world)


def embed_together(folder, model):
    """Every line's row is there once, and in its place, whoever computed it."""
    import numpy as np

    from duoka.serve.embed import embed
    from duoka.serve.load_run import find_trained

    texts = [f"text {'x' * (place % 7)} {place}" for place in range(101)]
    trained = find_trained(model, say=print)
    embed(trained, texts, Path(folder, "together.npy"), max_length=64)
    if int(os.environ["RANK"]) == 0:
        for name in ("RANK", "WORLD_SIZE"):
            del os.environ[name]
        embed(trained, texts, Path(folder, "alone.npy"), max_length=64)
        together, alone = (np.load(Path(folder, f"{name}.npy")) for name in ("together", "alone"))
        assert together.shape == alone.shape and np.abs(together - alone).max() < 1e-2
        assert len(np.unique(together.round(4), axis=0)) > 90, "rows differ from each other"


def test_embedding_on_three_processes_gives_the_rows_of_one(tmp_path, tiny_model):
    run_world(3, embed_together, str(tmp_path), str(tiny_model))


def compare_with_sums(world):
    """Reduce-scatter against sums that this process draws itself; bf16 is rounded once; `whole` is left alone."""
    numel, device = 6 * world.size, world.device
    for dtype in (torch.float32, torch.bfloat16):
        drawn = [torch.randn(numel, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(world.size)]
        mine, shard = drawn[world.rank].to(device, copy=True), torch.empty(6, dtype=dtype, device=device)
        LEDGER.take()
        collectives.reduce_scatter(shard, mine)
        wanted = torch.stack(drawn).float().sum(0)[6 * world.rank : 6 * world.rank + 6].to(dtype)
        if world.backend == "gloo":
            assert torch.equal(shard, wanted)
        assert torch.allclose(shard.cpu().float(), wanted.float(), rtol=2e-2, atol=2e-2)  # NCCL rounds on its way
        assert torch.equal(mine.cpu(), drawn[world.rank])
        counted = LEDGER.take()["reduce-scatter"]
        assert counted.buffer_bytes == numel * dtype.itemsize
        assert counted.sent_bytes == 6 * dtype.itemsize * (world.size - 1)
    whole = torch.empty(2 * world.size, device=device)
    work = collectives.start_all_gather(whole, torch.full((2,), float(world.rank), device=device))
    work.wait()
    assert whole.tolist() == [float(rank) for rank in range(world.size) for _ in range(2)]
    assert LEDGER.waited_s > 0


def tell_a_lie(world, name):
    """One rank's answer of one collective is off by one at one place: every rank says so, and which rank it is."""
    plain = getattr(dist, name)

    def lie(*arguments, **options):
        answer = plain(*arguments, **options)
        target = arguments[1] if name == "gather" else arguments[0]
        if world.rank == 0 and target is not None:
            (target[1] if isinstance(target, list) else target)[3] += 1.0
        return answer

    setattr(dist, name, lie)
    try:
        with pytest.raises(WorkerFailed, match=r"gave rank 0 wrong values: 1 of .*, first at place \d+"):
            check_collectives(world, 4096, 1)
    finally:
        setattr(dist, name, plain)


@pytest.mark.parametrize("size", [2, 3])
def test_every_collective_is_checked_and_measured(tmp_path, size):
    run_world(size, see_it_all, str(tmp_path))
    report = json.loads((tmp_path / f"report-{size}.json").read_text())
    assert [one["name"] for one in report["collectives"]] == list(KINDS)
    assert report["world_size"] == size and report["backend"] == "gloo"
    assert all(one["bus_bytes_per_s"] > 0 for one in report["collectives"] if one["buffer_bytes"])


def test_bytes_are_read_as_people_write_them():
    assert parse_bytes("16 MiB") == 16 * 2**20 and parse_bytes("1.5GB") == 1_500_000_000 and parse_bytes("7") == 7
    for wrong in ("16 furlongs", "", "-1 MiB", "0"):
        with pytest.raises(ValueError):
            parse_bytes(wrong)
