"""The verbs between two processes: what travels, what is refused with both ranks' shapes, and traps of loops."""

import collections
import contextlib
import gc
import io
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import run_python
from verbs import Small, Words, collate, count_over
from worlds import run_world

ROOT = Path(__file__).parents[2]


def refuses(message, call):
    from duoka.errors import ConfigError

    with pytest.raises(ConfigError) as caught:
        call()
    assert all(part in str(caught.value) for part in message), str(caught.value)


def travel(accelerator):
    rank = accelerator.process_index
    uneven = torch.full((rank + 1, 2), float(rank))
    assert accelerator.gather(uneven).tolist() == [[0, 0], [1, 1], [1, 1]]
    nested = accelerator.gather({"a": (torch.tensor(rank), [f"r{rank}"]), "b": [torch.ones(1, dtype=torch.bool)]})
    assert (
        nested["a"][0].tolist() == [0, 1] and nested["a"][1] == ["r0", "r1"] and nested["b"][0].tolist() == [True] * 2
    )
    assert accelerator.gather_object([rank, rank]) == [0, 0, 1, 1]
    given = torch.tensor([rank + 1])
    assert accelerator.reduce(given, "sum").tolist() == [3] and accelerator.reduce(given).tolist() == [3]
    assert accelerator.reduce({"x": given}, "max")["x"].tolist() == [2] and given.tolist() == [rank + 1]
    assert accelerator.broadcast(given, from_process=1).tolist() == [2]
    assert accelerator.broadcast_object_list([rank], 1) == [1]
    padded = accelerator.pad_across_processes(torch.ones(1, 2 + rank), dim=1, pad_index=7)
    assert padded.tolist() == [[1, 1, 7] if rank == 0 else [1, 1, 1]]
    refuses(["rank 0: float32 (1, 2)", "rank 1: float32 (1, 3)", "pad_across_processes"],
            lambda: accelerator.gather(torch.ones(1, 2 + rank)))  # fmt: skip
    refuses(["rank 0 brings 1 tensors and rank 1 brings 2"],
            lambda: accelerator.gather([torch.ones(1)] * (rank + 1)))  # fmt: skip
    refuses(
        ["reduce", "rank 0: float32 (2,)", "rank 1: float32 (3,)"], lambda: accelerator.reduce(torch.ones(2 + rank))
    )
    refuses(
        ["broadcast", "rank 1: int64"],
        lambda: accelerator.broadcast(torch.ones(2, dtype=[torch.float, torch.long][rank])),
    )


