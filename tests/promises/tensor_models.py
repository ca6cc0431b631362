"""Tiny models of the shapes that tensor parallelism has to get right, and their training by transformers and torch."""

import random
from typing import ClassVar

import torch
import torch.nn.functional as F

LR, CLIP, DECAY, STEPS = 0.05, 0.5, 0.1, 2
SMALL = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.15, "pad_token_id": 2,
    "bos_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": False,
}  # fmt: skip
NINE = {"hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
# By name: the config class, and what differs.
MODELS = {
    "llama": ("LlamaConfig", {}),
    "smollm": ("LlamaConfig", NINE),
    "tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 8, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", {}),
    "biased": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "phi3": ("Phi3Config", {}),
    "gemma2": ("Gemma2Config", {
        "head_dim": 8, "query_pre_attn_scalar": 8, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0,
        "tie_word_embeddings": True,
    }),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 8, "query_pre_attn_scalar": 8, "tie_word_embeddings": True}),
    "olmo2": ("Olmo2Config", {}),
    "moe": ("Qwen3MoeConfig", {
        "head_dim": 8, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [],
    }),
}  # fmt: skip


def write_model(name, folder, layers=2):
    """The model with nothing at its usual start: norms are not one, biases not zero."""
    import transformers

    kind, own = MODELS[name]
    config = getattr(transformers, kind)(**{**SMALL, "num_hidden_layers": layers, **own})
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder)
    return folder


def documents(step):
    """(tokens, which of them are targets) of one global batch; the fourth document has no target."""
    dice = random.Random(step)
    found = []
    for place in range(6):
        length = dice.randint(3, 17)
        ids = torch.tensor([dice.randrange(61) for _ in range(length)])
        mask = torch.tensor([place != 3 and dice.random() < 0.6 for _ in range(length)])
        mask[-1] = place != 3
        found.append((ids, mask))
    return found


# Which documents each micro-batch of each data rank has, by (data ranks, micro-batches).
SHARES = {
    (1, 1): [[[0, 1, 2, 3, 4, 5]]],
    (1, 3): [[[0, 1, 2, 4], [3], [5]]],
    (2, 1): [[[0, 1, 3]], [[2, 4, 5]]],
    (2, 3): [[[0], [3], [1]], [[2, 4], [5], []]],
    (4, 3): [[[0], [3], [1]], [[2], [], []], [[4], [5], []], [[], [], []]],
}


