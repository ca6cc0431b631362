"""The verbs in ordinary code: the numbers of loops as people write them, against plain oracles in fp64."""

import copy
import io
import json
import pickle
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from verbs import NUM_SAMPLES, Small, Words, collate, count_over, write
from verbs_between import (
    close,
    exchange_late,
    forget_nothing,
    fresh,
    leave_the_model,
    no_targets,
    save_together,
    speak_without_it,
    step_alone,
    two_players,
    weights_of,
)
from worlds import run_world

STEPS, ROWS = 2, 2  # micro-batches of a window, samples of a rank's batch


# ------------------------------------------------------------------------- token-exact accumulation by hand


def count_by_hand(accelerator, folder, name):
    """Windows are read ahead and counted over all ranks; the loss is divided by hand, and multiplied with what the
    verbs divide by."""
    model, optimizer = accelerator.prepare(*fresh())
    loader = accelerator.prepare(DataLoader(Words(), batch_size=ROWS, collate_fn=collate))
    batches, left = iter(loader), len(loader)
    while left:
        window = [next(batches) for _ in range(min(STEPS, left))]
        left -= len(window)
        count = sum((batch["labels"] != -100).sum() for batch in window)
        count = int(accelerator.gather(count).sum())
        for at, batch in enumerate(window):
            quiet = accelerator.num_processes > 1 and at + 1 < len(window)
            no_sync = getattr(model, "no_sync", partial(accelerator.no_sync, model))  # sharded models have none
            with no_sync() if quiet else torch.enable_grad():
                loss = count_over(model(batch["ids"]), batch["labels"])
                accelerator.backward(loss * STEPS * accelerator.num_processes / count)
        optimizer.step()
        optimizer.zero_grad()
    write(folder, name, accelerator.process_index, weights_of(accelerator, model))
    accelerator.free_memory()


