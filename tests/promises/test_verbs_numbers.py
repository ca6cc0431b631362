"""The verbs in ordinary code: the numbers of loops as people write them, against plain oracles in fp64."""

import copy
import io
import json
import pickle
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from verbs import NUM_SAMPLES, Small, Words, build, collate, count_over, write
from verbs_between import close, exchange_late, speak_without_it, step_alone, weights_of
from worlds import run_world

STEPS, ROWS = 2, 2  # micro-batches of a window, samples of a rank's batch


def fresh(lr=0.3):
    model, _ = build(kind=torch.optim.SGD)
    return model, torch.optim.SGD(model.parameters(), lr=lr)


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
            with model.no_sync() if quiet else torch.enable_grad():
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


# ------------------------------------------------------------------------- gradients outside of prepared models


def leave_the_model(accelerator):
    """What gradients a rank finds outside of prepared models: those of its own loss."""
    rank = accelerator.process_index
    torch.manual_seed(3)
    before, inside, after = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)
    alone = copy.deepcopy([before, inside, after])
    inputs = torch.full((2, 3), float(rank + 1), requires_grad=True)
    prompt = torch.ones(3, requires_grad=True)
    model = accelerator.prepare(inside)
    accelerator.backward(after(model(before(inputs) + prompt)).mean(), retain_graph=False)
    twin, twin_prompt = inputs.detach().clone().requires_grad_(), torch.ones(3, requires_grad=True)
    alone[2](alone[1](alone[0](twin) + twin_prompt)).mean().backward()
    assert torch.allclose(inputs.grad, twin.grad) and torch.allclose(prompt.grad, twin_prompt.grad)
    assert torch.allclose(before.weight.grad, alone[0].weight.grad)
    assert torch.allclose(after.weight.grad, alone[2].weight.grad)
    wanted = accelerator.reduce(alone[1].weight.grad, "mean")
    assert torch.allclose(accelerator.unwrap_model(model).weight.grad, wanted)
    accelerator.free_memory()


def no_targets(accelerator):
    """A quotient made by hand, on a rank without targets: 0/0 must not come into anybody's weights."""
    rank = accelerator.process_index
    model, optimizer = accelerator.prepare(*fresh())
    ids, labels = torch.ones(1, 3, dtype=torch.long), torch.full((1, 3), 4 if rank else -100)
    for count in ((labels != -100).sum(), int((labels != -100).sum())):
        loss = count_over(model(ids), labels) / (labels != -100).sum()
        assert torch.isnan(loss) == (rank == 0)
        accelerator.backward(loss, mean_over=count)
        optimizer.step()
        optimizer.zero_grad()
    assert all(torch.isfinite(p).all() for p in model.parameters())
    accelerator.free_memory()


# ------------------------------------------------------------------------- two models, two optimizers


def play(generator, judge, optimizers, backward, noise, real):
    """The taught loop of two models: the judge learns from both, and is asked again for the generator's loss."""
    for _ in range(3):
        optimizers[1].zero_grad()
        backward(F.softplus(-judge(real)).mean())
        fake = generator(noise)
        backward(F.softplus(judge(fake.detach())).mean())
        optimizers[1].step()
        optimizers[0].zero_grad()
        backward(F.softplus(-judge(fake)).mean())
        optimizers[0].step()


def make_players():
    torch.manual_seed(9)
    models = [torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, n)) for n in (2, 1)]
    return models, [torch.optim.Adam(model.parameters(), lr=0.05) for model in models]


def two_players(accelerator):
    size, rank = accelerator.num_processes, accelerator.process_index
    noise, real = torch.randn(2, 4 * size, 2, generator=torch.Generator().manual_seed(2))
    models, optimizers = make_players()
    *prepared, first, second = accelerator.prepare(*models, *optimizers)
    mine = slice(rank * 4, rank * 4 + 4)
    play(*prepared, [first, second], accelerator.backward, noise[mine], real[mine])
    alone, their_optimizers = make_players()
    for model in alone:
        model.double()
    play(*alone, their_optimizers, torch.Tensor.backward, noise.double(), real.double())
    for ours, theirs in zip(prepared, alone, strict=True):
        close(weights_of(accelerator, ours), theirs.state_dict(), 1e-4)
    accelerator.free_memory()


def count_schedules(folder):
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
    write(folder, "schedules", accelerator.process_index, seen)


def all_numbers(folder):
    from duoka import Accelerator

    accelerator = Accelerator(STEPS)
    size = accelerator.num_processes
    count_by_hand(accelerator, folder, f"counted-{size}")
    read_ahead(accelerator, folder, f"ahead-{size}")
    if size == 3:
        return
    plain = Accelerator()
    repeat_losses(plain, folder, f"repeated-{size}")
    leave_the_model(plain)
    if size == 2:
        no_targets(plain)
        step_alone(plain)
        exchange_late(plain)
        speak_without_it(plain)
    two_players(plain)
    count_schedules(folder)


@pytest.fixture(scope="module", params=[1, 2, 3])
def seen(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("numbers")
    run_world(request.param, all_numbers, str(folder))
    return request.param, lambda name: json.loads((Path(folder) / f"{name}-0.json").read_text())


def test_a_window_counted_by_hand_equals_one_pass_over_its_tokens(seen):
    size, read = seen
    close(read(f"counted-{size}"), oracle_of_counting(size))


def test_a_window_that_is_read_ahead_weighs_each_batch_by_itself(seen):
    size, read = seen
    wanted, steps = oracle_of_reading_ahead(size)
    ours = read(f"ahead-{size}")
    assert ours.pop("steps") == steps
    close(ours, wanted)


def test_a_repeated_loss_counts_each_sample_once(seen):
    size, read = seen
    if size == 3:
        pytest.skip("its data are for one process and two")
    ours = read(f"repeated-{size}")
    assert ours == {"mean": pytest.approx(10.5), "rows": 22, "tokens": 44}


def test_schedules_count_optimizer_steps_or_as_told(seen):
    size, read = seen
    if size == 3:
        pytest.skip("schedules are stepped on one process and two")
    assert read("schedules") == pytest.approx([0.5, 0.5 if size == 1 else 0.0, 0.5])


# ------------------------------------------------------------------------- in one process


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
