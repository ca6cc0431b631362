"""A model in stages on several ranks trains as one process does: loss, norm, every gradient, every weight."""

import itertools
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from worlds import run_world

VOCABULARY, LAYERS, STEPS = 61, 5, 2
SIZES = {
    "vocab_size": VOCABULARY, "num_hidden_layers": LAYERS, "hidden_size": 32, "intermediate_size": 48,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
CLIP = 0.5
# Lengths of each micro-batch's documents, by data rank; of those of `empty` no token is a target.
LAID_OUT = {
    "one": ([[11, 7]], [[5, 9, 3]]),
    "three": ([[13, 4], [6], [9, 2, 8]], [[3], [17, 5], [10]]),
}
EMPTY = 1  # of three


# --- the oracle: transformers and torch alone, a document at a time ---


def write_model(folder, kind, *, tied):
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    makers = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}
    config, model = makers[kind]
    with torch.random.fork_rng():
        torch.manual_seed(3)
        made = model(config(**SIZES, tie_word_embeddings=tied))
        for parameter in made.parameters():
            if parameter.ndim == 1:  # biases begin as zeros, norms as ones
                parameter.data.add_(0.1 * torch.randn_like(parameter))
        made.save_pretrained(folder)


def draw_documents(step, laid_out, data):
    """[data rank][micro-batch] -> [(ids, is_target)]; the same for everybody who asks."""
    numbers = torch.Generator().manual_seed(100 * step + len(LAID_OUT[laid_out][0]))
    drawn = []
    for lengths in LAID_OUT[laid_out][:data]:
        micros = []
        for micro, documents in enumerate(lengths):
            known = [torch.randint(3, VOCABULARY, (length,), generator=numbers) for length in documents]
            masks = [torch.rand(length, generator=numbers) < 0.7 for length in documents]
            if laid_out == "three" and micro == EMPTY:
                masks = [torch.zeros_like(mask) for mask in masks]
            micros.append(list(zip(known, masks, strict=True)))
        drawn.append(micros)
    return drawn


def late_only(name):
    return ".layers.3." in name or ".layers.4." in name or name.endswith("lm_head.weight")


