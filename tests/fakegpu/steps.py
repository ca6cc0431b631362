"""What runs on the fake GPU: real models, layouts, engines and optimizer steps. Each function's answer is JSON."""

import contextlib
import functools
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from duoka.comm.collectives import gather_into, scatter_into
from duoka.comm.world import World
from duoka.config.schema import RunConfig
from duoka.data.feed.loader import Batch, GlobalBatch
from duoka.model import attention
from duoka.model.build import load_model
from duoka.model.fused import apply_fused
from duoka.model.request import ModelRequest
from duoka.optim import narrow
from duoka.parallel.mesh import build_mesh
from duoka.plan.layout import SHARDED, Layout
from duoka.torch_private import fake_store
from duoka.train import run
from duoka.train.stages.stage import build_stage
from duoka.train.step import optimizer_step
from fakegpu.liger import installed
from fakegpu.mode import FakeGpu

GPU = torch.device("cuda", 0)
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM), "phi3": (Phi3Config, Phi3ForCausalLM),
    "gpt2": (functools.partial(GPT2Config, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0), GPT2LMHeadModel),
}  # fmt: skip
SIZES = {
    "hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 512,
}  # fmt: skip
MICRO_BATCHES = 2


@functools.cache
def model_folder(family, num_layers, vocab):
    """A model of this many layers, as safetensors, in the folder of this process."""
    config, kind = FAMILIES[family]
    folder = Path(f"{family}-{num_layers}-{vocab}").resolve()
    settings = {**SIZES, "num_hidden_layers": num_layers, "vocab_size": vocab, "tie_word_embeddings": False}
    settings["pad_token_id"] = 0  # Phi-3's is beyond so small a vocabulary
    kind(config(**settings)).save_pretrained(folder)
    return folder


def count_step(
    num_layers=2, family="llama", strategy="single", size=1, precision="bf16", recompute="none", offload="none",
    lora=None, optim="adamw", packed=True, tokens=96, vocab=512, by_slices=True, weights="fp32",
    kernels=(), alike=False,
):  # fmt: skip
    """An optimizer step of MICRO_BATCHES micro-batches, on rank 0 of `size`, after a first one that made the state.

    `kernels`: parts that have stand-ins for Liger's kernels (fakegpu/liger.py). `alike`: documents begin so.
    """
    layout = Layout(
        dp=size, strategy=strategy, precision=precision, recompute=recompute, packing=packed, offload=offload,
        shard=size if strategy in SHARDED else 1,
    )  # fmt: skip
    train = {"weights": weights}
    config = RunConfig(model={"name": "none"}, data={"train": "none"}, lora=lora, optim={"name": optim}, train=train)
    folder = model_folder(family, num_layers, vocab)
    run_folder = SimpleNamespace(path=folder)
    inputs = SimpleNamespace(config=config, folder=folder, loaded=SimpleNamespace(base=folder), run=run_folder)
    plan = SimpleNamespace(layout=layout)
    _try_fusions(folder, config)
    batches = [global_batch(tokens, packed, number, alike) for number in (1, MICRO_BATCHES)]
    files = run.build_without_memory if by_slices else lambda request: None
    hidden = mock.patch.object(run, "build_without_memory", files)
    with _world(layout) as world, installed(kernels), FakeGpu() as gpu, hidden:
        stage = build_stage(config)
        engine, roles = run.build_engine(inputs, plan, build_mesh(layout, world), stage)
        contents = run.build_contents(config, plan, engine, roles)
        engine.model.train()
        for batch in batches:
            gpu.start()
            result = optimizer_step(engine, contents.optimizer, batch, stage, clip=1.0)
    return {
        "kernels": sum(gpu.kernels.values()), "by_kernel": dict(gpu.kernels), "syncs": dict(gpu.syncs),
        "uploads": dict(gpu.uploads), "on_host": dict(gpu.on_host), "casts": dict(gpu.casts),
        "has_stepped": result.is_finite and not result.is_short,
        "num_layers": num_layers, "micro_batches": MICRO_BATCHES, "exchanged": sorted(result.traffic),
        "seconds": [result.times.forward_s, result.times.backward_s],
        "held_on_host": sorted(name for name, held in _held(engine, contents.optimizer) if held.device.type == "cpu"),
    }  # fmt: skip


def carry_host_tensors(size=4):
    """What a collective on a tensor of the host raises in the world of these steps, by its name; "" where nothing."""
    host, parts = torch.ones(size), torch.ones(size * size)
    asked = {
        "all-reduce": lambda: dist.all_reduce(host),
        "all-gather": lambda: gather_into(parts, host),
        "reduce-scatter": lambda: scatter_into(host, parts),
        "all-to-all": lambda: dist.all_to_all_single(parts, parts.clone()),
        "broadcast": lambda: dist.broadcast(host, 0),
    }
    found = {}
    with _world(Layout(dp=size, strategy="fsdp", shard=size)):
        for name, ask in asked.items():
            try:
                ask()
                found[name] = ""
            except RuntimeError as error:
                found[name] = str(error)
    return found


def measure_the_card():
    """What `make gpu-check` measures of a card before its cases."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    from gpu import measure_card

    with FakeGpu() as gpu:
        found = measure_card()
    return {**found, "products": gpu.kernels["mm"], "copies": gpu.kernels["copy_"]}


def _held(engine, optimizer):
    """Weights, buffers and state, by name."""
    yield from engine.bare.named_parameters()
    yield from engine.bare.named_buffers()
    for name, parameter in engine.named_trainable().items():
        for kind, value in optimizer.state.get(parameter, {}).items():
            if torch.is_tensor(value) and value.ndim:
                yield f"{kind}.{name}", value


@contextlib.contextmanager
def _world(layout):
    """Rank 0 of the layout's world, whose collectives carry GPU tensors only, as NCCL's."""
    if layout.strategy == "single":
        yield World(device=GPU)
        return
    dist.init_process_group("cuda:fake", rank=0, world_size=layout.dp, store=fake_store())
    try:
        yield World(size=layout.dp, local_size=layout.dp, device=GPU, backend="nccl")
    finally:
        dist.destroy_process_group()


def _try_fusions(folder, config):
    """What is tried on random numbers, before numbers are fake: norms, MLPs, rotations, the attention kernel."""
    apply_fused(load_model(ModelRequest(folder, dtype=torch.float32, lora=config.lora)))
    attention.kernel_works = lambda *facts: True
    # The update of bf16 weights is one kernel of Triton's a parameter, which a dispatch mode does not see.
    narrow.kernel_of_triton = lambda: SimpleNamespace(update_narrow=lambda *numbers: None)


def global_batch(tokens, packed, num_micro_batches, alike=False):
    ids = (torch.zeros(tokens, dtype=torch.long) if alike else torch.arange(tokens) % 500)[None]
    positions = torch.cat([torch.arange(tokens // 3), torch.arange(tokens - tokens // 3)])[None]
    edges = torch.tensor([0, tokens // 3, tokens], dtype=torch.int32)
    micro = Batch(
        input_ids=ids, labels=ids.clone(), position_ids=positions, boundaries=edges if packed else None,
        attention_mask=None, num_targets=tokens, num_tokens=tokens, num_samples=2, token_keys=ids.clone(),
        target_places=torch.arange(tokens),  # as Batch.pinned finds them
    )  # fmt: skip
    nobody = np.empty(0, dtype=np.int64)
    targets = tokens * num_micro_batches
    return GlobalBatch([micro] * num_micro_batches, targets, 2 * num_micro_batches, targets, 0, 0, nobody)