class Columns:
    """As data sets of the hub's library are: a slice is a mapping of columns, rows are selected."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, key):
        return {"text": self.rows[key]}

    def select(self, numbers):
        return Columns([self.rows[number] for number in numbers])


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, number):
        return (0, 1, 4)[number]


def split_in_their_own_form(accelerator):
    rank = accelerator.process_index
    lists = collections.defaultdict(list, x=[0, 1, 4])
    for given, read in (
        (np.array([0.0, 1.0, 4.0]), np.ndarray.tolist),
        ((0, 1, 4), list),
        (range(0, 3), lambda numbers: [number * number for number in numbers]),
        (Columns([0, 1, 4]), lambda part: part.rows),
        (Squares(), list),
        (lists, lambda part: part["x"]),
    ):
        with accelerator.split_between_processes(given) as mine:
            assert read(mine) == [[0, 1], [4]][rank], type(given)
        with accelerator.split_between_processes(given, apply_padding=True) as mine:
            assert read(mine) == [[0, 1], [4, 4]][rank], type(given)
    with accelerator.split_between_processes("abc", apply_padding=True) as mine:
        assert mine == ["ab", "cc"][rank]


def take_turns(accelerator, folder):
    rank = accelerator.process_index
    with accelerator.split_between_processes(["a", "b", "c"]) as mine:
        assert mine == [["a", "b"], ["c"]][rank]
    with accelerator.split_between_processes({"x": torch.arange(3)}, apply_padding=True) as mine:
        assert mine["x"].tolist() == [[0, 1], [2, 2]][rank]
    split_in_their_own_form(accelerator)
    assert not accelerator.check_trigger()
    if rank == 1:
        accelerator.set_trigger()
    assert accelerator.check_trigger() and not accelerator.check_trigger()
    file = Path(folder) / "made"
    with accelerator.main_process_first():
        assert file.exists() == (rank == 1)
        file.touch()
    accelerator.wait_for_everyone()
    assert accelerator.on_main_process(lambda: "ran")() == (None if rank else "ran")
    assert accelerator.on_last_process(lambda: "ran")() == ("ran" if rank else None)
    who = (accelerator.num_processes, accelerator.is_main_process, accelerator.is_last_process)
    assert who == (2, not rank, bool(rank)) and accelerator.is_local_main_process == (not rank)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        accelerator.print("once")
    assert said.getvalue() == ("" if rank else "once\n")


def two_backwards(accelerator):
    """Two losses before one step, and manual accumulation: DDP must not add what was exchanged over the ranks again."""
    rank = accelerator.process_index
    torch.manual_seed(7)
    plain = Small()
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    data = Words()
    parts = [collate([data[i]]) for i in (rank, 2 + rank)]
    for part in parts:
        logits = model(part["ids"])
        accelerator.backward(count_over(logits, part["labels"]), sum_over=part["labels"].numel())
    got = {name: p.grad.clone() for name, p in accelerator.unwrap_model(model).named_parameters()}
    optimizer.zero_grad()
    alone = Small()
    alone.load_state_dict(accelerator.get_state_dict(model))
    whole = [collate([data[i]]) for i in range(4)]
    total = sum(count_over(alone(part["ids"]), part["labels"]) for part in whole)
    (total / sum(part["labels"].numel() for part in whole)).backward()
    for name, parameter in alone.named_parameters():
        assert torch.allclose(got[name], parameter.grad, rtol=1e-5, atol=1e-7), name
    # As guides accumulate by hand: a mean each, divided by their number.
    for part in parts:
        accelerator.backward(model(part["ids"]).square().mean() / 2)
    by_hand = {name: p.grad.clone() for name, p in accelerator.unwrap_model(model).named_parameters()}
    alone.zero_grad()
    for part in whole:
        (alone(part["ids"]).square().mean() / 4).backward()
    for name, parameter in alone.named_parameters():
        assert torch.allclose(by_hand[name], parameter.grad, rtol=1e-5, atol=1e-7), name
    accelerator.free_memory()


class HalfUsed(Small):
    def __init__(self):
        super().__init__()
        self.spare = torch.nn.Linear(2, 2)


def by_hand():
    """no_sync and clip_grad_value_ as Accelerate's pages have them: sums of passes, means of ranks, values cut."""
    from duoka import Accelerator

    parts = torch.arange(12).view(4, 1, 3)
    for strategy in ("ddp", "zero1", "fsdp"):
        verbs = Accelerator(strategy=strategy)
        torch.manual_seed(3)
        plain, alone = Small(), Small()
        alone.load_state_dict(plain.state_dict())
        model = verbs.prepare(plain)
        with verbs.no_sync(model):
            verbs.backward(model(parts[verbs.process_index]).square().mean())
        verbs.backward(model(parts[2 + verbs.process_index]).square().mean())
        (sum(alone(part).square().mean() for part in parts) / 2).backward()
        for limit in (None, 0.01):
            if limit:
                verbs.clip_grad_value_(model.parameters(), limit)
                torch.nn.utils.clip_grad_value_(alone.parameters(), limit)
            for name, parameter in verbs.unwrap_model(model).named_parameters():
                grad = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
                wanted = dict(alone.named_parameters())[name].grad
                assert torch.allclose(grad, wanted, rtol=1e-5, atol=1e-7), (strategy, name, limit)
        assert float(wanted.abs().max()) == pytest.approx(0.01), "nothing was cut"
        verbs.free_memory()


