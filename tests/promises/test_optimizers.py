"""Every optimizer learns the same on any number of processes: against textbook forms that share no code with ours."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from textbook import textbook, textbook_of_adapters
from tiny import write_conversations, write_tiny_model
from transformers import AutoModelForCausalLM
from worlds import run_world, train_all

STEPS, LR, REST, DECAY, CLIP = 6, 0.02, 3e-3, 0.1, 0.5
OPTIM = {
    "muon": f"{{name: muon, lr: {LR}, adamw_lr: {REST}, embedding_lr: 0.01, weight_decay: {DECAY}, clip: {CLIP}}}",
    "lamb": f"{{name: lamb, lr: {LR}, weight_decay: {DECAY}, clip: {CLIP}}}",
    "lars": f"{{name: lars, lr: 2.0, momentum: 0.9, weight_decay: {DECAY}, clip: {CLIP}}}",
    "adafactor": f"{{name: adafactor, lr: {LR}, weight_decay: {DECAY}, clip: {CLIP}}}",
    "adamw": f"{{name: adamw, lr: {REST}, weight_decay: {DECAY}, clip: {CLIP}}}",
}
# Muon over adapters, whose products are fused and which learn at two rates, with smoothed targets: each was tested
# alone, here they meet.
B_RATIO = 2.5
MIXED = f"lora: {{rank: 4, alpha: 12, dropout: 0, b_lr_ratio: {B_RATIO}}}\ntrain: {{label_smoothing: 0.1}}\n"
OPTIM["mixed"] = OPTIM["muon"]
CASES = {
    1: [("single", name) for name in OPTIM],
    2: [("ddp", "muon"), ("zero1", "muon"), ("zero2", "muon"), ("fsdp", "muon"), ("fsdp", "lamb"), ("zero1", "lars"),
        ("ddp", "adafactor"), ("zero1", "mixed"), ("fsdp", "mixed"), ("zero2", "adamw")],
    3: [("zero1", "muon")],
    4: [("zero2", "muon"), ("hsdp", "lars")],
}  # fmt: skip
# Each is close to one above: `make nightly` runs them.
RARE = {
    3: [("fsdp", "muon"), ("zero1", "adamw")],
    4: [("zero1", "muon"), ("fsdp", "muon"), ("zero1", "adamw")],
}

pytestmark = pytest.mark.timeout(400)

YAML = """
model: {model}
data: {{train: [{data}]}}
optim: {optim}
{more}
parallel: {{strategy: {strategy}{pairs}}}
output: {folder}/out
"""


def rate(step):
    """A rate that changes: up for five steps, down after it."""
    return min(step / 5, (STEPS + 5 - step) / STEPS)


def micro_batches(step):
    """Two passes a step: what each of 12 rows of 16 tokens wants next; rank r of N learns from rows r, r + N, ..."""
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(3, 250, (12, 17), generator=generator) for _ in range(2)]


def learn(model, folder, cases):
    """Train each case in this world by duoka's own parts and leave weights, traffic and state bytes in `folder`."""
    from duoka.comm.world import end_world, start_world
    from duoka.config.load import load_config

    world = None
    for strategy, name in cases:
        config = load_config(Path(folder) / f"{strategy}-{name}.yaml").config
        world = world or start_world(config.parallel)
        facts, weights = learn_one(model, config, world, strategy)
        stem = f"{folder}/{strategy}-{name}-{world.size}-{world.rank}"
        facts["apart"] = use_apart(world) if world.size == 2 and strategy == "zero1" else {}
        Path(f"{stem}.json").write_text(json.dumps(facts))
        save_file({n: w.contiguous() for n, w in weights.items()}, f"{stem}.safetensors")
    end_world(world)


def use_apart(world):
    """Gradients on this rank when rank 0 alone used four matrices, and nobody the fifth."""
    from duoka.parallel.matrices import OwnedMatrices

    matrices = [torch.nn.Parameter(torch.ones(3, 3)) for _ in range(5)]
    owned = OwnedMatrices(matrices, world.size, world.rank, None, every_pass=False)
    owned.begin(True)
    for place in range(4 if world.rank == 0 else 0):
        (matrices[place] * (place + 1)).sum().backward()
    owned.finish(True)
    return {place: float(m.grad[0, 0]) for place, m in enumerate(matrices) if m.grad is not None}


