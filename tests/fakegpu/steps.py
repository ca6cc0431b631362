"""What runs on the fake GPU: real models, layouts, engines and optimizer steps. Each function's answer is JSON."""

import contextlib
import functools
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from duoka.comm.world import World
from duoka.config.schema import LoraConfig, OptimConfig, ParallelConfig, TrainConfig
from duoka.data.feed.loader import Batch, GlobalBatch
from duoka.model import attention
from duoka.model.build import find_core, load_model
from duoka.model.fused import apply_fused
from duoka.model.layers import find_layers
from duoka.model.request import ModelRequest
from duoka.model.shards import build_without_memory
from duoka.optim.build import build_optimizer
from duoka.optim.roles import assign_roles
from duoka.parallel.apply import parallelize
from duoka.parallel.mesh import build_mesh
from duoka.plan.layout import Layout
from duoka.torch_private import fake_store
from duoka.train.stages.likelihood import Likelihood
from duoka.train.step import optimizer_step
from fakegpu.mode import FakeGpu

GPU = torch.device("cuda", 0)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FAMILIES = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
SIZES = {
    "hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 512,
}  # fmt: skip
MICRO_BATCHES = 2


@functools.cache
def model_folder(family, num_layers, vocab, tied):
    """A model of this many layers, as safetensors."""
    config, kind = FAMILIES[family]
    folder = Path(tempfile.mkdtemp(prefix="fakegpu-"))
    settings = {**SIZES, "num_hidden_layers": num_layers, "vocab_size": vocab, "tie_word_embeddings": tied}
    kind(config(**settings)).save_pretrained(folder)
    return folder


def count_step(
    num_layers=2, family="llama", strategy="single", size=1, shard=None, precision="bf16", recompute="none",
    offload="none", lora=False, dropout=0.0, optim="adamw", packed=True, tokens=96, vocab=512, tied=False,
):  # fmt: skip
    """An optimizer step of MICRO_BATCHES micro-batches, on rank 0 of `size`, after a first one that made the state."""
    shard = shard or (size if strategy in ("zero1", "zero2", "fsdp") else 1)
    layout = Layout(
        dp=size, strategy=strategy, precision=precision, recompute=recompute, packing=packed, shard=shard,
        offload=offload,
    )  # fmt: skip
    adapters = LoraConfig(rank=4, dropout=dropout) if lora else None
    folder = model_folder(family, num_layers, vocab, tied)
    request = ModelRequest(folder, dtype=DTYPES[precision] if lora else torch.float32, lora=adapters)
    _try_fusions(request)
    batches = [global_batch(tokens, packed, number) for number in (1, MICRO_BATCHES)]
    with _world(layout) as world, FakeGpu() as gpu:
        engine, optimizer, stage = _build(request, layout, world, OptimConfig(name=optim))
        for batch in batches:
            gpu.start()
            optimizer_step(engine, optimizer, batch, stage, clip=1.0)
    held = {name: str(tensor.device) for name, tensor in _held(engine, optimizer)}
    return {
        "kernels": sum(gpu.kernels.values()), "by_kernel": dict(gpu.kernels), "syncs": dict(gpu.syncs),
        "uploads": dict(gpu.uploads), "on_host": dict(gpu.on_host), "casts": dict(gpu.casts),
        "held_on_host": sorted(name for name, device in held.items() if device == "cpu"),
    }  # fmt: skip


def _build(request, layout, world, optim):
    source = None
    if layout.is_sharded:
        lm, source = build_without_memory(request)
    else:
        lm = load_model(request)
    core = find_core(lm)
    roles = assign_roles(lm, core, find_layers(core))
    whole = {name for name, p in lm.named_parameters() if p.requires_grad and roles[name] == "matrix"}
    stage = Likelihood(SimpleNamespace(train=TrainConfig()))
    engine = parallelize(
        stage.wrap(lm),
        layout,
        ParallelConfig(),
        build_mesh(layout, world),
        source,
        whole if optim.name == "muon" else (),
    )
    engine.model.train()
    on_host = layout.offload == "optimizer"
    return (
        engine,
        build_optimizer(engine.named_trainable(), optim, on_host=on_host, roles=roles, sharing=engine.share_matrices),
        stage,
    )


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


def _try_fusions(request):
    """What is tried on random numbers, before numbers are fake: norms, MLPs, the attention kernel."""
    apply_fused(load_model(request), adapters=True)
    attention._kernel_works = lambda *facts: True


def global_batch(tokens, packed, num_micro_batches):
    ids = torch.zeros((1, tokens), dtype=torch.long)
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