def oracle_of_counting(size):
    model, optimizer = fresh()
    model.double()
    data = Words()
    for at in range(0, NUM_SAMPLES, STEPS * ROWS * size):
        batch = collate([data[i] for i in range(at, min(at + STEPS * ROWS * size, NUM_SAMPLES))])
        (count_over(model(batch["ids"]), batch["labels"]) / (batch["labels"] != -100).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


# ------------------------------------------------------------------------- windows that are read ahead


def read_ahead(accelerator, folder, name):
    """Plain means, each micro-batch with its own number of samples, though all were read before the first pass."""
    model, optimizer = accelerator.prepare(*fresh())
    loader = accelerator.prepare(DataLoader(Words(), batch_size=3, collate_fn=collate))
    held, before = [], accelerator.step
    for number, batch in enumerate(loader):
        held.append(batch)
        if len(held) < STEPS and number + 1 < len(loader):
            continue
        for one in held:
            with accelerator.accumulate(model):
                accelerator.backward(model(one["ids"])[:, 0].square().sum(1).mean())
                optimizer.step()
                optimizer.zero_grad()
        held = []
    seen = weights_of(accelerator, model) | {"steps": accelerator.step - before}
    write(folder, name, accelerator.process_index, seen)
    accelerator.free_memory()


def oracle_of_reading_ahead(size):
    model, optimizer = fresh()
    model.double()
    data, steps = Words(), 0
    for at in range(0, NUM_SAMPLES, STEPS * 3 * size):
        batch = collate([data[i] for i in range(at, min(at + STEPS * 3 * size, NUM_SAMPLES))])
        model(batch["ids"])[:, 0].square().sum(1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    return model.state_dict(), steps


# ------------------------------------------------------------------------- numbers of an evaluation


def repeat_losses(accelerator, folder, name):
    values = torch.arange(22.0)
    loader = accelerator.prepare(DataLoader(values, batch_size=8))
    losses = [accelerator.gather_for_metrics(batch.mean().repeat(8)) for batch in loader]
    tokens = [accelerator.gather_for_metrics(batch.repeat_interleave(2)) for batch in loader]
    seen = {"mean": float(torch.cat(losses).mean()), "rows": len(torch.cat(losses)), "tokens": len(torch.cat(tokens))}
    write(folder, name, accelerator.process_index, seen)
    accelerator.free_memory()


# ------------------------------------------------------------------------- all of it, in one world


def count_schedules(folder, size):
    from duoka import Accelerator

    seen = []
    for options in ({}, {"adjust_scheduler": True}, {"adjust_scheduler": True, "split_batches": True}):
        accelerator = Accelerator(**options)
        model, optimizer = fresh()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 8)
        model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
        for _ in range(4):
            accelerator.backward(model(torch.ones(1, 2, dtype=torch.long)).mean())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        seen.append(schedule.get_last_lr()[0] / 0.3)
    write(folder, f"schedules-{size}", accelerator.process_index, seen)


def all_numbers(folder, tiny_model):
    from duoka import Accelerator

    size = Accelerator().num_processes
    for strategy in STRATEGIES[size]:
        name = f"{size}-{strategy}"
        accelerator = Accelerator(STEPS, strategy=strategy)
        count_by_hand(accelerator, folder, f"counted-{name}")
        read_ahead(accelerator, folder, f"ahead-{name}")
        if size == 3:
            continue
        plain = Accelerator(strategy=strategy)
        leave_the_model(plain)
        two_players(plain)
        if size == 2:
            no_targets(plain)
            forget_nothing(Accelerator(3, strategy=strategy), f"{folder}/window-{strategy}")
        if strategy in ("zero1", "fsdp"):
            save_together(plain, tiny_model, f"{folder}/saved-{strategy}")
        if strategy in ("single", "ddp"):
            repeat_losses(plain, folder, f"repeated-{name}")
    if size < 3:
        count_schedules(folder, size)
    if size == 2:
        ddp = Accelerator()
        step_alone(ddp)
        exchange_late(ddp)
        speak_without_it(ddp)


STRATEGIES = {1: ("single",), 2: ("ddp", "zero1", "fsdp"), 3: ("ddp", "fsdp")}
WORLDS = [f"{size}-{strategy}" for size, strategies in STRATEGIES.items() for strategy in strategies]


@pytest.fixture(scope="module")
def numbers(tmp_path_factory, tiny_model):
    folder = tmp_path_factory.mktemp("numbers")
    for size in STRATEGIES:
        run_world(size, all_numbers, str(folder), str(tiny_model))
    return folder


@pytest.fixture
def read(numbers):
    return lambda name: json.loads((numbers / f"{name}-0.json").read_text())


@pytest.mark.parametrize("world", WORLDS)
def test_a_window_counted_by_hand_equals_one_pass_over_its_tokens(read, world):
    close(read(f"counted-{world}"), oracle_of_counting(int(world[0])))


@pytest.mark.parametrize("world", WORLDS)
def test_a_window_that_is_read_ahead_weighs_each_batch_by_itself(read, world):
    wanted, steps = oracle_of_reading_ahead(int(world[0]))
    ours = read(f"ahead-{world}")
    assert ours.pop("steps") == steps
    close(ours, wanted)


@pytest.mark.parametrize("world", ["1-single", "2-ddp"])
def test_a_repeated_loss_counts_each_sample_once(read, world):
    ours = read(f"repeated-{world}")
    assert ours == {"mean": pytest.approx(10.5), "rows": 22, "tokens": 44}


@pytest.mark.parametrize("size", [1, 2])
def test_schedules_count_optimizer_steps_or_as_told(read, size):
    assert read(f"schedules-{size}") == pytest.approx([0.5, 0.5 if size == 1 else 0.0, 0.5])


@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_sharded_weights_are_written_by_all_ranks_as_one_would(numbers, tiny_model, tmp_path, strategy):
    from transformers import AutoModelForCausalLM

    alone = AutoModelForCausalLM.from_pretrained(tiny_model)
    for name, options in {"one": {}, "split": {"max_shard_size": "100KB"}}.items():
        alone.save_pretrained(tmp_path / name, **options)
        ours, theirs = numbers / f"saved-{strategy}" / name, tmp_path / name
        assert {path.name for path in ours.iterdir()} == {path.name for path in theirs.iterdir()}
        for path in theirs.glob("*.safetensors*"):
            assert (ours / path.name).read_bytes() == path.read_bytes(), path.name
    assert len(list(theirs.glob("*.safetensors"))) > 1


# ------------------------------------------------------------------------- in one process


def test_any_model_is_saved_in_files_of_the_asked_size(tmp_path):
    from duoka import Accelerator

    accelerator = Accelerator()
    model = accelerator.prepare(Small())
    accelerator.save_model(model, tmp_path, max_shard_size=400)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = {path.name: load_file(path) for path in tmp_path.glob("*.safetensors")}
    assert len(files) > 1 and index["weight_map"] == {name: file for file, part in files.items() for name in part}
    whole = {name: tensor for part in files.values() for name, tensor in part.items()}
    assert all(torch.equal(whole[name], tensor) for name, tensor in model.state_dict().items())


class ByList(torch.utils.data.Dataset):
    """A data set that is asked for whole batches."""

    def __len__(self):
        return 7

    def __getitem__(self, numbers):
        return torch.as_tensor(numbers) * 10


def test_a_batch_sampler_as_sampler_gives_whole_batches_and_collate_fn_is_asked():
    from duoka import Accelerator

    accelerator = Accelerator()
    sampler = BatchSampler(SequentialSampler(range(7)), 3, drop_last=False)
    loader = accelerator.prepare(DataLoader(ByList(), sampler=sampler, batch_size=None))
    assert [batch.tolist() for batch in loader] == [[0, 10, 20], [30, 40, 50], [60]]
    loader = accelerator.prepare(DataLoader(ByList(), sampler=sampler, batch_size=None, collate_fn=lambda x: x + 1))
    assert [batch.tolist() for batch in loader] == [[1, 11, 21], [31, 41, 51], [61]]


def test_models_and_optimizers_are_pickled_and_copied(tmp_path):
    from duoka import Accelerator

    accelerator = Accelerator(mixed_precision="bf16")
    model, optimizer = accelerator.prepare(*fresh())
    ids = torch.ones(1, 3, dtype=torch.long)
    accelerator.backward(model(ids).square().mean())
    optimizer.step()
    bare = accelerator.unwrap_model(model)
    torch.save(bare, tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    assert all(torch.equal(p, q) for p, q in zip(again.parameters(), bare.parameters(), strict=True))
    assert "duoka" not in (tmp_path / "model.pt").read_bytes().decode("latin1"), "a pickle that needs no duoka"
    assert again(ids).dtype == torch.float32
    assert type(pickle.loads(pickle.dumps(optimizer))) is torch.optim.SGD
    torch.save(optimizer, io.BytesIO())
    copied_model, copied = copy.deepcopy((bare, optimizer))
    assert copied.param_groups[0]["params"][0] is not optimizer.param_groups[0]["params"][0]
    copied_model(ids).mean().backward()
    assert all(p.grad is not None for p in copied_model.parameters())
    assert copy.deepcopy(accelerator) is accelerator


def walk(accelerator, parts, batches, log, save_at=None, folder=None):
    model, optimizer = parts
    for batch in batches:
        with accelerator.accumulate(model):
            loss = count_over(model(batch["ids"]), batch["labels"])
            accelerator.backward(loss / 10)
            optimizer.step()
            optimizer.zero_grad()
        log.append(loss.item())
        if len(log) == save_at:
            accelerator.save_state(folder)


def make_dropping(accelerator):
    torch.manual_seed(1)
    model = Small(dropout=0.4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    loader = DataLoader(Words(), batch_size=2, shuffle=True, collate_fn=collate)
    return accelerator.prepare(model, optimizer, loader)


def test_a_save_inside_of_a_window_goes_on_bit_for_bit(tmp_path, capsys):
    from duoka import Accelerator

    accelerator, log = Accelerator(3), []
    *parts, loader = make_dropping(accelerator)
    walk(accelerator, parts, loader, log, save_at=5, folder=tmp_path)
    wanted = weights_of(accelerator, parts[0])
    accelerator, rest = Accelerator(3), []
    *parts, loader = make_dropping(accelerator)
    accelerator.load_state(tmp_path)
    torch.manual_seed(77)
    accelerator.load_state(tmp_path)
    walk(accelerator, parts, accelerator.skip_first_batches(loader, 5), rest)
    assert rest == log[3:], "two micro-batches of the window are done again, with the same dropout"
    assert weights_of(accelerator, parts[0]) == wanted
    assert "saved inside of a window, after 2 of its micro-batches" in capsys.readouterr().out
