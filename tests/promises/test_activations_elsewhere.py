"""parallel.offload: {activations: disk}: same bits as without it, less memory kept, nothing left behind."""

import gc
import json

import pytest
import torch
from families import write_family
from tiny import build_tiny_tokenizer, write_conversations, write_tiny_model
from torch.distributed.tensor import DTensor
from worlds import run_world, train_all, train_jobs

from duoka.errors import StorageError
from duoka.model.build import LossModel, load_model
from duoka.model.request import ModelRequest
from duoka.optim.disk_arena import DiskArena
from duoka.parallel.activations import ActivationsElsewhere, Entry, Home

pytestmark = pytest.mark.timeout(600)  # many runs come before the first test

AWAY = "parallel.offload={activations: disk}"
YAML = """
model: {{name: {model}}}
data: {{train: [{data}], max_length: 256, packing: true}}
optim: {{lr: 1e-3}}
train: {{max_steps: 2, global_batch: 8, micro_batch: 300 tokens, precision: {precision}, seed: 5}}
log: {{to: []}}
output: {output}
"""
WAYS = {
    "single": (1, []),
    "recomputing": (1, ["train.recompute=full"]),
    "recomputing some": (1, ["train.recompute=1/2"]),
    "LoRA": (1, ["lora={rank: 4}"]),
    "padded": (1, ["data.packing=false"]),
    "alone, fsdp": (1, ["parallel.strategy=fsdp"]),
    "ddp": (2, ["parallel.strategy=ddp"]),
    "fsdp": (2, ["parallel.strategy=fsdp"]),
    "tensor": (2, ["parallel.tensor=2"]),
    "sequence": (2, ["parallel.sequence=2"]),
}
# Copies are there and back in any type; what decides in which one an activation is kept differs by these.
CASES = [("fp32", name) for name in WAYS] + [("bf16", name) for name in ("single", "LoRA", "fsdp", "tensor")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("away")


@pytest.fixture(scope="module")
def runs(folder):
    """Every case as it is and with its activations away."""
    model = write_tiny_model(folder / "model", layers=5)
    data = write_conversations(folder / "chats.jsonl", 60, seed=3, longest=8)
    worlds = {}
    for precision in ("fp32", "bf16"):
        yaml = folder / f"{precision}.yaml"
        yaml.write_text(YAML.format(model=model, data=data, precision=precision, output=folder / "out"))
    for precision, name in CASES:
        size, settings = WAYS[name]
        alone = size == 1 and any("fsdp" in one for one in settings)
        for where in ((), (AWAY,)):
            place = folder / f"{precision} {name}{' away' if where else ''}"
            job = (str(folder / f"{precision}.yaml"), [*settings, *where], str(place))
            worlds.setdefault((size, alone), []).append(job)
    for (size, _), jobs in sorted(worlds.items()):
        train_all(jobs, size)
    return folder


def steps(run):
    lines = [json.loads(line) for line in (run / "events" / "run.jsonl").read_text().splitlines()]
    return [(line["loss"], line["grad_norm"]) for line in lines if line["type"] == "step"]


@pytest.mark.parametrize(("precision", "name"), CASES)
def test_same_bits(runs, precision, name):
    ours, plain = steps(runs / f"{precision} {name} away"), steps(runs / f"{precision} {name}")
    assert len(plain) == 2 and ours == plain


def held(run):
    lines = [json.loads(line) for line in (run / "events" / "run.jsonl").read_text().splitlines()]
    return next(line["ranks"][0] for line in lines if line["type"] == "memory")


@pytest.mark.parametrize("name", ["single", "fsdp", "recomputing"])
def test_files_hold_them(runs, name):
    assert held(runs / f"fp32 {name} away")["disk_bytes"] > 0 == held(runs / f"fp32 {name}")["disk_bytes"]


def test_no_file_is_left(runs):
    assert not list(runs.rglob("*duoka-offload*"))


def note_what_moves(jobs):
    """In rank 0: the sizes of what goes to files are none of a weight, its part or copies of either."""
    sizes, models = set(), []
    home_put, begin = Home.put, ActivationsElsewhere.__init__
    Home.put = lambda self, held, ready: sizes.add(held.numel()) or home_put(self, held, ready)
    ActivationsElsewhere.__init__ = lambda self, bare, *rest: models.append(bare) or begin(self, bare, *rest)

    def check():
        weights = {}
        for name, one in models[-1].named_parameters():
            part = one.to_local() if isinstance(one, DTensor) else one
            counts = {one.numel(), part.numel(), *([one.numel() // len(one)] if one.dim() > 2 else [])}  # an expert's
            weights |= {count * size: name for count in counts for size in (2, 4)}
        assert sizes and not weights.keys() & sizes, [weights[size] for size in weights.keys() & sizes]
        sizes.clear()

    train_jobs([one for job in jobs for one in (job, check)])


def test_weights_stay_however_they_are_shared_out(tmp_path):
    """A rank's part of a weight is a view when it multiplies, and so is one expert's of what all have in one tensor."""
    wide = write_tiny_model(tmp_path / "wide", hidden=344, layers=3)  # wider than any document is long
    mixture = write_family(
        tmp_path / "mixture", "mixtral", tokenizer=build_tiny_tokenizer(), hidden_size=272, intermediate_size=352
    )
    # Experts by one function, whose kept rows are fewer than half of the width: none has as many bytes as a weight.
    tall = write_family(
        tmp_path / "tall", "mixtral", tokenizer=build_tiny_tokenizer(), hidden_size=1600, intermediate_size=72
    )
    data = write_conversations(tmp_path / "chats.jsonl", 20, seed=3)
    jobs = []
    for number, (model, precision, *how) in enumerate(
        [
            (wide, "bf16", "parallel.tensor=2"),
            (wide, "fp32", "parallel.tensor=2", "lora={rank: 4}"),
            (mixture, "fp32", "parallel.strategy=fsdp"),
            (tall, "bf16", "parallel.strategy=ddp"),
            (mixture, "bf16", "parallel.expert=2"),
        ]
    ):
        yaml = tmp_path / f"{number}.yaml"
        place = yaml.with_suffix("")
        yaml.write_text(YAML.format(model=model, data=data, precision=precision, output=place), encoding="utf-8")
        # No mask of such a length has a weight's size.
        jobs.append((str(yaml), [AWAY, "train.max_steps=1", "data.max_length=250", *how], str(place)))
    run_world(2, note_what_moves, jobs)


# --- one model, in this process ---


@pytest.fixture
def model(tmp_path):
    folder = write_tiny_model(tmp_path / "model", layers=6)
    return LossModel(load_model(ModelRequest(folder, dtype=torch.float32)))


def batch(tokens=512):
    ids = torch.randint(200, (1, tokens), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids, "position_ids": torch.arange(tokens)[None]}


def gradients(model):
    model.zero_grad()
    model(**batch())[0].backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("where", ["files", "host memory"])
def test_all_layers_but_the_last_are_away_when_the_backward_pass_begins(model, tmp_path, where):
    plain = gradients(model)
    moved = ActivationsElsewhere(model, torch.device("cpu"), tmp_path if where == "files" else None)
    model.zero_grad()
    loss = model(**batch())[0]
    moved.later(lambda: None).result()  # the thread has done what it was given
    entries = [one for one in gc.get_objects() if type(one) is Entry]  # not isinstance: others leave weak references
    assert len({id(one.layer) for one in entries if one.place is not None and one.held is None}) == 5
    assert len({id(one.layer) for one in entries if one.held is not None}) == 1
    del entries
    loss.backward()
    ours = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))
    once = moved.moved_bytes
    assert all(torch.equal(a, b) for a, b in zip(plain, gradients(model), strict=True)) and once > 0
    assert moved.moved_bytes == 2 * once


def test_room_is_used_again_and_a_pass_without_a_backward_gives_it_back(model, tmp_path):
    moved = ActivationsElsewhere(model, torch.device("cpu"), tmp_path)
    gradients(model)
    size = moved.disk_bytes
    for _ in range(3):
        loss = model(**batch())[0]
        del loss
        gradients(model)
    assert moved.disk_bytes == size


def test_nothing_moves_where_nothing_is_learned(model, tmp_path):
    moved = ActivationsElsewhere(model, torch.device("cpu"), tmp_path)
    with torch.no_grad():
        model(**batch())
    assert moved.moved_bytes == moved.disk_bytes == 0


def test_weights_stay(model, tmp_path):
    """Also the narrow copies that autocast makes of them."""
    moved = ActivationsElsewhere(model, torch.device("cpu"), tmp_path)
    seen = []
    home_put = moved.home.put
    moved.home.put = lambda held, ready: seen.append(held.numel()) or home_put(held, ready)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**batch(300))[0]
    loss.backward()
    weights = {parameter.numel() * size for parameter in model.parameters() for size in (2, 4)}
    assert seen and not weights & set(seen)


def test_what_comes_back_otherwise_is_refused(tmp_path):
    arena = DiskArena(tmp_path, "activations")
    piece = arena.put(torch.arange(100_000, dtype=torch.int32).view(torch.uint8))
    assert torch.equal(arena.get(piece).view(torch.int32), torch.arange(100_000, dtype=torch.int32))
    piece.file.write_tensor(piece.start + 70_001, torch.ones(1, dtype=torch.uint8) * 77)
    with pytest.raises(StorageError, match="other than it was written"):
        arena.get(piece)


def test_a_disk_that_fails_ends_the_pass(model, tmp_path, monkeypatch):
    ActivationsElsewhere(model, torch.device("cpu"), tmp_path)

    def fail(self, start, values):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("duoka.optim.disk_file.DiskFile.write_tensor", fail)
    loss = model(**batch())[0]
    with pytest.raises(StorageError, match="cannot be read or written"):
        loss.backward()


def test_pieces_side_by_side_become_one(tmp_path):
    arena = DiskArena(tmp_path, "what is tried")
    pieces = [arena.put(torch.zeros(size, dtype=torch.uint8)) for size in (1, 5000, 20_000, 64)]
    size = arena.size_bytes
    starts = [piece.start for piece in pieces]
    assert starts == sorted(starts) and all(start % 4096 == 0 for start in starts)
    del pieces
    gc.collect()
    whole = arena.put(torch.zeros(size, dtype=torch.uint8))
    assert arena.size_bytes == size and whole.start == 0
