"""Cases of the sequence axis, and a plain loop that computes them document by document and shares no code with ours."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import ClassVar

import torch
import torch.nn.functional as F

VOCAB = 96
STEPS = 2  # the second one starts from a state
CLIP = 0.3


@dataclass(frozen=True)
class Case:
    """`rows`: per data rank its micro-batches, each a list of documents by number; `lengths` are theirs."""

    model: str = "llama"
    settings: dict = field(default_factory=dict)
    packing: bool = True
    lengths: tuple = (5, 17, 9, 24, 13, 4, 11)
    untargeted: tuple = ()  # documents without a single target
    rows: tuple = (((0, 1, 2), (3,)),)
    optimizer: str = "sgd"
    lora: bool | tuple = False  # of all layers, or of these
    recompute: str = "none"
    balance: float = 0.0  # weight of the loss that evens out a mixture's experts


def heads(num, kv):
    return {"num_attention_heads": num, "num_key_value_heads": kv, "hidden_size": 8 * num}


EXPERTS = {"num_experts_per_tok": 2, "head_dim": 8}
CASES = {
    "6 heads, 3 of keys, Adam": Case(settings=heads(6, 3), optimizer="adamw"),
    "6 heads, 2 of keys": Case(settings=heads(6, 2)),
    "6 heads, 1 of keys, recomputing": Case(settings=heads(6, 1), recompute="full"),
    "5 heads, gathered": Case(settings=heads(5, 1)),
    "9 heads, 3 of keys, gathered, recomputing what is cheap": Case(settings=heads(9, 3), recompute="selective"),
    "the last shard without targets": Case(settings=heads(6, 2), untargeted=(3, 5), rows=(((1, 3), (0, 5), ()),)),
    "padded rows": Case(settings=heads(6, 3), packing=False, rows=(((0, 1), (3, 4, 6), ()),)),
    "padded rows, gathered": Case(settings=heads(5, 5), packing=False, rows=(((0, 1, 2), (4, 6)),)),
    "windows": Case("mistral", {**heads(6, 2), "sliding_window": 6}, optimizer="adamw"),
    "windows, gathered": Case("mistral", {**heads(5, 1), "sliding_window": 6}),
    "softcaps and windows": Case("gemma2", {**heads(6, 2), "sliding_window": 6, "head_dim": 8}),
    "softcaps and windows, gathered": Case("gemma2", {**heads(5, 1), "sliding_window": 6, "head_dim": 8}),
    "LoRA": Case(settings=heads(6, 2), lora=True, optimizer="adamw"),
    "experts of Qwen3": Case("qwen3_moe", {**heads(6, 2), **EXPERTS, "num_experts": 8, "moe_intermediate_size": 32}),
    "experts of Mixtral": Case("mixtral", {**heads(6, 2), **EXPERTS, "num_local_experts": 8}),
}
# Of two data ranks, which share the documents; the second has fewer.
WIDE = (((0, 1), (3,)), ((2, 4), ()))


def build_model(case):
    """The same weights wherever it is called."""
    from transformers import AutoConfig, AutoModelForCausalLM

    size = case.settings["hidden_size"]
    facts = {"num_hidden_layers": 2, "vocab_size": VOCAB, "intermediate_size": 2 * size, "initializer_range": 0.1}
    facts |= {"max_position_embeddings": 128, "tie_word_embeddings": False, "pad_token_id": 0} | case.settings
    is_skewed = facts.pop("skewed", False)
    if case.model == "gemma2":
        facts |= {"layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 8}
    config = AutoConfig.for_model(case.model, **facts)
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    if is_skewed:
        skew(model)
    return model


def skew(model):
    """All tokens to experts 1 and 6 of each layer: one channel is large in every token, and only these like it."""
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] = 2.0
        for name, weight in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                weight[:, 0] = -2.0
                weight[1, 0], weight[6, 0] = 2.0, 1.5


def draw_documents(case):
    """(ids, which are targets) of each document."""
    dice = torch.Generator().manual_seed(11)
    found = []
    for number, length in enumerate(case.lengths):
        ids = torch.randint(3, VOCAB, (length,), generator=dice)
        targets = torch.rand(length, generator=dice) < 0.6
        targets[-1] = True  # the border between two documents is one of labels too
        found.append((ids, targets & (number not in case.untargeted)))
    return found


def build_optimizer(case, parameters):
    if case.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=0.3)
    return torch.optim.AdamW(parameters, lr=5e-3, eps=1e-3)  # smaller ones make whole steps of what is noise


@dataclass
class Learned:
    losses: list
    norms: list
    gradients: dict  # of the first step, before they are clipped
    weights: dict


def learn_alone(case, adapt):
    """What a plain loop makes of the case: every document by itself, through the model's own eager attention."""
    model, documents = adapt(build_model(case)), draw_documents(case)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = build_optimizer(case, trained.values())
    chosen = [number for rank in case.rows for micro in rank for number in micro]
    count = sum(int(documents[number][1][1:].sum()) for number in chosen)
    losses, norms, gradients = [], [], {}
    for _ in range(STEPS):
        total, routed = 0.0, []
        for number in chosen:
            ids, targets = documents[number]
            output = model(
                input_ids=ids[None], use_cache=False, **({"output_router_logits": True} if case.balance else {})
            )
            logits = output.logits[0, :-1]
            loss = F.cross_entropy(logits[targets[1:]], ids[1:][targets[1:]], reduction="sum") / count
            if case.balance:
                routed.append(output.router_logits)
            loss.backward(retain_graph=bool(case.balance))
            total += float(loss.detach())
        if case.balance:  # of all documents at once, by transformers' own function
            loss = case.balance * balancing_loss(model, routed)
            loss.backward()
            total += float(loss.detach())
        gradients = gradients or {name: p.grad.clone() for name, p in trained.items()}
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained.values(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return Learned(losses, norms, gradients, {name: p.detach().clone() for name, p in trained.items()})


def learn_alone_once(case, world):
    """The same by rank 0, which tells the others; again only for a case that differs in what is learned."""
    what = repr(replace(case, recompute="none"))
    if what not in ALONE:
        found = [learn_alone(case, adapt_of(case)) if world.is_main else None]
        if world.size > 1:
            torch.distributed.broadcast_object_list(found)
        ALONE[what] = found[0]
    return ALONE[what]


ALONE = {}  # of this world


def balancing_loss(model, routed):
    import sys

    layers = tuple(torch.cat(layer) for layer in zip(*routed, strict=True))
    config = model.config
    own = sys.modules[type(model).__module__].load_balancing_loss_func
    return own(layers, layers[0].shape[1], config.num_experts_per_tok)


def adapt_of(case):
    """Adapters of duoka's making: where they begin is no part of what is compared."""
    if not case.lora:
        return lambda model: model
    from functools import partial

    from duoka.config.schema import LoraConfig
    from duoka.model.lora import apply_lora

    targets = {} if case.lora is True else {"targets": case.lora}
    return partial(apply_lora, lora=LoraConfig(rank=3, dropout=0.0, **targets), seed=7)


class Likelihood:
    metrics: ClassVar[dict] = {}

    def denominators(self, batch):
        return {"tokens": batch.global_targets}

    def sums(self, model, micro, device):
        from duoka.parallel.inputs import model_inputs
        from duoka.parallel.objective import Sums

        loss, _ = model(**model_inputs(micro, device))
        return Sums({"tokens": loss})


def batch_of(case, rank):
    """The global batch of a data rank."""
    import numpy as np

    from duoka.data.feed.loader import GlobalBatch, build_batch
    from duoka.data.tokens.template import Sample

    documents = draw_documents(case)
    samples = [[Sample(ids.numpy().astype(np.int32), targets.numpy())] for ids, targets in documents]
    store = SimpleNamespace(segments=samples.__getitem__)
    micros = [build_batch(store, SimpleNamespace(sample_ids=micro), case.packing, 0) for micro in case.rows[rank]]
    count = sum(int(documents[number][1][1:].sum()) for row in case.rows for micro in row for number in micro)
    return GlobalBatch(micros, count, 0, 0, 0, 0, np.empty(0, dtype=np.int64))


def learn_together(case, layout, mesh, steps=STEPS):
    """What the engine of this layout makes of it, whole tensors on every rank."""
    from duoka.config.schema import ParallelConfig
    from duoka.model.attention import register_attention
    from duoka.model.build import LossModel
    from duoka.model.experts import use_own_experts
    from duoka.parallel.apply import parallelize
    from duoka.train.step import optimizer_step

    model = adapt_of(case)(build_model(case))
    use_own_experts(getattr(model, "get_base_model", lambda: model)())
    (getattr(model, "get_base_model", lambda: model)()).set_attn_implementation(register_attention())
    layout = replace(layout, recompute=case.recompute, packing=case.packing)
    engine = parallelize(LossModel(model).train(), layout, ParallelConfig(strategy=layout.strategy), mesh)
    optimizer = build_optimizer(case, engine.named_trainable().values())
    batch, losses, norms, gradients = batch_of(case, mesh.data.rank), [], [], {}

    def whole(tensor):
        return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().cpu().clone()

    find_objective = objective_of(case, engine)
    engine.forward_backward(batch, find_objective(batch))
    gradients = {name: whole(p.grad) for name, p in engine.named_trainable().items()}
    engine.zero_grad(optimizer)
    for _ in range(steps):
        result = optimizer_step(engine, optimizer, batch, find_objective(batch), clip=CLIP)
        losses.append(result.loss)
        norms.append(result.norm)
    weights = {name: whole(p) for name, p in engine.named_trainable().items()}
    return Learned(losses, norms, gradients, weights)


def objective_of(case, engine):
    from duoka.config.schema import RunConfig
    from duoka.train.balance import build_objective

    train = {"router_aux_loss": case.balance}
    config = RunConfig.model_validate({"model": "demo", "data": {"train": ["identity"]}, "train": train})
    return build_objective(config, engine, Likelihood())


def distance(found, wanted):
    """The worst relative error, and of what."""
    numbers = [(f"step's {kind}", getattr(found, kind), getattr(wanted, kind)) for kind in ("losses", "norms")]
    errors = [(abs(a / b - 1), kind) for kind, ours, theirs in numbers for a, b in zip(ours, theirs, strict=True)]
    for kind in ("gradients", "weights"):
        ours, theirs = getattr(found, kind), getattr(wanted, kind)
        assert ours.keys() == theirs.keys(), (ours.keys(), theirs.keys())
        errors += [
            (float((ours[name] - one).norm() / one.norm().clamp(min=1e-12)), f"{kind} of {name}")
            for name, one in theirs.items()
        ]
    return max(errors)
