"""`load_scheduler` counts the steps that the loop takes, also where it goes on with other batches or for longer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import write_conversations

from duoka.compat.config import Config
from duoka.compat.data import load_dataset
from duoka.compat.trainer import ScheduleLR, load_scheduler
from duoka.optim.schedule import learning_rate


@pytest.fixture
def begin(tmp_path: Path, tiny_model: Path):
    """A schedule for 99 conversations, in a loop of two ranks that adds up so many micro-batches of 2."""
    write_conversations(tmp_path / "chats.jsonl", 99)

    def schedule(accumulation: int = 2, **train: Any) -> ScheduleLR:
        yaml = tmp_path / "x.yaml"
        optim = train.pop("optim", "lr: 0.1, warmup: 0.2, schedule: linear")
        written = "".join(f", {key}: {value}" for key, value in {"epochs": 2, **train}.items())
        yaml.write_text(
            f"model: {tiny_model}\ndata: {{train: [chats.jsonl]}}\noptim: {{{optim}}}\n"
            f"train: {{global_batch: 32, micro_batch: 2{written}}}\n",
            encoding="utf-8",
        )
        accelerator: Any = SimpleNamespace(
            process_index=0, num_processes=2, gradient_accumulation_steps=accumulation,
            gather_object=lambda mine: [50, 49], print=lambda text: None,
        )  # fmt: skip
        config = Config.from_yaml(yaml)
        load_dataset(config.data, accelerator=accelerator)
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        return load_scheduler(optimizer, config.trainer, 99)  # of both ranks: there is one process here

    return schedule


def rates(scheduler: ScheduleLR, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        found.append(scheduler.optimizer.param_groups[0]["lr"])
        scheduler.optimizer.step()
        scheduler.step()
    return found


def test_a_step_has_the_samples_of_the_loops_loader(begin) -> None:
    scheduler = begin()
    assert scheduler.total_steps == 26, "13 steps of 8 samples, twice; not those of train.global_batch"
    wanted = [learning_rate(scheduler.optim, step, 26) for step in range(1, 27)]
    assert rates(scheduler, 26) == pytest.approx(wanted, rel=1e-12)
    assert begin(max_steps=5).total_steps == 5


def test_a_loop_that_goes_on_with_larger_steps_comes_to_the_end_of_its_rates(begin) -> None:
    first = begin()
    rates(first, 10)
    state = first.state_dict()
    again = begin(accumulation=4)
    again.load_state_dict(state)
    # 10/13 of an epoch is done; of 7 steps an epoch, 8.6 are left.
    assert again.total_steps == 10 + 9
    rest = rates(again, 9)
    assert rest == pytest.approx([learning_rate(again.optim, step, 19) for step in range(11, 20)])
    assert 0 < rest[-1] < 0.1 / 9 and rest == sorted(rest, reverse=True)
    third = begin()
    third.load_state_dict(again.state_dict())
    assert third.total_steps == 19, "nothing is left"


def test_a_loop_that_goes_on_unchanged_or_for_longer_has_the_rates_of_one_that_was_never_stopped(begin) -> None:
    first, whole = begin(), begin()
    rates(first, 7)
    again, longer = begin(), begin(epochs=4)
    for one in (again, longer):
        one.load_state_dict(first.state_dict())
    assert again.get_last_lr() == first.get_last_lr()
    assert rates(again, 19) == rates(whole, 26)[7:]
    assert longer.total_steps == 52


def test_rates_are_scaled_with_the_batch_as_in_training(begin) -> None:
    scaled = begin(optim="lr: 0.1, warmup: 0, schedule: constant, lr_scaling: linear, lr_batch: 16")
    assert rates(scaled, 3) == pytest.approx([0.05] * 3), "8 samples a step"
