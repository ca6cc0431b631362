"""What DDP can do beside adding: gradients that travel smaller, parameters without a part, layers that are compiled."""

import itertools
import json
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from test_any_split import TOLERANCE, YAML, read_run, relative
from test_sharded import build
from tiny import write_conversations, write_tiny_model
from worlds import run_world, train_all, train_jobs


@pytest.fixture(scope="module")
def case(tmp_path_factory, tiny_model):
    folder = tmp_path_factory.mktemp("ddp")
    data = write_conversations(folder / "chats.jsonl", 48, seed=3)
    yaml = folder / "run.yaml"
    yaml.write_text(YAML.format(model=tiny_model, data=data, output=folder / "out"), encoding="utf-8")
    return folder, yaml


SMALLER = {
    "bf16": ("ddp", "bf16"),
    "fp16": ("ddp", "fp16"),
    "powersgd": ("ddp", "powersgd"),
    "bf16 shards": ("fsdp", "bf16"),
}


HALVES = {name: [f"parallel.strategy={name}"] for name in ("ddp", "zero1", "zero2", "fsdp", "hsdp")}
HALVES["sequence"] = ["parallel.sequence=2"]
SHORT = "train.max_steps=6"


@pytest.fixture(scope="module")
def runs(case):
    folder, yaml = case
    jobs = [(str(yaml), ["parallel.strategy=ddp"], str(folder / "plain"))]
    for name, (strategy, compress) in SMALLER.items():
        settings = [f"parallel.strategy={strategy}", f"parallel.compress={compress}"]
        # Several buckets under way at once: exchanges that begin in another order on each rank would abort.
        settings += ["parallel.bucket_mb=0.02"] if strategy == "ddp" else []
        settings += ["checkpoint.every=11"] if name == "powersgd" else []
        jobs.append((str(yaml), settings, str(folder / name)))
    for name, settings in HALVES.items():
        jobs.append((str(yaml), [SHORT, "train.precision=bf16", *settings], str(folder / f"half-{name}")))
    train_all(jobs, 2)
    alone = [(str(yaml), [SHORT, "train.precision=bf16"], str(folder / "half-one process"))]
    alone.append((str(yaml), [SHORT], str(folder / "short")))
    train_all([*alone, (str(yaml), ["parallel.strategy=ddp"], str(folder / "ddp-alone"))], 1)
    return folder


def losses(folder):
    return [step["loss"] for step in read_run(folder)]


def test_ddp_on_one_process_is_one_process(runs):
    """As an elastic run becomes that shrinks to one rank."""
    assert relative(losses(runs / "ddp-alone"), losses(runs / "plain")) < TOLERANCE
    assert json.loads((runs / "ddp-alone" / "plan.json").read_text())["layout"]["name"] == "single"


@pytest.mark.parametrize("name", SMALLER)
def test_gradients_that_travel_smaller_learn_the_same(runs, name):
    ours, plain = losses(runs / name), losses(runs / "plain")
    error = relative(ours, plain)
    assert error > 0, "nothing was compressed"
    # PowerSGD begins after ten steps of twelve, and then approximates.
    assert relative(ours[:10], plain[:10]) < (TOLERANCE if name == "powersgd" else 1e-2)
    assert error < 0.1 and ours[-1] < 0.6 * ours[0]


def compare_half_with_whole(half, whole):
    """Half precision begins where fp32 does, and learns."""
    ours, plain = losses(half), losses(whole)
    assert relative(ours[:3], plain[:3]) < 1e-2
    assert ours[-1] < 0.75 * ours[0]


@pytest.mark.parametrize("name", [*HALVES, "one process"])
def test_bf16_begins_and_falls_alike_under_every_strategy(runs, name):
    compare_half_with_whole(runs / f"half-{name}", runs / "short")


def test_bf16_is_the_same_bf16_under_every_strategy(runs):
    """Beside each other closer than beside fp32: they round the same things."""
    first = losses(runs / "half-ddp")
    for name in HALVES:
        assert relative(losses(runs / f"half-{name}")[:3], first[:3]) < 1e-2


@pytest.fixture(scope="module")
def gone_on(runs, case):
    """Three processes, because gloo adds more than two in an order that depends on how buckets were formed."""
    folder, yaml = case
    thin = ["parallel.strategy=ddp", "parallel.compress=powersgd", "parallel.bucket_mb=0.02"]
    plans = {"plain": (["parallel.strategy=ddp", "train.max_steps=4", "checkpoint.every=2"], 2), "thin": (thin, 11)}
    jobs = []
    for name, (settings, step) in plans.items():
        settings = [*settings, f"checkpoint.every={step}", "checkpoint.keep=9"]
        jobs.append((str(yaml), settings, str(folder / f"{name}-unbroken")))
        began = folder / f"{name}-unbroken" / "checkpoints" / f"step-{step:08d}"
        jobs.append((str(yaml), [*settings, f"checkpoint.resume={began}"], str(folder / f"{name}-goes-on")))
    two = runs / "powersgd" / "checkpoints" / "step-00000011"
    jobs.append((str(yaml), [*thin, f"checkpoint.resume={two}"], str(folder / "thin-grown")))
    train_all(jobs, 3)
    return folder


