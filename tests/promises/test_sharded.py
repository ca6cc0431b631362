"""What each strategy exchanges and holds: its own collectives, its own bytes, the oracle's gradients; and changing it."""

import gc
import json
import shutil
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from oracle import train as oracle_train
from safetensors.torch import load_file, save_file
from test_any_split import RECIPE, TOLERANCE, YAML, read_run, relative, worst
from tiny import write_conversations, write_tiny_model
from worlds import run_world, train_all

MICRO_BATCHES = 3
LAYERS = 4
STRATEGIES = ("ddp", "zero1", "zero2", "fsdp", "hsdp")
PAIRS = "parallel.shard_ranks=2"


def build(yaml, overrides, folder, world=None):
    """(inputs, world, plan, contents, loader) of a run that is not trained."""
    from duoka.config.load import load_config
    from duoka.parallel.world import start_world
    from duoka.runs.folder import RunFolder
    from duoka.train.main import _agree_on_plan, _build_contents, _build_loader, read_inputs

    run = RunFolder(Path(folder))
    run.make()
    loaded = load_config(yaml, overrides)
    inputs = read_inputs(loaded, run)
    world = world or start_world(loaded.config.parallel)
    plan = _agree_on_plan(inputs, world, None)
    contents = _build_contents(inputs, plan, world)
    return inputs, world, plan, contents, _build_loader(inputs, plan, world)


def live_bytes():
    """Unique storages of all tensors that Python can see, their gradients too."""
    gc.collect()
    warnings.simplefilter("ignore")  # asking odd objects for their type wakes some of torch's deprecations
    tensors = [thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor)]
    tensors += [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in local if not t.is_meta}
    return sum(storages.values())


def look_at(yaml, strategies, folder):
    """For each strategy: collectives by kind of one step of three micro-batches, bytes held in it, its gradients."""
    from duoka.optim.build import optimizer_tensors
    from duoka.parallel.world import end_world
    from duoka.plan.memory import static_memory
    from duoka.train.step import forward_backward, model_inputs, StepTimes

    world = None
    for strategy in strategies:
        before = live_bytes()
        overrides = [f"parallel.strategy={strategy}", PAIRS, "data.packing=false", "train.micro_batch=1"]
        inputs, world, plan, contents, loader = build(yaml, overrides, f"{folder}/{strategy}", world)
        parallel, numerics = contents.parallel, contents.numerics
        held = optimizer_tensors(contents.optimizer, parallel.named_trainable())  # as after a first step
        batch = next(loader.from_cursor(0, 0, 1.0))
        device = torch.device("cpu")
        # Bytes: in the middle of a step, when all that it accumulates is there.
        micro = batch.micro_batches[0]
        with parallel.exchange(False):
            loss, _ = parallel.model(**model_inputs(micro, device))
            loss.backward()
        del loss, held
        measured = live_bytes() - before
        with parallel.exchange(True):
            parallel.model(**model_inputs(micro, device))[0].backward()
        contents.optimizer.zero_grad()
        # Collectives and gradients: a step of several micro-batches.
        short = replace(batch, micro_batches=batch.micro_batches[:MICRO_BATCHES])
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as trace:
            forward_backward(parallel, short, numerics, device, StepTimes())
        names = Counter(event.name for event in trace.events() if event.name.startswith("c10d::"))
        contents.optimizer.zero_grad()
        forward_backward(parallel, batch, numerics, device, StepTimes())
        whole = {
            name: (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad).clone()
            for name, p in parallel.named_trainable().items()
        }
        facts = {
            "collectives": names,
            "measured": measured,
            "planned": static_memory(plan.work, plan.layout).total_bytes,
        }
        (Path(folder) / f"{strategy}-{world.rank}.json").write_text(json.dumps(facts))
        if world.is_main:
            save_file(whole, f"{folder}/{strategy}.safetensors")
        del parallel, numerics, contents, loader, batch, short, micro, inputs, trace, whole, facts
    end_world(world)


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    data = write_conversations(folder / "chats.jsonl", 34, seed=3)
    model = write_tiny_model(folder / "model")
    yaml = folder / "run.yaml"
    yaml.write_text(YAML.format(model=model, data=data, output=folder / "out"), encoding="utf-8")
    return folder, yaml, model, data


@pytest.fixture(scope="module")
def seen(case):
    """What `look_at` saw, by (number of processes, strategy)."""
    folder, yaml, _, _ = case
    found = {}
    for size, strategies in ((2, STRATEGIES[:-1]), (4, STRATEGIES[1:])):
        place = folder / f"look-{size}"
        place.mkdir()
        run_world(size, look_at, str(yaml), strategies, str(place))
        for strategy in strategies:
            facts = json.loads((place / f"{strategy}-0.json").read_text())
            found[size, strategy] = facts | {"gradients": load_file(place / f"{strategy}.safetensors")}
    return found


def test_each_strategy_has_its_own_collectives(seen):
    for key, facts in seen.items():
        print(key, facts["collectives"], facts["measured"], facts["planned"])
    raise SystemExit