def make_optimizer(name, named):
    groups = [
        {"params": [p for p in named.values() if p.ndim >= 2], "weight_decay": DECAY},
        {"params": [p for p in named.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if name == "sgd":
        return torch.optim.SGD(groups, lr=LR, foreach=False)
    return torch.optim.AdamW(groups, lr=LR / 10, betas=(0.9, 0.999), eps=1e-8, foreach=False, fused=False)


def train_plainly(folder, optimizer, adapt=None):
    """Losses, norms, gradients of each step before clipping, and final weights: one document at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model = adapt(model) if adapt else model
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    stepper = make_optimizer(optimizer, named)
    seen = {"losses": [], "norms": [], "gradients": []}
    for step in range(STEPS):
        batch = documents(step)
        count = sum(int(mask[1:].sum()) for _, mask in batch)
        total = 0.0
        for ids, mask in batch:
            logits = model(ids[None]).logits[0, :-1]
            loss = F.cross_entropy(logits[mask[1:]], ids[1:][mask[1:]], reduction="sum") / count
            loss.backward()
            total += float(loss.detach())
        seen["losses"].append(total)
        seen["gradients"].append({name: p.grad.clone() for name, p in named.items()})
        seen["norms"].append(float(torch.nn.utils.clip_grad_norm_(named.values(), CLIP)))
        stepper.step()
        stepper.zero_grad()
    return seen | {"weights": {name: p.detach().clone() for name, p in named.items()}}


# --- the same through duoka, on a rank of a world ---


def pack(batch, places):
    """The documents in one row, as the loader lays them out; none: one token without a target."""
    from duoka.data.feed.loader import IGNORED, Batch, empty_batch

    if not places:
        return empty_batch(2, packing=True)
    rows = [batch[place] for place in places]
    labels = [torch.where(mask, ids, IGNORED).roll(-1) for ids, mask in rows]
    for one in labels:
        one[-1] = IGNORED
    edges = torch.tensor([0, *(len(ids) for ids, _ in rows)]).cumsum(0).to(torch.int32)
    ids = torch.cat([ids for ids, _ in rows])
    return Batch(
        input_ids=ids[None],
        labels=torch.cat(labels)[None],
        position_ids=torch.cat([torch.arange(len(ids)) for ids, _ in rows])[None],
        boundaries=edges,
        attention_mask=None,
        num_targets=sum(int(mask[1:].sum()) for _, mask in rows),
        num_tokens=len(ids),
        num_samples=len(rows),
        token_keys=torch.arange(len(ids))[None] * 7919 + 13 * places[0],
    )


def global_batch(step, mesh, num_micro):
    import numpy as np

    from duoka.data.feed.loader import GlobalBatch

    batch = documents(step)
    share = SHARES[mesh.data.size, num_micro][mesh.data.rank]
    return GlobalBatch(
        [pack(batch, places) for places in share],
        global_targets=sum(int(mask[1:].sum()) for _, mask in batch),
        num_samples=6, num_tokens=0, epoch=0, index=step, sample_ids=np.arange(6),
    )  # fmt: skip


class Mean:
    """The objective: mean over targets."""

    metrics: ClassVar = {}

    def denominators(self, batch):
        return {"tokens": batch.global_targets}

    def sums(self, model, micro, device):
        from duoka.parallel.inputs import model_inputs
        from duoka.parallel.objective import Sums

        return Sums({"tokens": model(**model_inputs(micro, device))[0]})


def build(folder, layout, world, *, lora=None, goal=None):
    """An engine under a layout, its model filled by boxes."""
    from duoka.config.schema import ParallelConfig
    from duoka.model.build import LossModel
    from duoka.model.loss import LIKELIHOOD
    from duoka.model.request import ModelRequest
    from duoka.model.shards import build_without_memory
    from duoka.parallel.apply import parallelize
    from duoka.parallel.mesh import build_mesh

    lm, source = build_without_memory(ModelRequest(folder, dtype=torch.float32, lora=lora))
    mesh = build_mesh(layout, world)
    strategy = layout.strategy if layout.strategy != "single" else "auto"
    model = LossModel(lm, goal or LIKELIHOOD)
    return parallelize(model, layout, ParallelConfig(strategy=strategy), mesh, source)


def whole(tensor):
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).cpu().clone()


def whole_model(engine, tensors):
    """Whole tensors by name, those of all stages; what two stages have is the same on both."""
    found = {}
    for part in engine.mesh.pipeline.gather({name: whole(one) for name, one in tensors.items()}):
        for name, one in part.items():
            assert torch.equal(found.setdefault(name, one), one), f"{name} differs on two stages"
    return found


def train_here(engine, optimizer, num_micro):
    """As `train_plainly`, by this rank's engine."""
    named = engine.named_trainable()
    stepper = make_optimizer(optimizer, named)
    seen = {"losses": [], "norms": [], "gradients": []}
    for step in range(STEPS):
        batch = global_batch(step, engine.mesh, num_micro)
        sums = engine.forward_backward(batch, Mean())
        own = float(sums.losses["tokens"]) if engine.mesh.counts_loss else 0.0
        seen["losses"].append(engine.world.sum([own])[0] / batch.global_targets)
        seen["gradients"].append(whole_model(engine, {name: p.grad for name, p in named.items()}))
        seen["norms"].append(float(engine.clip(stepper, CLIP)))
        engine.step(stepper)
        engine.zero_grad(stepper)
    return seen | {"weights": whole_model(engine, named)}


def compare(found, wanted, tolerance, what, limit=CLIP):
    """Every number: gradients and weights relative to the largest of their tensor."""
    assert min(wanted["norms"]) > limit, f"{what}: clipping is not active"
    for key in ("losses", "norms"):
        for step, (one, other) in enumerate(zip(found[key], wanted[key], strict=True)):
            assert abs(one - other) <= tolerance * abs(other), f"{what}: {key} of step {step}: {one} for {other}"
    pairs = [*zip(found["gradients"], wanted["gradients"], strict=True), (found["weights"], wanted["weights"])]
    for step, (ours, theirs) in enumerate(pairs):
        assert ours.keys() == theirs.keys(), what
        for name, tensor in theirs.items():
            off = float((ours[name] - tensor).abs().max() / tensor.abs().max().clamp_min(1e-30))
            kind = "weights" if step == STEPS else f"gradient of step {step}"
            assert off <= tolerance or not tensor.any(), f"{what}: {kind}: {name} is off by {off:.1e}"