@pytest.mark.parametrize("name", ["plain", "thin"])
def test_three_processes_go_on_bit_for_bit(gone_on, name):
    """Under PowerSGD with what each of them still owes: the checkpoint comes after its first thin step."""
    whole, ours = read_run(gone_on / f"{name}-unbroken"), read_run(gone_on / f"{name}-goes-on")
    whole = [step for step in whole if step["step"] >= ours[0]["step"]]
    assert ours and [(s["loss"], s["grad_norm"]) for s in ours] == [(s["loss"], s["grad_norm"]) for s in whole]
    mine, theirs = (load_file(gone_on / f"{name}-{end}/final/model.safetensors") for end in ("goes-on", "unbroken"))
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)


def test_what_two_processes_owe_goes_on_with_three(gone_on):
    """Compressing is another approximation in another world; what was owed is paid in both."""
    ours, theirs = read_run(gone_on / "thin-grown"), read_run(gone_on / "powersgd")[-1:]
    assert relative(losses(gone_on / "thin-grown"), [step["loss"] for step in theirs]) < TOLERANCE
    assert relative([step["grad_norm"] for step in ours], [step["grad_norm"] for step in theirs]) < 0.05


def test_every_debt_of_a_larger_world_is_inherited_once():
    from duoka.parallel.powersgd import inherit

    saved = {"model.a": 0, "powersgd.steps.": 0, "powersgd.factor.a.b": 0} | {
        f"powersgd.owed.{r}.a.b": 0 for r in range(5)
    }
    read, paid = [], torch.zeros(2, 2)
    for rank in range(2):
        own = torch.zeros(2, 2)
        named = {"model.a": own, "powersgd.factor.a.b": own, f"powersgd.owed.{rank}.a.b": own}
        found = inherit(named, saved, rank, 2)
        for name, tensor in found.named.items():
            if "owed" in name:
                read.append(name)
                tensor.fill_(float(10 ** int(name.split(".")[2])))
        found.settle()
        paid += own
    assert sorted(read) == sorted(name for name in saved if "owed" in name) and (paid == 11111).all()
    assert set(inherit(named, {"model.a": 0}, 1, 2).named) == {"model.a"}, "a checkpoint without debts"


class Bucket:
    """What DDP hands to its hook."""

    def __init__(self, parameters):
        self.members = parameters
        self.flat = torch.zeros(sum(p.numel() for p in parameters), device=parameters[0].device)

    def parameters(self):
        return self.members

    def gradients(self):
        parts = self.flat.split([p.numel() for p in self.members])
        return [part.view_as(p) for part, p in zip(parts, self.members, strict=True)]

    def buffer(self):
        return self.flat


def exchange_thin():
    """Three exchanges of two ranks, beside the same power iteration on both ranks' gradients in one place."""
    import numpy as np

    from duoka.comm.collectives import all_reduce
    from duoka.comm.world import end_world, start_world
    from duoka.config.schema import ParallelConfig
    from duoka.parallel.powersgd import PowerSGD

    world = start_world(ParallelConfig())
    shapes = {"wide": (40, 60), "small": (7,)}
    named = {name: torch.nn.Parameter(torch.zeros(shape, device=world.device)) for name, shape in shapes.items()}
    power = PowerSGD(world.rank, named)
    assert set(power.kept) == {"wide"}
    bucket, debts = Bucket(list(named.values())), np.zeros((2, 40, 60))
    factor = power.kept["wide"].factor.cpu().numpy().copy()
    for step in range(3):
        drawn = [torch.randn(2407, generator=torch.Generator().manual_seed(10 * step + rank)) for rank in range(2)]
        bucket.flat.copy_(drawn[world.rank])
        power.sum_over_ranks(bucket)
        wide, small = bucket.gradients()
        assert torch.allclose(small.cpu(), drawn[0][2400:] + drawn[1][2400:], atol=1e-6), "too small to compress"
        owing = debts + np.stack([one[:2400].view(40, 60).numpy() for one in drawn])
        left = np.linalg.qr(owing.sum(0) @ np.linalg.qr(factor)[0])[0]
        factor = owing.sum(0).T @ left
        approximation = left @ factor.T
        debts = owing - approximation / 2
        assert np.abs(wide.cpu().numpy() - approximation).max() < 1e-4
        assert np.abs(power.kept["wide"].owed.cpu().numpy() - debts[world.rank]).max() < 1e-4
        both = all_reduce(power.kept["wide"].owed.clone()).cpu().numpy()
        assert np.abs(both + approximation - owing.sum(0)).max() < 1e-4, "nothing is lost"
    kept = power.kept["wide"]
    bucket.flat.fill_(float("inf") if world.rank else 1.0)
    power.sum_over_ranks(bucket)
    assert not bucket.flat.isfinite().all(), "the step must be seen as lost"
    power.take_back()
    assert np.abs(kept.owed.cpu().numpy() - debts[world.rank]).max() < 1e-4, "a step that is given up leaves no debt"
    assert np.abs(kept.factor.cpu().numpy() - factor).max() < 1e-4
    power.sum_over_ranks(bucket)
    bucket.flat.fill_(1.0)
    power.sum_over_ranks(bucket)
    assert bucket.flat.isfinite().all(), "and the next one must not be"
    end_world(world)


