"""The largest micro-batch before the first step: it finds too little memory, and changes no bit of what follows."""

import json
from pathlib import Path

import pytest
import torch
from tiny import write_conversations, write_tiny_model
from worlds import train_all

from duoka.data.feed.loader import Batch
from duoka.errors import DoesNotFit
from duoka.train import rehearse

YAML = """
model: {name: model}
data: {train: [chats.jsonl], max_length: 64}
train: {global_batch: 4, micro_batch: "64 tokens", max_steps: 3, precision: fp32, recompute: none}
lora: {rank: 4, dropout: 0.3}
checkpoint: {every: 100}
log: {to: []}
"""


@pytest.fixture(scope="module")
def yaml(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rehearsal")
    write_tiny_model(folder / "model")
    write_conversations(folder / "chats.jsonl", 24)
    (folder / "run.yaml").write_text(YAML, encoding="utf-8")
    return folder / "run.yaml"


@pytest.mark.parametrize(
    "strategies", [("ddp", "fsdp"), pytest.param(("zero1",), marks=pytest.mark.nightly)], ids="-".join
)
def test_a_rehearsal_changes_no_loss_and_no_weight(yaml, tmp_path, strategies):
    jobs = [
        (str(yaml), [f"parallel.strategy={strategy}", f"train.rehearse={how}"], str(tmp_path / f"{strategy}-{how}"))
        for strategy in strategies
        for how in ("false", "true")
    ]
    train_all(jobs, 2)
    for (_, words, without), (_, _, with_it) in zip(jobs[::2], jobs[1::2], strict=True):
        assert steps_of(without) == steps_of(with_it), words
        assert len(steps_of(without)) == 3


def steps_of(folder):
    """Loss, gradient norm and bytes sent of each step, to the last bit."""
    from duoka.runs.events import global_log
    from duoka.runs.folder import RunFolder

    lines = global_log(RunFolder(Path(folder))).read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines]
    return [(one["loss"], one["grad_norm"], one.get("sent_bytes")) for one in events if one["type"] == "step"]


@pytest.mark.parametrize("packing", [True, False])
def test_the_largest_micro_batch_is_as_large_as_the_plan_says(packing):
    batch = rehearse.largest_batch(150, 64, packing)
    assert isinstance(batch, Batch) and batch.input_ids.numel() >= 150
    assert int(batch.position_ids.max()) == 63
    assert batch.boundaries is None or batch.boundaries.tolist() == [0, 64, 128, 150]


def test_state_that_does_not_fit_is_said_in_second_one(monkeypatch):
    from types import SimpleNamespace

    from duoka.comm.world import World
    from duoka.config.schema import RunConfig
    from duoka.plan.hardware import Machine
    from duoka.plan.report import make_plan
    from duoka.plan.shape import demo_shape

    def out_of_memory(*args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nmore")

    config = RunConfig.model_validate({"model": "demo", "data": {"train": ["x"]}})
    plan = make_plan(config, demo_shape(), Machine(2, 2**34, 2**33), 1)
    parallel = SimpleNamespace(named_trainable=dict, optimizer_tensors=out_of_memory)
    guard = SimpleNamespace(world=World(), plan=plan)
    with pytest.raises(DoesNotFit, match="optimizer's state do not fit") as caught:
        rehearse.rehearse_largest(parallel, None, None, guard)
    assert "lora" in str(caught.value) and caught.value.exit_code == 4
    assert not rehearse.is_asked(config.train, World())


def test_what_is_rehearsed_is_computed_whole(tiny_model):
    """Its samples are made of one token: shared prefixes would leave one of them."""
    from types import SimpleNamespace

    from duoka.comm.world import World
    from duoka.config.schema import RunConfig
    from duoka.model.build import LossModel, load_model
    from duoka.model.request import ModelRequest
    from duoka.parallel.inputs import model_inputs
    from duoka.plan.layout import Layout

    model, seen = LossModel(load_model(ModelRequest(tiny_model, dtype=torch.float32))), []
    model.no_sharing = ""
    model.core.get_input_embeddings().register_forward_hook(lambda _, given, __: seen.append(given[0].shape[1]))

    def attempt(batch, objective):
        for micro in batch.micro_batches:
            model(**model_inputs(micro, torch.device("cpu")))

    engine = SimpleNamespace(bare=model, model=model, try_rehearsal=attempt, optimizer_tensors=lambda optimizer: [])
    memory, task = SimpleNamespace(tokens=150, later=90), SimpleNamespace(lengths=None, max_length=64)
    guard = SimpleNamespace(
        world=World(), plan=SimpleNamespace(memory=memory, task=task, layout=Layout()),
        config=RunConfig.model_validate({"model": "demo", "data": {"train": ["x"], "max_length": 64}}),
        until_it_fits=lambda attempt, batch, lay_out: attempt(batch),
    )  # fmt: skip
    rehearse.rehearse_largest(engine, None, None, guard)
    assert seen == [150, 90] and model.no_sharing == ""
