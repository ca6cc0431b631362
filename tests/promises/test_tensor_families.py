"""Every family that transformers gives a plan for tensor parallelism: right on two ranks, or refused by name."""

import importlib.util

import pytest
import torch
import torch.nn.functional as F
from families import BREAKS, all_families, family_config, write_family
from tensor_models import Mean, pack, whole
from worlds import run_world

LENGTH = 23
# Of those that are refused though a plan is there: what no rank may have a part of without being told how.
LEAST, LEAST_OF_AUTOTP = 30, 30


def document(vocabulary):
    numbers = torch.Generator().manual_seed(5)
    ids = torch.randint(3, min(60, vocabulary), (LENGTH,), generator=numbers)
    return ids, torch.ones(LENGTH, dtype=torch.bool)


def learn_plainly(folder):
    """(loss, gradients) by transformers alone."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").train()
    ids, _ = document(model.config.get_text_config().vocab_size)
    loss = F.cross_entropy(model(ids[None], use_cache=False).logits[0, :-1].float(), ids[1:])
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def learn_on_two(folder, config, world, engine_name):
    import numpy as np

    from duoka.config.schema import ParallelConfig
    from duoka.data.feed.loader import GlobalBatch
    from duoka.model.build import LossModel, load_model
    from duoka.model.exactness import SelfTest
    from duoka.model.experts import find_experts
    from duoka.model.request import ModelRequest
    from duoka.model.shards import build_without_memory
    from duoka.parallel.apply import parallelize
    from duoka.parallel.mesh import build_mesh
    from duoka.plan.layout import parse_layout

    request = ModelRequest(folder, dtype=torch.float32)
    # As a run does: what cannot be read by boxes is loaded whole.
    lm, source = build_without_memory(request) or (load_model(request), None)
    layout = parse_layout("single.tp2.ep2" if any(True for _ in find_experts(lm)) else "single.tp2")
    own = SelfTest(config).trial("packed").own_logits
    parallel = ParallelConfig(engine=engine_name, tensor=2)
    engine = parallelize(LossModel(lm, own_logits=own), layout, parallel, build_mesh(layout, world), source)
    engine.build_optimizer(lambda named: torch.optim.AdamW(named.values()))
    micro = pack([document(config.get_text_config().vocab_size)], [0])
    batch = GlobalBatch([micro], micro.num_targets, 1, LENGTH, 0, 0, np.arange(1))
    sums = engine.forward_backward(batch, Mean())
    found = {name: gathered(p) for name, p in engine.named_trainable().items() if p.grad is not None}
    return float(sums.losses["tokens"]) / micro.num_targets, found


def gathered(parameter):
    """Its gradient, of both ranks."""
    from duoka.parallel.tensor_part import join_parts, part_of

    part = part_of(parameter)
    return whole(parameter.grad) if part is None else join_parts(parameter.grad, part)


def judge(folder, names, engine_name, least):
    """In a world of two: what each family comes to."""
    from transformers import AutoConfig

    from duoka.comm.world import end_world, start_world
    from duoka.config.schema import ParallelConfig
    from duoka.errors import DuokaError
    from duoka.model.exactness import SelfTest

    world = start_world(ParallelConfig(strategy="fsdp"))
    verdicts = {}
    for name in names:
        wanted = torch.load(folder / f"{name}.pt", weights_only=True)
        config = AutoConfig.from_pretrained(folder / name)
        if SelfTest(config).layout is None:
            verdicts[name] = "refused: its rows, under any layout"
            continue
        try:
            loss, found = learn_on_two(folder / name, config, world, engine_name)
        except DuokaError as error:
            verdicts[name] = f"refused: {error.what}"
            continue
        off = abs(loss - wanted["loss"]) / wanted["loss"]
        largest = max(float(one.abs().max()) for one in wanted["gradients"].values())
        worst, where = 0.0, ""
        for key, theirs in wanted["gradients"].items():
            distance = float((found[key] - theirs).abs().max() / theirs.abs().max().clamp_min(1e-3 * largest))
            worst, where = max((worst, where), (distance, key))
        verdicts[name] = f"wrong: loss {off:.1e}, {where} {worst:.1e}" if max(off, worst) > 1e-4 else "right"
    if world.is_main:
        for name, verdict in verdicts.items():
            print(f"{name}: {verdict}", flush=True)
    assert not [name for name, verdict in verdicts.items() if verdict.startswith("wrong")], verdicts
    assert sum(verdict == "right" for verdict in verdicts.values()) >= least, verdicts
    world.barrier()
    end_world(world)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_every_family_with_a_plan_is_right_or_refused(tmp_path):
    names = []
    for name in all_families():
        try:
            if not family_config(name).base_model_tp_plan:
                continue
            loss, gradients = learn_plainly(write_family(tmp_path / name, name))
        except BREAKS as error:
            print(f"{name}: transformers' own pass: {type(error).__name__}: {error}"[:150])
            continue
        torch.save({"loss": loss, "gradients": gradients}, tmp_path / f"{name}.pt")
        names.append(name)
    run_world(2, judge, tmp_path, names, "native", LEAST)
    if importlib.util.find_spec("deepspeed"):
        run_world(2, judge, tmp_path, names, "deepspeed", LEAST_OF_AUTOTP)