def traps(accelerator):
    rank = accelerator.process_index
    model = accelerator.prepare(HalfUsed())
    refuses(["the parameter spare.weight", "find_unused_parameters"],
            lambda: accelerator.backward(model(torch.ones(1, 2, dtype=torch.long)).mean()))  # fmt: skip
    accelerator.free_memory()
    forgotten = Small()
    optimizer = accelerator.prepare(torch.optim.SGD(forgotten.parameters(), lr=0.1))
    refuses(["the optimizer has parameters that belong to no prepared model"], optimizer.step)
    accelerator.free_memory()
    # Different first weights on the ranks become rank 0's; the optimizer may come first; evaluation in inference mode.
    from duoka import Accelerator

    for strategy in ("ddp", "fsdp"):
        verbs = Accelerator(strategy=strategy)
        torch.manual_seed(rank)
        model = Small()
        optimizer = verbs.prepare(torch.optim.AdamW(model.parameters(), lr=0.1))
        model = verbs.prepare(model)
        ids = torch.arange(4)[None]
        for _ in range(2):
            with torch.inference_mode():
                before = model(ids).mean().item()
            verbs.backward(model(ids).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        assert model(ids).mean().item() != before
        sums = verbs.gather(model(ids).sum()[None])
        assert torch.equal(sums[0], sums[1]), "replicas are alike"


def uneven(accelerator):
    """Rank 1 has one batch more: with join_uneven_inputs nobody hangs, and all end with the same weights."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with accelerator.join_uneven_inputs([model]):
        for _ in range(2 + accelerator.process_index):
            loss = model(torch.ones(1, 2)).mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        refuses(["inside join_uneven_inputs"], lambda: accelerator.backward(loss, sum_over=1))
    weights = accelerator.gather(accelerator.unwrap_model(model).weight.detach().sum()[None])
    assert weights[0] == weights[1]
    accelerator.free_memory()


def hold_gradients_once(accelerator):
    """DDP forms its buckets once more after the first exchange: nothing keeps the first ones. Gradients that were there
    before the model was prepared stay."""
    plain = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)])
    plain(torch.ones(1, 256)).sum().backward()
    before = [parameter.grad.clone() for parameter in plain.parameters()]
    model = accelerator.prepare(plain)
    assert all(map(torch.equal, before, (parameter.grad for parameter in model.parameters())))
    whole = sum(parameter.nbytes for parameter in model.parameters())
    for _ in range(3):
        model.zero_grad()
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 256)).mean())
    model.zero_grad()
    gc.collect()
    tensors = [one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter)]
    storages = {storage.data_ptr(): storage.nbytes() for storage in (one.untyped_storage() for one in tensors)}
    assert sum(size >= whole for size in storages.values()) <= 1, "buckets of before"
    accelerator.free_memory()


def all_of_it(folder):
    from duoka import Accelerator

    accelerator = Accelerator(debug=True)
    travel(accelerator)
    take_turns(accelerator, folder)
    two_backwards(accelerator)
    by_hand()
    uneven(accelerator)
    hold_gradients_once(accelerator)
    traps(accelerator)
    (Path(folder) / f"done-{accelerator.process_index}").touch()


def test_verbs_between_two_processes(tmp_path):
    run_world(2, all_of_it, str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"made", "done-0", "done-1"}


def test_the_example_gives_the_same_losses_on_two_processes_and_goes_on(tmp_path, tiny_model):
    def run(*words):
        words = [*map(str, words), "--model", str(tiny_model)]
        done = run_python(*words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return [line.split() for line in done.stdout.splitlines() if line.startswith("epoch")]

    example = str(ROOT / "examples" / "own_loop.py")
    launch = ["-m", "duoka", "launch", "--nproc", "2", example, "--strategy", "zero3"]
    alone = run(example, "--epochs", "2", "--output", "alone")
    first = run(*launch, "--epochs", "1", "--output", "two")
    second = run(example, "--epochs", "2", "--output", "two")
    both = first + second
    assert [line[:4] for line in both] == [line[:4] for line in alone] and len(alone) == 18
    assert [float(line[-1]) for line in both] == pytest.approx([float(line[-1]) for line in alone], rel=2e-5)
    assert (tmp_path / "two" / "model" / "config.json").is_file()
