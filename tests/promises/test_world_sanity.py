"""Promise 6: ranks whose code, config or data differ are refused, and replicas that drift are found and named."""

import contextlib
import io
import os
import socket
import time

import pytest
import torch
from tiny import write_conversations, write_tiny_model
from worlds import free_port, run_world

import duoka.train.run as train_run
from duoka.comm.checksum import checksum
from duoka.comm.world import check_same_everywhere, end_world, start_world
from duoka.config.load import load_config
from duoka.config.schema import ParallelConfig
from duoka.errors import ConfigError, DuokaError, WorkerFailed
from duoka.parallel.mesh import build_mesh
from duoka.plan.layout import Layout
from duoka.process.lifeline import PARENT_PID
from duoka.runs.folder import RunFolder
from duoka.train.main import read_inputs
from duoka.train.replicas import check_replicas
from duoka.train.run import build_run


def expect(kind, words, action):
    """`action` must fail with these words in its message, on this rank too."""
    try:
        action()
    except kind as error:
        missing = [word for word in words if word not in str(error)]
        assert not missing, f"{missing} not in: {error}"
        return
    raise AssertionError(f"no {kind.__name__} was raised")


def wait_alone(port):
    """One process of three: what torch says of it is put into words, and nobody waits for ever."""
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="3", LOCAL_WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    expect(
        WorkerFailed,
        ["rank 0: the rendezvous of 3 processes", "did not complete within 2s", f"127.0.0.1:{port}", "RANK of"],
        lambda: start_world(ParallelConfig(timeout="2s")),
    )


def test_fewer_processes_than_asked_for_are_refused():
    run_world(1, wait_alone, free_port())


def meet_again_and_again(launched):
    """Each time another rank is late for the next world, or still in the last one while the others wait for it."""
    if launched:  # as ranks of our own launcher, whose store listens on loopback only
        os.environ[PARENT_PID] = str(os.getppid())
    for turn in range(7):
        world = start_world(ParallelConfig(timeout="20s"))
        assert world.sum([world.rank, turn]) == [3.0, 3.0 * turn]
        if turn % 3 == world.rank:
            time.sleep(0.2)
        end_world(world)
        if (turn + 1) % 3 == world.rank:
            time.sleep(0.2)


@pytest.mark.parametrize("launched", [False, True])
def test_the_same_processes_make_one_world_after_another(launched):
    run_world(3, meet_again_and_again, launched)


def bring_another(yamls, run_folder, change, word):
    """Rank 1 comes with another config, model or data: refused on both ranks before anything is built."""
    from duoka.train.main import run_in_world

    world = start_world(ParallelConfig())
    run = RunFolder(run_folder)
    run.make()
    inputs = read_inputs(load_config(yamls[world.rank], change if world.rank else []), run)
    words = [f"{word} is not the same on all ranks", "rank 0: ", "rank 1: "]
    expect(ConfigError, words, lambda: run_in_world(inputs, world))
    end_world(world)


@pytest.mark.parametrize("what", ["optim.lr", "model", "training data"])
def test_a_rank_with_another_config_model_or_data_is_refused(tmp_path, what):
    """Two machines with the same paths, and other files behind them."""
    yamls = []
    for name in ("here", "there"):
        folder, is_other = tmp_path / name, name == "there"
        write_tiny_model(folder / "model", seed=int(is_other and what == "model"))
        write_conversations(folder / "chats.jsonl", 8, seed=int(is_other and what == "training data"))
        (folder / "run.yaml").write_text("model: ./model\ndata: {train: [./chats.jsonl]}\n", encoding="utf-8")
        yamls.append(str(folder / "run.yaml"))
    change = ["optim.lr=1.0e-3"] if what == "optim.lr" else []
    run_world(2, bring_another, yamls, tmp_path / "out", change, what)


