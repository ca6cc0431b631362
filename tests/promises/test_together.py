"""Axes beside each other, and beside shared state, against one process: loss, norm, every gradient, weights."""

from dataclasses import replace

import pytest
import torch
from tensor_models import build, compare, train_here, train_plainly, write_model
from worlds import run_world

TWICE, LAYERS = ("interleaved", "zbv"), 8  # schedules of two stages on each rank, and what four ranks of these need
LORA = {"rank": 4, "alpha": 8.0}
# (model, layout, optimizer, micro-batches, what else). Of three micro-batches one has no target, or not even a token.
PAIRS = [
    ("qwen3", "zero1x1.tp2.sp2", "sgd", 3, ""),
    ("llama", "fsdp1.tp2.sp2", "sgd", 1, ""),
    ("qwen3", "single.tp2.pp2", "sgd", 3, ""),
    ("qwen2", "single.tp2.pp2", "adamw", 3, "full"),
    ("llama", "single.tp2.pp2", "sgd", 3, "interleaved"),
    ("llama", "single.tp2.pp2", "sgd", 3, "lora"),
    ("llama", "single.tp2.pp2", "sgd", 3, "zbv"),
    ("qwen3", "ddp1.pp2.sp2", "sgd", 3, ""),
    ("qwen3", "fsdp2.pp2", "sgd", 3, ""),
    ("moe", "zero1x2.pp2.ep2", "sgd", 3, ""),
    ("moe", "fsdp2.tp2.ep2", "sgd", 3, ""),
    ("moe", "fsdp2.tp2.ep4", "sgd", 3, "full"),
    ("moe", "single.tp2.pp2.ep2", "sgd", 1, ""),
]
FAMILIES = ("llama", "tied", "qwen3", "qwen2", "phi3", "gemma2", "gemma3", "olmo2")
LONG = [
    *((name, layout, "sgd", 3, "") for name in FAMILIES for layout in ("zero1x1.tp2.sp2", "single.tp2.pp2")),
    *((name, layout, "adamw", 1, "") for name in FAMILIES for layout in ("fsdp1.tp2.sp2", "zero1x1.pp2.sp2")),
    *(
        ("tied", layout, "sgd", 3, how)
        for layout in ("zero1x1.tp2.sp2", "single.tp2.pp2", "ddp1.pp2.sp2")
        for how in ("full", "selective")
    ),
    *(("phi3", layout, "sgd", 3, "lora") for layout in ("zero1x1.tp2.sp2", "ddp1.pp2.sp2", "fsdp2.pp2", "fsdp2.tp2")),
    *(("tied", layout, "adamw", 3, "") for layout in ("fsdp2.pp2", "hsdp2x1.pp2", "zero2x2.pp2", "zero2x2.tp2")),
    ("llama", "hsdp2x1.tp2", "adamw", 3, ""),
    ("llama", "ddp1.pp2.sp2", "sgd", 3, "interleaved"),
    ("qwen3", "single.tp2.pp2", "sgd", 3, "gpipe"),
    ("phi3", "single.tp2.pp2", "sgd", 3, "zero-bubble"),
    ("llama", "ddp1.pp2.sp2", "adamw", 3, "zbv"),
    ("llama", "single.pp4", "sgd", 3, "zbv"),
    *(("moe", layout, "sgd", 3, "") for layout in ("zero1x1.tp2.sp2.ep4", "zero2x2.tp2.ep2", "hsdp2x1.tp2.ep2")),
    ("moe", "zero1x2.tp2.ep2", "adamw", 1, "full"),
]
EIGHT = [
    *((name, "fsdp2.tp2.pp2", "sgd", 3, "") for name in ("llama", "qwen3", "gemma2")),
    *((name, "zero1x2.tp2.pp2", "adamw", 3, "") for name in ("qwen3", "phi3")),
    *((name, "zero1x1.tp2.pp2.sp2", "sgd", 3, "") for name in ("qwen3", "llama")),
    ("qwen3", "fsdp2.tp2.sp2", "sgd", 3, ""),
    ("qwen3", "hsdp2x1.tp2.pp2", "sgd", 1, "full"),
    ("llama", "zero2x2.tp2.pp2", "sgd", 3, "lora"),
    ("tied", "ddp2.pp2.sp2", "sgd", 3, ""),
    ("moe", "zero1x4.pp2.ep2", "sgd", 3, ""),
    ("moe", "fsdp2.pp2.sp2.ep4", "sgd", 3, "full"),
    ("moe", "fsdp2.tp2.pp2.ep4", "sgd", 3, ""),
    ("moe", "hsdp2x2.tp2.ep4", "adamw", 3, ""),
]


def adapters(folder):
    """PEFT's adapters beside a model of transformers, begun where duoka's begin."""
    import peft

    from duoka.config.schema import LoraConfig
    from duoka.model.build import load_model
    from duoka.model.request import ModelRequest

    begun = load_model(ModelRequest(folder, dtype=torch.float32, lora=LoraConfig(**LORA))).state_dict()

    def adapt(model):
        settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
        adapted = peft.get_peft_model(model, settings)
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if parameter.requires_grad:
                    parameter.copy_(begun[name])
        return adapted

    return adapt


def kind_of(optimizer, how):
    return f"{optimizer}-lora" if how == "lora" else optimizer


def layout_of(text, how):
    from duoka.plan.layout import parse_layout

    layout = parse_layout(text)
    if how in ("full", "selective"):
        layout = replace(layout, recompute=how)
    if how in ("gpipe", "zero-bubble", *TWICE):
        layout = replace(layout, schedule=how, virtual=2 if how in TWICE else 1)
    return layout


def learn(cases, folder):
    from duoka.comm.world import end_world, start_world
    from duoka.config.schema import LoraConfig, ParallelConfig

    world = start_world(ParallelConfig(strategy="fsdp"))
    for name, text, optimizer, num_micro, how in cases:
        engine = build(folder / name, layout_of(text, how), world, lora=LoraConfig(**LORA) if how == "lora" else None)
        wanted = torch.load(folder / f"{name}-{kind_of(optimizer, how)}.pt")
        what = f"{name} under {text} {how}, {optimizer}, {num_micro} micro-batches"
        # AdamW divides a gradient by its own size: what is nearly zero may have either sign.
        compare(train_here(engine, optimizer, num_micro), wanted, 1e-4 if optimizer == "sgd" else 2e-3, what)
    world.barrier()
    end_world(world)


def run_cases(folder, size, cases):
    deep = {name for name, *_, how in cases if how in TWICE}
    for name, _, optimizer, _, how in cases:
        if not (folder / name).is_dir():
            write_model(name, folder / name, layers=LAYERS if name in deep else 2)
        oracle = folder / f"{name}-{kind_of(optimizer, how)}.pt"
        if not oracle.is_file():
            adapt = adapters(folder / name) if how == "lora" else None
            torch.save(train_plainly(folder / name, optimizer, adapt), oracle)
    run_world(size, learn, cases, folder)


def test_two_axes_on_four_ranks_equal_one_process(tmp_path):
    run_cases(tmp_path, 4, PAIRS)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_every_family_under_two_axes(tmp_path):
    run_cases(tmp_path, 4, LONG)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_three_axes_on_eight_ranks_equal_one_process(tmp_path):
    run_cases(tmp_path, 8, EIGHT)
