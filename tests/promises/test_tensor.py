"""Tensor parallelism against one process: loss, norm, every gradient and the weights after three steps."""

from dataclasses import replace

import pytest
import torch
from tensor_models import MODELS, build, compare, train_here, train_plainly, write_model
from worlds import run_world

FAMILIES = tuple(name for name in MODELS if name != "smollm")  # 9 heads are for three ranks
SHORT = 1e-5
LORA = {"rank": 4, "alpha": 8.0}


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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("tensor")
    for name in MODELS:
        write_model(name, place / name)
        for optimizer in ("sgd", "adamw"):
            torch.save(train_plainly(place / name, optimizer), place / f"{name}-{optimizer}.pt")
    for name in ("llama", "phi3"):
        torch.save(train_plainly(place / name, "sgd", adapters(place / name)), place / f"{name}-lora.pt")
    return place


def look(folder, layouts, names):
    from duoka.comm.world import end_world, start_world
    from duoka.config.schema import LoraConfig, ParallelConfig
    from duoka.plan.layout import parse_layout

    world = start_world(ParallelConfig(strategy="fsdp"))

    def check(name, layout, optimizer, num_micro, lora=None):
        engine = build(folder / name, layout, world, lora=lora and LoraConfig(**LORA))
        wanted = torch.load(folder / f"{name}-{'lora' if lora else optimizer}.pt")
        what = f"{name} under {layout.name}, {layout.recompute}, {optimizer}, {num_micro} micro-batches, lora {lora}"
        # AdamW divides a gradient by its own size: what is nearly zero may have either sign.
        compare(train_here(engine, optimizer, num_micro), wanted, 1e-4 if optimizer == "sgd" else 2e-3, what)
        return engine

    for text in layouts:
        layout = parse_layout(text)
        for name in names:
            engine = check(name, layout, "sgd", 3)
            check(name, layout, "adamw", 3)
            check_nothing_is_whole(engine)
        check(names[0], layout, "sgd", 1)
        for recompute in ("full", "selective"):
            check(names[0], replace(layout, recompute=recompute), "sgd", 3)
        for name in {"llama", "phi3"} & set(names):
            check(name, layout, "sgd", 3, lora=True)
    world.barrier()
    end_world(world)


def check_nothing_is_whole(engine):
    """Every matrix is cut, and a weight that two modules share is one parameter, as it was."""
    from torch.distributed.tensor import DTensor

    from duoka.model.build import find_core

    for name, parameter in engine.named_trainable().items():
        if parameter.ndim > 1:
            assert isinstance(parameter, DTensor) and "tp" in parameter.device_mesh.mesh_dim_names, name
    core = find_core(engine.bare)
    is_one = core.get_input_embeddings().weight is core.get_output_embeddings().weight
    assert is_one == core.config.tie_word_embeddings
    assert ("lm_head.weight" in engine.named_trainable()) != is_one


def test_two_ranks_of_a_layer_learn_what_one_process_learns(folder):
    run_world(2, look, folder, ["single.tp2"], FAMILIES)


def test_three_ranks_share_nine_tied_heads(folder):
    run_world(3, look, folder, ["single.tp3"], ("smollm",))


def test_data_ranks_of_two_share_state_beside_it(folder):
    run_world(4, look, folder, ["fsdp2.tp2", "zero1x2.tp2"], ("qwen3", "llama"))
