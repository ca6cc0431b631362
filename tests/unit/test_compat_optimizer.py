"""`load_model` and `load_optimizer` take of a config what `duoka train` takes: rates by part, Muon, chosen layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import write_conversations

from duoka.compat.config import Config
from duoka.compat.model import load_model
from duoka.compat.trainer import load_optimizer, load_scheduler


@pytest.fixture
def config_of(tmp_path: Path, tiny_model: Path):
    def read(more: str) -> Config:
        write_conversations(tmp_path / "chats.jsonl", 8)
        yaml = tmp_path / "x.yaml"
        yaml.write_text(
            f"model: {tiny_model}\ndata: {{train: [chats.jsonl]}}\ntrain: {{epochs: 2, global_batch: 4}}\n{more}",
            encoding="utf-8",
        )
        return Config.from_yaml(yaml)

    return read


def rates_by_name(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    return {name: rates[id(p)] for name, p in model.named_parameters() if p.requires_grad}


def test_each_part_has_the_rate_that_training_gives_it_also_after_the_schedule_has_set_it(config_of) -> None:
    config = config_of(
        "optim: {name: muon, lr: 0.02, adamw_lr: 0.0004, embedding_lr: 0.006, warmup: 0, schedule: constant}\n"
    )
    model = load_model(config.model)
    optimizer = load_optimizer(model, config.trainer)
    scheduler = load_scheduler(optimizer, config.trainer, 8)
    for _ in range(2):
        for name, rate in rates_by_name(model, optimizer).items():
            wanted = 0.006 if "embed_tokens" in name else 0.02 if "layers" in name and "norm" not in name else 0.0004
            if "bias" not in name:
                assert rate == pytest.approx(wanted), name
        optimizer.step()
        scheduler.step()
    again = load_scheduler(load_optimizer(model, config.trainer), config.trainer, 8)
    again.load_state_dict(scheduler.state_dict())
    assert again.get_last_lr() == scheduler.get_last_lr() and len(set(again.get_last_lr())) == 3


def test_adapters_second_matrices_learn_faster_where_the_config_says_so(config_of) -> None:
    config = config_of("lora: {rank: 2, b_lr_ratio: 16}\noptim: {lr: 0.001, warmup: 0, schedule: constant}\n")
    model = load_model(config.model)
    optimizer = load_optimizer(model, config.trainer)
    load_scheduler(optimizer, config.trainer, 8)
    rates = rates_by_name(model, optimizer)
    assert {round(rate, 6) for name, rate in rates.items() if ".lora_B." in name} == {0.016}
    assert {round(rate, 6) for name, rate in rates.items() if ".lora_A." in name} == {0.001}


def test_layers_that_are_not_chosen_are_frozen(config_of) -> None:
    model = load_model(config_of("train_only: {layers: [0]}\n").model)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained and all(".layers.0." in name for name in trained)


def test_muon_in_a_loop_of_shards_is_refused(config_of) -> None:
    from duoka.accelerator.prepared import PreparedOptimizer
    from duoka.errors import ConfigError

    config = config_of("optim: {name: muon, lr: 0.02, adamw_lr: 0.0004}\n")
    model = load_model(config.model)
    prepared = PreparedOptimizer(load_optimizer(model, config.trainer), None)
    matrix = next(p for name, p in model.named_parameters() if name.endswith("q_proj.weight"))
    with pytest.raises(ConfigError, match="whole matrices"):
        prepared.repoint({id(matrix): torch.nn.Parameter(torch.zeros(2, 2))})