def test_thin_exchange_is_a_power_iteration_with_error_feedback():
    run_world(2, exchange_thin)


def leave_one_out(yaml, folder):
    """Parameters without a part in the loss of the micro-batch that exchanges, whatever earlier ones added."""
    from duoka.comm.world import end_world
    from duoka.errors import ConfigError
    from duoka.train.stages.stage import build_stage

    def leave(contents, after=0):
        last, calls = contents.engine.bare.core.get_decoder().layers[-1], itertools.count(1)
        whole = last.forward
        last.forward = lambda hidden, *args, **more: hidden if next(calls) > after else whole(hidden, *args, **more)

    world = None
    for looks, num_micro, first in ((False, 1, 1), (False, 3, 1), (False, 3, 2), (True, 1, 1), (True, 3, 1)):
        settings = ["parallel.strategy=ddp", f"parallel.find_unused_parameters={str(looks).lower()}", *rows(num_micro)]
        inputs, world, _, contents, loader = build(yaml, settings, folder, world)
        batches, stage = loader.from_cursor(0, 0, 1.0), build_stage(inputs.config)
        for _ in range(1, first):
            contents.engine.forward_backward(next(batches), stage)
            contents.engine.zero_grad(contents.optimizer)
        leave(contents, after=num_micro - 1)
        if looks:
            contents.engine.forward_backward(next(batches), stage)
        else:
            with pytest.raises(ConfigError, match=r"parameter model\.layers\.1\..* \(and \d more\) .* no part in"):
                contents.engine.forward_backward(next(batches), stage)
    end_world(world)


def rows(num_micro):
    """A step of two ranks, `num_micro` micro-batches each."""
    return ["data.packing=false", "train.micro_batch=1", f"train.global_batch={2 * num_micro}"]


def look_while_adding(yaml, folder):
    """Micro-batches of a step add up where the sum will travel, from the first pass of the first step on."""
    from duoka.comm.world import end_world
    from duoka.parallel.engine import PassObserver
    from duoka.train.stages.stage import build_stage

    def places(contents):
        return {p.grad.untyped_storage().data_ptr() for p in contents.engine.named_trainable().values()}

    class Look(PassObserver):
        def __init__(self, contents):
            self.contents, self.seen = contents, []

        def after_backward(self):
            self.seen.append(places(self.contents))

    world, sums = None, {}
    for views in (False, True):
        settings = ["parallel.strategy=ddp", "parallel.bucket_mb=0.05", f"parallel.bucket_view={str(views).lower()}"]
        inputs, world, _, contents, loader = build(yaml, [*settings, *rows(3)], folder, world)
        stage, found = build_stage(inputs.config), []
        for step, batch in zip(range(4), loader.from_cursor(0, 0, 1.0), strict=False):
            look = Look(contents)
            contents.engine.forward_backward(batch, stage, look)
            grads = [p.grad.clone() for p in contents.engine.named_trainable().values()]
            if views:
                assert len(look.seen) == 3 and all(seen == look.seen[-1] for seen in look.seen), f"step {step}"
                assert len(look.seen[0]) < len(grads) / 2, "gradients are views"
                assert (len(look.seen[0]) > 1) == (step > 0), "one bucket at first, then several"
            found.append(grads)
            contents.engine.zero_grad(contents.optimizer)
            assert all(p.grad is None for p in contents.engine.named_trainable().values())
        sums[views] = found
    for with_views, without in zip(sums[True], sums[False], strict=True):
        assert all(map(torch.equal, with_views, without))
    end_world(world)