def learn_plainly(folder, laid_out, data, optimizer, trains):
    """(losses, norms, gradients of each step, final weights, the adapters' beginning) of the plain loop."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    if trains == "lora":
        import peft

        settings = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules="all-linear")
        model = peft.get_peft_model(model, settings)
        numbers = torch.Generator().manual_seed(5)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=numbers))
    if trains == "late":
        for name, parameter in model.named_parameters():
            parameter.requires_grad = late_only(name)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    start = {name: p.detach().clone() for name, p in named.items()}
    steps = make_optimizer(optimizer, list(named.values()))
    losses, norms, gradients = [], [], []
    for step in range(STEPS):
        everything = [one for micros in draw_documents(step, laid_out, data) for micro in micros for one in micro]
        count = sum(int(mask[1:].sum()) for _, mask in everything)
        total = 0.0
        for ids, mask in everything:
            logits = model(input_ids=ids[None]).logits[0, :-1]
            loss = F.cross_entropy(logits[mask[1:]], ids[1:][mask[1:]], reduction="sum") / count
            loss.backward()
            total += loss.item()
        gradients.append({name: p.grad.clone() for name, p in named.items()})
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        steps.step()
        steps.zero_grad()
        losses.append(total)
    return {
        "losses": losses, "norms": norms, "gradients": gradients, "start": start,
        "weights": {name: p.detach() for name, p in named.items()},
    }  # fmt: skip


def make_optimizer(name, parameters):
    groups = [{"params": parameters}]  # a group even of nothing: a stage may train nothing
    if name == "sgd":
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    return torch.optim.AdamW(groups, lr=1e-3, eps=1e-3, weight_decay=0.1)  # eps: what is only noise stays small


# --- the same through an engine ---


def to_batch(step, laid_out, data, rank):
    from duoka.data.feed.loader import GlobalBatch, pack_segments
    from duoka.data.tokens.template import Sample

    drawn = draw_documents(step, laid_out, data)
    everything = [one for micros in drawn for micro in micros for one in micro]
    micros = [
        pack_segments([Sample(ids.numpy().astype(np.int32), mask.numpy()) for ids, mask in micro], len(micro))
        for micro in drawn[rank]
    ]
    count = sum(int(mask[1:].sum()) for _, mask in everything)
    tokens = sum(len(ids) for ids, _ in everything)
    return GlobalBatch(micros, count, len(everything), tokens, 0, step, np.arange(len(everything)))


def build(folder, layout, mesh, trains, start):
    from duoka.config.schema import LoraConfig, ParallelConfig
    from duoka.model.build import LossModel
    from duoka.model.request import ModelRequest
    from duoka.model.shards import build_without_memory
    from duoka.parallel.apply import parallelize

    lora = LoraConfig(rank=4, alpha=8, targets="all") if trains == "lora" else None
    lm, source = build_without_memory(ModelRequest(Path(folder), torch.float32, lora=lora))
    if trains == "late":
        for name, parameter in lm.named_parameters():
            parameter.requires_grad = late_only(name)
    engine = parallelize(LossModel(lm), layout, ParallelConfig(), mesh, source)
    if trains == "lora":
        with torch.no_grad():
            for name, parameter in engine.named_trainable().items():
                give(parameter, start[name])
    return engine


def give(parameter, values):
    from torch.distributed.tensor import DTensor, distribute_tensor

    if isinstance(parameter, DTensor):
        values = distribute_tensor(values, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(values)


def whole(tensor):
    from torch.distributed.tensor import DTensor

    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def compare(found, wanted, what):
    """Each tensor to 1e-5; one that is small beside the others to a tenth of that of all together."""
    together = float(torch.stack([value.norm() for value in wanted.values()]).norm())
    for name, value in found.items():
        off, size = float((value - wanted[name]).norm()), float(wanted[name].norm())
        assert off <= 1e-5 * size + 1e-6 * together, f"{what} of {name}: off by {off}, of {size} ({together} in all)"


def near(found, wanted, what):
    assert abs(found - wanted) <= 1e-5 * abs(wanted), f"{what}: {found} for {wanted}"


def layout_of(name):
    """`single·pp2`, `single·pp2 interleaved 2`, `zero1x2·pp2 gpipe full`."""
    from dataclasses import replace

    from duoka.plan.layout import parse_layout

    first, *how = name.split()
    recompute = next((word for word in how if word in ("full", "selective", "1/2")), "none")
    schedule = next((word for word in how if word in ("gpipe", "interleaved", "zero-bubble", "zbv")), "1f1b")
    virtual = 2 if schedule in ("interleaved", "zbv") else 1
    return replace(parse_layout(first), schedule=schedule, virtual=virtual, recompute=recompute)


def learn_in_stages(cases, folder):
    from duoka.comm.world import end_world, start_world
    from duoka.config.schema import ParallelConfig, RunConfig
    from duoka.parallel.mesh import build_mesh
    from duoka.train.stages.likelihood import Likelihood
    from duoka.train.step import optimizer_step

    world = start_world(ParallelConfig(strategy="fsdp"))
    stage = Likelihood(RunConfig.model_validate({"model": "demo", "data": {"train": ["identity"]}}))
    meshes = {}
    for model, name, laid_out, optimizer, trains, oracle in cases:
        layout = layout_of(name)
        if name not in meshes:
            meshes[name] = build_mesh(layout, world)
        mesh = meshes[name]
        wanted = torch.load(oracle, weights_only=True)
        engine = build(f"{folder}/{model}", layout, mesh, trains, wanted["start"])
        own = engine.named_trainable()
        everyone = mesh.pipeline.gather(list(own))
        assert {one for names in everyone for one in names} == set(wanted["weights"]), "a parameter has no stage"
        steps = make_optimizer(optimizer, list(own.values()))
        engine.model.train()
        where = f"{model}, {name}, {laid_out}, {optimizer}, {trains}, rank {world.rank}"
        clip = engine.clip
        for step in range(STEPS):
            seen = {}

            def look(*arguments, seen=seen, clip=clip, own=own, **options):
                seen.update({one: whole(p.grad).clone() for one, p in own.items()})
                return clip(*arguments, **options)

            engine.clip = look
            batch = to_batch(step, laid_out, layout.dp, mesh.data.rank)
            result = optimizer_step(engine, steps, batch, stage, clip=CLIP)
            near(result.loss, wanted["losses"][step], f"loss of {where}, step {step}")
            near(result.norm, wanted["norms"][step], f"norm of {where}, step {step}")
            assert result.norm > CLIP, "the clip is active"
            compare(seen, wanted["gradients"][step], f"{where}, step {step}: gradient")
        compare({one: whole(p) for one, p in own.items()}, wanted["weights"], f"{where}: weight")
    if world.size == 2:
        del engine.clip
        survive_faults(engine, steps, stage, mesh)
        name = next(one for one in meshes if one.endswith(("interleaved", "zbv")))
        measure_in_stages(f"{folder}/tied", name, meshes[name])
    world.barrier()
    end_world(world)


def survive_faults(engine, steps, stage, mesh):
    """What one stage meets, all answer alike, and nothing has changed; other micro-batches on one are refused."""
    from duoka.errors import WorkerFailed
    from duoka.parallel import inject
    from duoka.process.environ import INJECT
    from duoka.train.step import optimizer_step

    def step(laid_out="three"):
        return optimizer_step(engine, steps, to_batch(0, laid_out, 1, 0), stage, clip=CLIP)

    engine.zero_grad(steps)
    before = {name: p.detach().clone() for name, p in engine.named_trainable().items()}
    for rank in (0, 1):
        os.environ[INJECT] = f"oom step=1 rank={rank}"
        inject.forget()
        result = step()
        assert result.is_short and (result.shortage is not None) == (rank == mesh.everyone.rank)
        assert result.shortage is None or result.shortage.rejoined
    for fault in (f"nan step=1 rank={mesh.loss_place}", "nan_grad step=1 rank=0"):
        os.environ[INJECT] = fault
        inject.forget()
        result = step()
        assert not result.is_finite and not result.is_short, fault
    del os.environ[INJECT]
    assert all(torch.equal(p, before[name]) for name, p in engine.named_trainable().items())
    assert step().is_finite
    with pytest.raises(WorkerFailed, match="different micro-batches for step 1") as refused:
        step("three" if mesh.place["pp"] else "one")
    assert "(1, 18)" in refused.value.where and "(1, 17)" in refused.value.where


def measure_in_stages(folder, name, mesh):
    """An evaluation and the likeliest next token, on every rank as of the whole model."""
    from transformers import AutoModelForCausalLM

    from duoka.parallel.measure import measure_loss

    engine = build(folder, layout_of(name), mesh, "all", {})
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    total, correct, targets = 0.0, 0, 0
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        for document, mask in (one for micro in draw_documents(0, "three", 1)[0] for one in micro):
            logits = plain(input_ids=document[None]).logits[0, :-1][mask[1:]]
            wanted = document[1:][mask[1:]]
            total += float(F.cross_entropy(logits, wanted, reduction="sum"))
            correct, targets = correct + int((logits.argmax(-1) == wanted).sum()), targets + len(wanted)
        following = int(plain(input_ids=ids).logits[0, -1].argmax())
        with engine.evaluate() as model:
            found = measure_loss(model, to_batch(0, "three", 1, 0).micro_batches, mesh.loss, "fp32")
            assert model.next_token(ids) == following
    near(found.loss, total / targets, "evaluated loss")
    assert (found.num_targets, found.accuracy) == (targets, correct / targets)


MODELS = {"untied": ("llama", False), "tied": ("llama", True), "biases": ("qwen2", False)}


def run_cases(folder, size, cases):
    """`cases`: (model, layout, laid out, optimizer, trains)."""
    for name in {case[0] for case in cases}:
        write_model(folder / name, MODELS[name][0], tied=MODELS[name][1])
    with_oracles, known = [], {}
    for model, layout, laid_out, optimizer, trains in cases:
        key = (model, laid_out, layout_of(layout).dp, optimizer, trains)
        if key not in known:
            known[key] = folder / f"oracle{len(known)}.pt"
            torch.save(learn_plainly(folder / model, *key[1:]), known[key])
        with_oracles.append((model, layout, laid_out, optimizer, trains, str(known[key])))
    run_world(size, learn_in_stages, with_oracles, str(folder))


TWO_STAGES = ("single·pp2", "single·pp2 interleaved")
IN_PARTS = ("single·pp2 zero-bubble", "single·pp2 zbv")
COPIES = ("zero1x2·pp2", "ddp2·pp2")


def test_two_stages_equal_one_process(tmp_path):
    cases = [(model, layout, "three", "sgd", "all") for model, layout in itertools.product(MODELS, TWO_STAGES)]
    cases += [("untied", layout, "one", "adamw", "all") for layout in TWO_STAGES]
    cases += [("tied", layout, "three", "sgd", "all") for layout in ("single·pp2 gpipe", "single·pp2 full")]
    layouts = ("single·pp2", "single·pp2 interleaved 1/2")
    cases += [(model, layout, "three", "adamw", "lora") for model in ("tied", "biases") for layout in layouts]
    cases += [("untied", layout, "three", "adamw", "late") for layout in ("single·pp2", "single·pp2 interleaved")]
    run_cases(tmp_path, 2, cases)


def test_backward_passes_in_two_parts_equal_one_process(tmp_path):
    cases = [(model, layout, "three", "sgd", "all") for model, layout in itertools.product(MODELS, IN_PARTS)]
    cases += [("tied", "single·pp2 zbv full", "three", "sgd", "all"), ("untied", IN_PARTS[1], "one", "adamw", "all")]
    cases += [("biases", "single·pp2 zero-bubble selective", "three", "sgd", "all")]
    cases += [("tied", "single·pp2 zero-bubble full", "three", "adamw", "lora")]
    cases += [("untied", layout, "three", "adamw", "late") for layout in IN_PARTS]
    run_cases(tmp_path, 2, cases)


def test_stages_beside_data_ranks_equal_one_process(tmp_path):
    cases = [
        (model, layout, "three", "adamw", "all") for model, layout in itertools.product(("untied", "tied"), COPIES)
    ]
    cases += [("tied", "zero2x2·pp2", "three", "sgd", "all"), ("tied", "zero1x2·pp2 1/2", "one", "adamw", "all")]
    cases += [("tied", "zero1x2·pp2", "three", "adamw", "lora"), ("untied", "zero1x2·pp2", "three", "sgd", "late")]
    cases += [("tied", "single·pp4", "three", "sgd", "all"), ("biases", "ddp2·pp2 interleaved", "three", "sgd", "all")]
    cases += [
        ("tied", "ddp2·pp2 zbv", "three", "sgd", "all"),
        ("tied", "single·pp4 zero-bubble", "three", "sgd", "all"),
    ]
    run_cases(tmp_path, 4, cases)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_every_model_under_every_schedule_and_optimizer_equals_one_process(tmp_path):
    every = itertools.product(MODELS, (*TWO_STAGES, *IN_PARTS), ("one", "three"), ("sgd", "adamw"), ("all",))
    run_cases(tmp_path / "two", 2, list(every))
    run_cases(tmp_path / "four", 4, list(itertools.product(MODELS, COPIES, ("three",), ("sgd", "adamw"), ("all",))))