def build(model, config, world, strategy):
    from duoka.model.build import LossModel, find_core, load_model
    from duoka.model.layers import find_layers
    from duoka.model.loss import Goal
    from duoka.model.request import ModelRequest
    from duoka.optim.build import build_optimizer
    from duoka.optim.roles import assign_roles
    from duoka.parallel.apply import parallelize
    from duoka.parallel.mesh import build_mesh
    from duoka.plan.layout import Layout
    from duoka.units import parse_amount

    shard = {"single": 1, "ddp": 1, "hsdp": 2}.get(strategy, world.size)
    layout = Layout(
        dp=world.size, strategy=strategy, precision="fp32", recompute="none", micro=parse_amount("1"),
        packing=False, shard=shard,
    )  # fmt: skip
    lm = load_model(ModelRequest(Path(model), dtype=torch.float32, lora=config.lora))
    if config.lora is None:
        lm.requires_grad_(True)
    core = find_core(lm)
    roles = assign_roles(lm, core, find_layers(core))
    trained = {n for n, p in lm.named_parameters() if p.requires_grad}
    matrices = {n for n in trained if roles[n] == "matrix"} if config.optim.name == "muon" else ()
    smooth = LossModel(lm, Goal(smoothing=config.train.label_smoothing))
    engine = parallelize(smooth, layout, config.parallel, build_mesh(layout, world), None, matrices)
    named = engine.named_trainable()
    ratio = 1.0 if config.lora is None else config.lora.b_lr_ratio
    optimizer = build_optimizer(named, config.optim, b_lr_ratio=ratio, roles=roles, sharing=engine.share_matrices)
    return engine, named, optimizer