def test_micro_batches_add_up_in_ddps_buckets(case):
    run_world(2, look_while_adding, str(case[1]), str(case[0] / "adding"))


def look_at_storages(yaml, folder):
    """With views, gradients lie in the buckets in which they travel: fewer storages than gradients, same values."""
    from duoka.comm.world import end_world
    from duoka.train.stages.stage import build_stage

    world, found = None, {}
    for views in (False, True):
        settings = ["parallel.strategy=ddp", f"parallel.bucket_view={str(views).lower()}"]
        inputs, world, _, contents, loader = build(yaml, settings, folder, world)
        contents.engine.forward_backward(next(loader.from_cursor(0, 0, 1.0)), build_stage(inputs.config))
        grads = {name: p.grad for name, p in contents.engine.named_trainable().items()}
        storages = {grad.untyped_storage().data_ptr() for grad in grads.values()}
        assert (len(storages) < len(grads) / 4) == views, f"{len(storages)} storages of {len(grads)} gradients"
        found[views] = {name: grad.clone() for name, grad in grads.items()}
    assert all(torch.equal(found[True][name], grad) for name, grad in found[False].items())
    end_world(world)


def test_gradients_are_views_of_their_buckets_as_asked(case):
    run_world(2, look_at_storages, str(case[1]), str(case[0] / "views"))


def test_a_parameter_without_a_part_in_the_loss_is_named(case):
    run_world(2, leave_one_out, str(case[1]), str(case[0] / "unused"))


def overflow_once(yaml, folder):
    """fp16 steps with a scaler; at the second the scale is far too high, which only some shards would notice."""

    from duoka.comm.world import end_world
    from duoka.parallel.precision import build_numerics
    from duoka.train.stages.stage import build_stage
    from duoka.train.step import optimizer_step

    def values(contents):
        named = contents.engine.named_trainable().items()
        return {name: (p.to_local() if hasattr(p, "to_local") else p).detach().clone() for name, p in named}

    world, firsts = None, {}
    for strategy in ("ddp", "zero1", "fsdp"):
        inputs, world, _, contents, loader = build(
            yaml, [f"parallel.strategy={strategy}", "train.global_batch=4"], folder, world
        )
        # The plan refuses fp16 on a CPU for its speed; the arithmetic is the GPU's.
        numerics = contents.engine.numerics = build_numerics("fp16", world.device)
        losses = []
        for step, batch in zip(range(1, 5), loader.from_cursor(0, 0, 1.0), strict=False):
            before = values(contents)
            if step == 2:
                numerics.scaler._scale.fill_(1e38)
            result = optimizer_step(
                contents.engine, contents.optimizer, batch, build_stage(inputs.config), clip=0.5,
            )  # fmt: skip
            after = values(contents)
            changed = [name for name in before if before[name].numel() and not torch.equal(before[name], after[name])]
            assert len(changed) == (0 if step == 2 else len(before)), f"{strategy}, step {step}: {len(changed)}"
            if step == 2:
                numerics.scaler._scale.fill_(1024.0)
            losses.append(result.loss)
        firsts[strategy] = losses
        assert losses[-1] < losses[0] and relative(losses, firsts["ddp"]) < 1e-2
    end_world(world)


def test_fp16_with_a_scaler_leaves_out_an_overflow_on_all_ranks(case):
    run_world(2, overflow_once, str(case[1]), str(case[0] / "overflow"))


def train_compiled(backend, jobs):
    """Layers compiled by `backend`: eager traces them forward, aot_eager back too, and inductor keeps g++ at work."""
    torch.compile = partial(torch.compile, backend=backend)
    train_jobs(jobs)


RARE = [pytest.param(name, marks=pytest.mark.nightly) for name in ("aot_eager", "inductor")]


@pytest.mark.parametrize("backend", ["eager", *RARE])
def test_compiled_layers_give_the_same_numbers(case, backend):
    pytest.importorskip("torch._inductor")
    folder, yaml = case
    # One layer: each is compiled for itself.
    small = write_tiny_model(folder / "one-layer", layers=1)
    few = ["train.max_steps=3", f"model.name={small}"]
    train_all([(str(yaml), [*few, "parallel.strategy=fsdp"], str(folder / "eager"))], 1)
    settings = [*few, "parallel.strategy=fsdp", "train.compile=true"]
    # In the rank itself: a pool of compilers would import torch once more for each of a handful of kernels.
    env = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
    run_world(1, train_compiled, backend, [(str(yaml), settings, str(folder / backend), env)])
    error = relative(losses(folder / backend), losses(folder / "eager"))
    assert error < TOLERANCE