def meet_mismatched_ranks():
    world = start_world(ParallelConfig())
    check_same_everywhere(world, {"config": "same", "torch": "2"})
    mine = "abc" if world.rank == 0 else "xyz"
    expect(
        ConfigError,
        ["training data is not the same", "rank 0: abc", "rank 1: xyz"],
        lambda: check_same_everywhere(world, {"config": "same", "training data": mine}),
    )
    end_world(world)


def test_ranks_with_other_data_are_named_before_the_first_step():
    run_world(2, meet_mismatched_ranks)


def flip_one_weight(yaml, folder):
    loaded = load_config(yaml, ["parallel.strategy=ddp"])
    run = RunFolder(folder)
    run.make()
    inputs = read_inputs(loaded, run)
    world = start_world(loaded.config.parallel)
    contents = build_run(inputs, world).contents
    check_replicas(contents, world)
    name = "model.layers.1.mlp.up_proj.weight"
    if world.rank == 1:
        weight = contents.engine.named_trainable()[name].detach()
        weight.view(torch.int32)[3, 4] ^= 1  # the lowest bit of one weight
    expect(WorkerFailed, ["replicas differ", "rank 1", name], lambda: check_replicas(contents, world))
    end_world(world)


def test_a_replica_that_drifts_is_found_and_its_tensor_named(tmp_path, tiny_model):
    data = write_conversations(tmp_path / "chats.jsonl", 8)
    yaml = tmp_path / "run.yaml"
    yaml.write_text(f"model: {tiny_model}\ndata: {{train: [{data}]}}\n", encoding="utf-8")
    run_world(2, flip_one_weight, str(yaml), tmp_path / "out")


def start_with_a_flipped_bit(yaml, folder, is_frozen, flips):
    """Rank 1 reads one bit of one weight otherwise, in a place that no sample of the files looks at."""
    lora = ["lora={rank: 2}"] if is_frozen else []
    loaded = load_config(yaml, ["parallel.strategy=ddp", *lora])
    run = RunFolder(folder)
    run.make()
    inputs = read_inputs(loaded, run)
    world = start_world(loaded.config.parallel)
    load = train_run.load_model

    def load_otherwise(request):
        lm = load(request)
        weight = dict(lm.named_parameters())[FROZEN if is_frozen else TRAINED]
        assert weight.requires_grad != is_frozen
        weight.detach().view(torch.int32)[3, 5] ^= world.rank * flips
        return lm

    train_run.load_model = load_otherwise
    if flips:
        name = FROZEN if is_frozen else TRAINED
        words = ["the weights are not the same on all ranks", "rank 1", name]
        expect(ConfigError, words, lambda: build_run(inputs, world))
    else:
        build_run(inputs, world)
    end_world(world)


TRAINED = "model.layers.1.mlp.up_proj.weight"
FROZEN = "base_model.model.model.layers.1.mlp.up_proj.base_layer.weight"


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("flips", [False, True])
def test_weights_that_differ_at_the_start_are_refused(tmp_path, tiny_model, is_frozen, flips):
    data = write_conversations(tmp_path / "chats.jsonl", 8)
    yaml = tmp_path / "run.yaml"
    yaml.write_text(f"model: {tiny_model}\ndata: {{train: [{data}]}}\n", encoding="utf-8")
    run_world(2, start_with_a_flipped_bit, str(yaml), tmp_path / "out", is_frozen, flips)