def learn_one(model, config, world, strategy):
    """(facts, whole weights) after all steps of one case."""
    from duoka.comm.ledger import LEDGER
    from duoka.optim.build import optimizer_tensors, set_learning_rate
    from duoka.optim.clip import clip_gradients

    engine, named, optimizer = build(model, config, world, strategy)
    engine.model.train()
    longest = 0.0  # gradient before clipping
    for step in range(1, STEPS + 1):
        set_learning_rate(optimizer, config.optim.lr * rate(step))
        LEDGER.take()
        passes = micro_batches(step)
        for place, rows in enumerate(passes):
            own = rows[world.rank :: world.size]
            positions = torch.arange(16).expand(len(own), 16)
            with engine.exchange(place == len(passes) - 1):
                loss, _ = engine.model(input_ids=own[:, :-1], labels=own[:, 1:], position_ids=positions)
                (loss / (2 * 12 * 16)).backward()
        norm = clip_gradients(named.values(), config.optim.clip, engine.spread_of)
        longest = max(longest, float(norm))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        traffic = LEDGER.take()
    local = [t.to_local() if hasattr(t, "to_local") else t for t in optimizer_tensors(optimizer, named).values()]
    weights = {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for n, p in named.items()}
    facts = {
        "state": sum(t.numel() * t.element_size() for t in local),
        "sent": sum(one.sent_bytes for one in traffic.values()),
        "parameters": sum(p.numel() for p in named.values()),
        "longest_gradient": longest,
    }
    return facts, weights


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(folder of the initial model, facts and weights by (world size, strategy, optimizer))."""
    folder = tmp_path_factory.mktemp("optimizers")
    # 66 wide, 3 heads, 161 in the middle: nothing divides by 4; four layers: shapes come in fours and eights.
    model = write_tiny_model(folder / "model", odd=True, tied=False, layers=4)
    data = write_conversations(folder / "chats.jsonl", 4, seed=1)
    learn_all(CASES, folder, model, data)
    return folder, model


def learn_all(by_size, folder, model, data):
    for size, cases in by_size.items():
        for strategy, name in cases:
            pairs = ", shard_ranks: 2" if strategy == "hsdp" else ""
            facts = {"model": model, "data": data, "folder": folder, "strategy": strategy, "pairs": pairs}
            text = YAML.format(**facts, optim=OPTIM[name], more=MIXED if name == "mixed" else "")
            (folder / f"{strategy}-{name}.yaml").write_text(text)
        run_world(size, learn, str(model), str(folder), cases)


def read(folder, size, strategy, name, rank=0):
    stem = f"{folder}/{strategy}-{name}-{size}-{rank}"
    return json.loads(Path(f"{stem}.json").read_text()), load_file(f"{stem}.safetensors")


@pytest.mark.parametrize("name", [name for name in OPTIM if name != "mixed"])
def test_weights_are_the_textbooks_at_any_world_size(runs, name):
    folder, model = runs
    wanted = textbook(model, name, micro_batches, rate, steps=STEPS, lr=LR, rest=REST, decay=DECAY, clip=CLIP)
    start = dict(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).named_parameters())
    moved = max(float((wanted[k] - start[k].detach()).norm() / start[k].detach().norm()) for k in wanted)
    assert moved > 0.01, "the test would see nothing"
    assert read(folder, 1, "single", name)[0]["longest_gradient"] > CLIP, "nothing was clipped"
    compare_with_textbook(folder, CASES, name, wanted)


def compare_with_textbook(folder, by_size, name, wanted):
    for size, cases in by_size.items():
        for strategy, other in cases:
            if other == name:
                _, found = read(folder, size, strategy, name)
                errors = {k: float((found[k] - wanted[k]).norm() / wanted[k].norm()) for k in wanted}
                worst = max(errors, key=errors.get)
                assert errors[worst] < 1e-5, f"{strategy} on {size}: {worst} is off by {errors[worst]:.2g}"


@pytest.fixture(scope="module")
def rare(runs):
    folder, model = runs
    learn_all(RARE, folder, model, folder / "chats.jsonl")
    return runs


@pytest.mark.nightly
def test_the_other_splits_do_too(rare):
    folder, model = rare
    for name in ("muon", "adamw"):
        wanted = textbook(model, name, micro_batches, rate, steps=STEPS, lr=LR, rest=REST, decay=DECAY, clip=CLIP)
        compare_with_textbook(folder, RARE, name, wanted)


def test_muon_trains_fused_adapters_on_smoothed_targets_as_the_textbook(runs):
    from duoka.config.schema import LoraConfig
    from duoka.model.build import load_model
    from duoka.model.request import ModelRequest

    folder, model = runs
    adapted = load_model(ModelRequest(Path(model), dtype=torch.float32, lora=LoraConfig(rank=4, alpha=12, dropout=0.0)))
    start = {n: p.detach().clone() for n, p in adapted.named_parameters() if p.requires_grad}
    how = {"steps": STEPS, "lr": LR, "decay": DECAY, "clip": CLIP, "b_ratio": B_RATIO}
    wanted = textbook_of_adapters(model, start, micro_batches, rate, **how)
    assert all((wanted[name] - start[name]).norm() > 0.03 for name in start), "the test would see nothing"
    for strategy in ("zero1", "fsdp"):
        found = read(folder, 2, strategy, "mixed")[1]
        errors = {k: float((found[k] - wanted[k]).norm() / wanted[k].norm()) for k in wanted}
        worst = max(errors, key=errors.get)
        assert errors[worst] < 1e-5, f"{strategy}: {worst} is off by {errors[worst]:.2g}"


def test_a_matrix_that_one_rank_used_reaches_its_owner_and_an_unused_one_stays_alone(runs):
    both = [read(runs[0], 2, "zero1", "muon", rank)[0]["apart"] for rank in range(2)]
    assert both[0] | both[1] == {"0": 1.0, "1": 2.0, "2": 3.0, "3": 4.0} and not both[0].keys() & both[1].keys()


def test_ranks_end_bit_equal(runs):
    for size, cases in CASES.items():
        for strategy, name in cases:
            first = read(runs[0], size, strategy, name)[1]
            for rank in range(1, size):
                other = read(runs[0], size, strategy, name, rank)[1]
                assert all(torch.equal(first[k], other[k]) for k in first), f"{strategy} {name} on {size}, rank {rank}"


def compare_state(folder, size, strategy, name, margin):
    whole = read(folder, 1, "single", name)[0]["state"]
    states = [read(folder, size, strategy, name, rank)[0]["state"] for rank in range(size)]
    assert sum(states) == pytest.approx(whole, rel=0.02), "nothing is kept twice"
    assert max(states) < margin * whole / size


def compare_bytes(folder, size, strategy):
    """Two passes: zero1 moves gradients once, zero2 twice; weights come back once. P is the model's bytes."""
    sent = [read(folder, size, strategy, "muon", rank)[0]["sent"] for rank in range(size)]
    whole = 4 * read(folder, size, strategy, "muon")[0]["parameters"]
    theory = {"zero1": 2, "zero2": 3}[strategy] * whole * (size - 1) / size
    # FSDP pads what does not divide; the rest is exact.
    assert sum(sent) / size == pytest.approx(theory, rel=0.04), strategy


def test_state_is_shared_out(runs):
    """Of Muon whole matrices have owners: the fullest rank is within one matrix of each shape of its share."""
    for size, strategy in ((2, "zero1"), (3, "zero1"), (4, "zero2")):
        compare_state(runs[0], size, strategy, "muon", 1.15)
    compare_state(runs[0], 2, "zero2", "adamw", 1.05)


@pytest.mark.parametrize(("size", "strategy"), [(2, "zero1"), (2, "zero2"), (4, "zero2")])
def test_bytes_on_the_wire_are_the_theory(runs, size, strategy):
    compare_bytes(runs[0], size, strategy)


@pytest.mark.nightly
def test_state_and_bytes_of_four_are_theirs_under_other_strategies_too(rare):
    compare_state(rare[0], 4, "fsdp", "muon", 1.15)
    compare_state(rare[0], 4, "zero1", "adamw", 1.05)
    compare_bytes(rare[0], 4, "zero1")


