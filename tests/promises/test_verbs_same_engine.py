"""The same engine: a loop of verbs over duoka's loader gives losses and weights of `duoka train`, bit for bit."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_any_split import YAML, read_run
from tiny import write_conversations
from worlds import leave_garbage, run_world

# name -> settings of the run; 26 conversations in batches of 8: short last windows, micro-batches that differ.
RUNS = {
    "ddp": ["parallel.strategy=ddp", "train.micro_batch=300 tokens"],
    "fsdp": ["parallel.strategy=fsdp", "train.micro_batch=300 tokens"],
    "zero1": ["parallel.strategy=zero1", "data.packing=false", "train.micro_batch=2"],
    "adapters": ["parallel.strategy=ddp", "lora={rank: 3, dropout: 0.2}"],
}


def loop_of_verbs(yaml, overrides, folder):
    """What `duoka train` does, in the words of a loop of one's own; returns the steps' losses."""
    from duoka import Accelerator
    from duoka.compat.trainer import ScheduleLR
    from duoka.config.load import load_config
    from duoka.data.feed.epoch_plan import EpochPlan
    from duoka.data.feed.loader import Loader
    from duoka.data.feed.prefetch import EpochLoader
    from duoka.data.prepare import prepare_data
    from duoka.model.build import LossModel, load_model
    from duoka.model.request import ModelRequest
    from duoka.optim.build import build_optimizer
    from duoka.store.state import seed_everything
    from duoka.units import parse_amount

    loaded = load_config(yaml, overrides)
    config, model_folder = loaded.config, Path(loaded.config.model.name)
    data = prepare_data(config, loaded.base, model_folder)
    accelerator = Accelerator(strategy=config.parallel.strategy)
    plan = EpochPlan(
        data.train.lengths, data.train.num_targets, fingerprint=data.train.fingerprint, seed=config.train.seed,
        global_batch=parse_amount(config.train.global_batch),
    )  # fmt: skip
    micro = "1000000 tokens" if config.train.micro_batch == "auto" else config.train.micro_batch
    loader = Loader(
        data.train, plan, rank=accelerator.process_index, num_ranks=accelerator.num_processes,
        micro=parse_amount(micro), packing=config.data.packs, max_length=config.data.max_length, pad_id=data.pad_id,
    )  # fmt: skip
    seed_everything(config.train.seed)
    model = LossModel(
        load_model(ModelRequest(model_folder, dtype=torch.float32, lora=config.lora, seed=config.train.seed))
    )
    model.no_sharing = ""  # as in a run of `duoka train`
    named = {name: p for name, p in model.lm.named_parameters() if p.requires_grad}
    optimizer = build_optimizer(named, config.optim)
    schedule = ScheduleLR(optimizer, config.optim, epochs=2, steps_per_epoch=loader.num_steps(1))
    torch.manual_seed(config.train.seed + accelerator.process_index)
    schedule, loader, optimizer, model = accelerator.prepare(schedule, EpochLoader(loader), optimizer, model)
    model.train()
    losses, loss_sum = [], 0.0
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                loss, _ = model(**batch)
                accelerator.backward(loss, sum_over=(batch["labels"] != -100).sum())
                loss_sum += float(loss.detach().double())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), config.optim.clip)
                    total = accelerator.window.current.window_total
                    losses.append(accelerator.world.sum([loss_sum])[0] / total)
                    loss_sum = 0.0
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        Path(folder).mkdir(parents=True)
        save_file({name: tensor.clone() for name, tensor in state.items()}, f"{folder}/weights.safetensors")
        Path(folder, "losses.json").write_text(json.dumps(losses))
    accelerator.free_memory()


def train_both(jobs):
    from duoka.comm.world import end_world, start_world
    from duoka.config.load import load_config
    from duoka.runs.folder import RunFolder
    from duoka.train.main import read_inputs, run_in_world

    world = None
    for yaml, overrides, folder in jobs:
        leave_garbage()
        run = RunFolder(Path(folder))
        run.make()
        loaded = load_config(yaml, overrides)
        inputs = read_inputs(loaded, run)
        world = world or start_world(loaded.config.parallel)
        assert run_in_world(inputs, world) == 0
        loop_of_verbs(yaml, overrides, f"{folder}-verbs")
    end_world(world)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_model):
    folder = tmp_path_factory.mktemp("same")
    data = write_conversations(folder / "chats.jsonl", 26, seed=3)
    yaml = folder / "run.yaml"
    yaml.write_text(YAML.format(model=tiny_model, data=data, output=folder / "out"), encoding="utf-8")
    run_world(2, train_both, [(str(yaml), overrides, str(folder / name)) for name, overrides in RUNS.items()])
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_verbs_and_train_give_the_same_bits(folder, name):
    losses = json.loads((folder / f"{name}-verbs" / "losses.json").read_text())
    assert losses == [step["loss"] for step in read_run(folder / name)] and len(losses) == 8
    ours = load_file(folder / f"{name}-verbs" / "weights.safetensors")
    file = "adapter_model.safetensors" if name == "adapters" else "model.safetensors"
    theirs = load_file(folder / name / "final" / file)
    ours = {key.replace(".default.", "."): tensor for key, tensor in ours.items()}
    assert all(torch.equal(ours[key], tensor) for key, tensor in theirs.items())