def test_the_checksum_sees_every_bit_and_every_name():
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(3.0)}
    seen = {checksum(tensors)}
    seen.add(checksum({"a": tensors["a"].reshape(3, 2), "b": tensors["b"]}))
    seen.add(checksum({"a": tensors["a"].flip(0), "b": tensors["b"]}))  # same sum, other places
    seen.add(checksum({"c": tensors["a"], "b": tensors["b"]}))
    seen.add(checksum({"a": tensors["a"].to(torch.bfloat16), "b": tensors["b"]}))
    assert len(seen) == 5


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_checksum_sees_one_flipped_bit_and_two_swapped_elements(dtype, monkeypatch):
    import duoka.comm.checksum as room

    monkeypatch.setattr(room, "CHUNK_LENGTH", 16)  # places in several chunks
    torch.manual_seed(0)
    bits = torch.randint(0, 2 if dtype is torch.bool else 256, (41 * dtype.itemsize,), dtype=torch.uint8)
    tensor = bits.view(dtype)

    def number():
        return checksum({"a": tensor})

    whole, flipped = number(), set()
    for place in range(len(bits)):
        for bit in range(1 if dtype is torch.bool else 8):
            bits[place] ^= 1 << bit
            flipped.add(number())
            bits[place] ^= 1 << bit
    assert whole not in flipped
    for one in range(0, 41, 5):
        for other in range(one + 1, 41):
            if not torch.equal(tensor[one : one + 1], tensor[other : other + 1]):
                order = list(range(41))
                order[one], order[other] = other, one
                assert checksum({"a": tensor[order]}) != whole, f"{one} and {other} changed places"
    assert number() == whole


def test_the_checksum_compares_bits_and_takes_any_layout(monkeypatch):
    zeros = torch.zeros(4)
    signed = torch.tensor([0.0, -0.0, 0.0, 0.0])
    assert torch.equal(zeros, signed)
    swapped = signed[[1, 0, 2, 3]]
    assert len({checksum({"a": one}) for one in (zeros, signed, swapped)}) == 3
    nan = torch.full((3,), float("nan"))
    assert checksum({"a": nan}) == checksum({"a": nan.clone()})
    grid = torch.randn(6, 5)
    assert checksum({"a": grid.t()}) == checksum({"a": grid.t().contiguous()})
    assert checksum({"a": grid[1:][:, 2]}) == checksum({"a": grid[1:, 2].clone()})
    assert checksum({"a": torch.randn(5)[1:1]}) == checksum({"a": torch.empty(0)})


ENVIRONMENTS = {
    "a world without an address": ({"RANK": "0", "WORLD_SIZE": "2"}, "lacks LOCAL_RANK, MASTER_ADDR, MASTER_PORT"),
    "a rank without a world": ({"RANK": "0"}, "lacks WORLD_SIZE"),
    "a rank outside": (
        {"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "x", "MASTER_PORT": "1"}, "outside",
    ),
    "a rank that is no number": ({"RANK": "one", "WORLD_SIZE": "1"}, "not a whole number"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ENVIRONMENTS)
def test_half_an_environment_never_becomes_a_world_of_one(monkeypatch, kind):
    variables, words = ENVIRONMENTS[kind]
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DuokaError, match=words):
        start_world(ParallelConfig())


def test_nccl_without_a_gpu_and_single_with_two_processes_are_refused(monkeypatch):
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no GPU"):
            start_world(ParallelConfig(backend="nccl"))
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "x",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setitem(os.environ, name, value)
    with pytest.raises(ConfigError, match="2 processes were started"):
        start_world(ParallelConfig(strategy="single"))


def deal_out_in_turn():
    """As `mpirun --map-by node` does: neighbors are on different machines, and no node's number is given."""
    rank = int(os.environ["RANK"])
    os.environ.update(LOCAL_RANK=str(rank // 2), LOCAL_WORLD_SIZE="2")
    socket.gethostname = lambda: f"node{rank % 2}"
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        world = start_world(ParallelConfig(timeout="60s"))
    assert world.node == rank % 2 and world.gather(world.node) == [0, 1, 0, 1]
    assert ("mpirun --map-by slot" in said.getvalue()) is (rank == 0)
    assert build_mesh(Layout(dp=4, strategy="zero1", shard=4), world).nodes() is None, "neighbors are of no machine"
    end_world(world)


def test_a_node_is_known_by_its_name_where_nobody_gives_its_number():
    run_world(4, deal_out_in_turn)