RUN = """
model: {model}
data: {{train: [{data}], max_length: 256}}
optim: {{name: muon, lr: 0.01, adamw_lr: 1.0e-3, weight_decay: 0.1, warmup: 2, lr_scaling: sqrt, lr_batch: 4}}
train: {{epochs: 1, global_batch: 8, micro_batch: "200 tokens", precision: fp32}}
checkpoint: {{every: 2, keep: 10}}
log: {{to: []}}
output: {folder}/out
"""


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    """Runs of one process and of four, what goes on from theirs on two, and a next stage with and without averages."""
    folder = tmp_path_factory.mktemp("stages")
    model = write_tiny_model(folder / "model")
    data = write_conversations(folder / "chats.jsonl", 40, seed=1)
    yaml = folder / "run.yaml"
    yaml.write_text(RUN.format(model=model, data=data, folder=folder))
    next_stage = (f"model.name={folder}/one", "train.max_steps=1", "optim.warmup=0")

    def job(name, *overrides):
        return str(yaml), list(overrides), str(folder / name)

    taken = job("taken", *next_stage, f"optim.state={folder}/one")
    train_all([job("one"), job("fresh", *next_stage), taken], 1)
    train_all([job("four", "parallel.strategy=zero1")], 4)
    for name, source, strategy in (("rows", "four", "fsdp"), ("owners", "rows", "zero2")):
        (folder / name / "checkpoints").mkdir(parents=True)
        step = "step-00000002" if source == "four" else "step-00000004"
        shutil.copytree(folder / source / "checkpoints" / step, folder / name / "checkpoints" / step)
        more = [job("taken-2", *next_stage, f"optim.state={folder}/four", "parallel.strategy=fsdp")]
        train_all([job(name, f"parallel.strategy={strategy}"), *(more if name == "owners" else [])], 2)
    return folder


def weights_apart(folder, name, wanted):
    found, wanted = (load_file(folder / one / "final" / "model.safetensors") for one in (name, wanted))
    return max(float((found[k] - wanted[k]).norm() / wanted[k].norm()) for k in wanted)


def test_muons_state_goes_from_owners_to_rows_and_back(stages):
    """Saved by owners on 4, gone on with rows on 2; the run of one process is the measure."""
    for name in ("four", "rows", "owners"):
        assert (worst := weights_apart(stages, name, "one")) < 1e-5, f"{name}: {worst:.2g}"


def test_a_stage_begins_with_the_averages_of_the_one_before_at_any_world_size(stages):
    """From the same weights and batch: after one step an average is the fresh one, and its factor of the old one."""

    def state(name, step):
        return load_file(stages / name / "checkpoints" / f"step-{step:08d}" / "tensors-00000.safetensors")

    before, fresh, taken = state("one", 5), state("fresh", 1), state("taken", 1)
    factors = {"optim.momentum.": 0.95, "optim.exp_avg.": 0.9, "optim.exp_avg_sq.": 0.999, "optim.step.": 1.0}
    for name, value in before.items():
        for factor in (factor for kind, factor in factors.items() if name.startswith(kind)):
            wanted = fresh[name] + factor * value
            assert (taken[name] - wanted).norm() <= 1e-5 * wanted.norm(), name
    assert weights_apart(stages, "taken-2", "taken") < 1e-5, "saved on 4, taken over on 2"
    assert weights_apart(stages, "fresh", "taken") > 1e-4, "the test would see nothing"


def test_averages_of_others_are_refused_by_name(stages):
    from duoka.comm.world import World
    from duoka.config.load import load_config
    from duoka.errors import ConfigError
    from duoka.optim.build import build_optimizer, optimizer_tensors
    from duoka.runs.folder import RunFolder
    from duoka.store.takeover import take_over_state

    def refusal(state, *overrides):
        config = load_config(stages / "run.yaml", [f"optim.state={state}", *overrides]).config
        named = {"model.norm.weight": torch.nn.Parameter(torch.zeros(3))}
        optimizer = build_optimizer(named, config.optim)
        engine = SimpleNamespace(optimizer_tensors=lambda optimizer: optimizer_tensors(optimizer, named))
        contents = SimpleNamespace(optimizer=optimizer, engine=engine)
        with pytest.raises(ConfigError) as caught:
            take_over_state(config.optim, RunFolder(stages / "new"), stages, World(), contents, print)
        return str(caught.value)

    other = refusal("one", "optim.name=lamb", "optim.adamw_lr=null")
    assert "trained by muon; optim.name is lamb" in other and "name: muon" in other
    assert "exp_avg.model.norm.weight: (64,) there, (3,) here" in refusal(stages / "one")
    assert "there is no such folder" in refusal("nowhere")
    assert "there is no checkpoint in" in refusal("one/final")
