"""Promise 1 with DeepSpeed as the engine: its stages give the plain loop's numbers, and go on where others stopped."""

import shutil
from functools import partial

import pytest
import test_any_split as any_split
import torch
from safetensors.torch import load_file
from test_any_split import CUT, LORA, PADDED, TOLERANCE, WHOLE, batches, case, oracles  # noqa: F401  (fixtures)
from test_packed_exchange import in_nodes_of_two
from worlds import run_world, train_all

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install 'duoka[deepspeed]'")
pytestmark = pytest.mark.timeout(400)

# Tiny tensors: nothing stays gathered for being small, and buckets are filled more than once.
SMALL = {
    "reduce_bucket_size": 20000, "allgather_bucket_size": 20000, "stage3_param_persistence_threshold": 100,
    "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 20000,
}  # fmt: skip
SUB_GROUPS = "parallel.deepspeed.sub_group_size=20000"
SAVING = ("checkpoint.every=2", "checkpoint.keep=10")


def use(stage, *more):
    strategy = ("ddp", "zero1", "zero2", "zero3")[stage]
    switches = [f"parallel.deepspeed.{name}={value}" for name, value in SMALL.items()]
    return [f"parallel.strategy={strategy}", "parallel.engine=deepspeed", *switches, *more]


DAILY = {
    "stage 0": ("tied", 2, use(0, CUT)),
    "stage 1": ("odd", 2, use(1, CUT, *SAVING)),
    "stage 2": ("odd", 2, use(2, CUT)),
    "stage 3": ("odd", 2, use(3, CUT, *SAVING)),
    "stage 3, LoRA": ("tied", 2, use(3, CUT, LORA)),
    "stage 1, offloading": ("tied", 2, use(1, WHOLE, "parallel.offload=optimizer")),
}
NIGHTLY = {
    "1 process, stage 0": ("tied", 1, use(0, CUT)),
    "1 process, stage 3": ("odd", 1, use(3, CUT)),
    "stage 2, LoRA": ("odd", 2, use(2, CUT, LORA)),
    "stage 3, padded, recomputing": ("odd", 2, use(3, *PADDED, "train.recompute=1/2")),
    "stage 3, offloading": ("tied", 2, use(3, WHOLE, "parallel.offload=params")),
    "stage 2, overlapping": ("odd", 2, use(2, CUT, "parallel.deepspeed.overlap_comm=true")),
    "stage 3, overlapping": ("tied", 2, use(3, CUT, "parallel.deepspeed.overlap_comm=true", SUB_GROUPS)),
    "3 processes, stage 2": ("odd", 3, use(2, CUT)),
    "3 processes, stage 3": ("odd", 3, use(3, CUT)),
}
# Run -> (model, settings, the run and the step that it goes on from): one world of two trains them all, in this order.
GOING_ON = {
    "native": ("odd", ["parallel.strategy=ddp", CUT, *SAVING], None),
    "native, stage 1": ("odd", use(1, CUT, *SAVING), ("native", 2)),
    "native, stage 2": ("odd", use(2, CUT), ("native", 4)),
    "stage 1 again": ("odd", DAILY["stage 1"][2], ("stage 1", 4)),
    "stage 3 again": ("odd", DAILY["stage 3"][2], ("stage 3", 4)),
    "zero1": ("odd", ["parallel.strategy=zero1", CUT], None),
    "zero2": ("odd", ["parallel.strategy=zero2", CUT], None),
    "zero3": ("odd", ["parallel.strategy=zero3", CUT], None),
}
# A gradient that is not finite on rank 1, in step 3: left out on all of them.
SKIP = "faults.nonfinite=skip"
STRUCK = {
    "native, struck": ["parallel.strategy=ddp", CUT, SKIP],
    "stage 1, struck": use(1, CUT, SKIP),
    "stage 2, offloading, struck": use(2, CUT, SKIP, "parallel.offload=optimizer"),
    "stage 3, struck": use(3, CUT, SKIP),
    "stage 3, offloading, struck": use(3, CUT, SKIP, "parallel.offload=params"),
}


def start_from(source, step, target):
    name = f"step-{step:08d}"
    shutil.copytree(source / "checkpoints" / name, target / "checkpoints" / name)


@pytest.fixture(scope="module")
def runs(case):  # noqa: F811
    folder, yamls, _, _ = case
    jobs = [(str(yamls[model]), settings, str(folder / name)) for name, (model, _, settings) in DAILY.items()]
    for name, (model, settings, before) in GOING_ON.items():
        if before is not None:
            jobs.append(partial(start_from, folder / before[0], before[1], folder / name))
        jobs.append((str(yamls[model]), settings, str(folder / name)))
    strike = {"DUOKA_INJECT": "nan_grad step=3 rank=1"}
    jobs += [(str(yamls["odd"]), settings, str(folder / name), strike) for name, settings in STRUCK.items()]
    train_all(jobs, 2)
    return folder


def compare(folder, name, splits, oracles, monkeypatch):  # noqa: F811
    monkeypatch.setitem(any_split.SPLITS, name, splits[name])
    any_split.compare_with_oracle(folder / name, name, oracles)


@pytest.mark.parametrize("name", DAILY)
def test_every_stage_equals_the_oracle(runs, oracles, name, monkeypatch):  # noqa: F811
    compare(runs, name, DAILY, oracles, monkeypatch)


@pytest.mark.parametrize("name", ["stage 0", "stage 1", "stage 2", "stage 3"])
def test_bytes_held_by_each_rank_are_the_planned_ones(runs, name, monkeypatch):
    monkeypatch.setitem(any_split.SPLITS, name, DAILY[name])
    any_split.compare_held_with_plan(runs / name, name)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_the_other_splits_do_too(case, oracles, monkeypatch):  # noqa: F811
    folder, yamls, _, _ = case
    for size in (1, 2, 3):
        jobs = [(name, model, settings) for name, (model, num, settings) in NIGHTLY.items() if num == size]
        train_all([(str(yamls[model]), settings, str(folder / name)) for name, model, settings in jobs], size)
    for name in NIGHTLY:
        compare(folder, name, NIGHTLY, oracles, monkeypatch)


@pytest.mark.nightly
def test_copies_inside_a_node_change_bytes_and_no_number(case, oracles, monkeypatch):  # noqa: F811
    """hpZ: what the first forward pass gathered stays cut over the node's two ranks until the step."""
    folder, yamls, _, _ = case
    splits = {f"copies, {how}": ("odd", 4, use(3, CUT, f"parallel.reshard={how}")) for how in ("true", "node")}
    jobs = [(str(yamls[model]), settings, str(folder / name)) for name, (model, _, settings) in splits.items()]
    run_world(4, in_nodes_of_two, jobs)
    for name in splits:
        compare(folder, name, splits, oracles, monkeypatch)
    plain, copies = (any_split.read_run(folder / name) for name in splits)
    weights = load_file(folder / "copies, true" / "final" / "model.safetensors").values()
    whole = 4 * sum(tensor.numel() for tensor in weights) * 3 / 4  # what a gather over four ranks brings
    assert len(plain) == len(copies) == 8
    for step, ours in list(zip(plain, copies, strict=True))[1:]:  # the first has copies of the rehearsal's
        num_micro = round(step["sent_bytes"] / whole / 3)
        # Of a whole gather 3/4 are others', of one inside the node 1/2.
        wanted = whole * (1 + (2 * num_micro - 1) * (1 / 2) / (3 / 4) + num_micro)
        assert ours["sent_bytes"] == pytest.approx(wanted, rel=0.02), f"step {step['step']}"


def check_goes_on(folder, name, first, whole="native"):
    steps, wanted = any_split.read_run(folder / name), any_split.read_run(folder / whole)[first:]
    assert [step["step"] for step in steps] == [step["step"] for step in wanted]
    for key in ("loss", "grad_norm", "lr"):
        error = any_split.relative([step[key] for step in steps], [step[key] for step in wanted])
        assert error < TOLERANCE, f"{key} of {name} is off by {error}"
    mine, theirs = (load_file(folder / one / "final" / "model.safetensors") for one in (name, whole))
    error, tensor = any_split.worst(mine, theirs)
    assert error < TOLERANCE, f"{tensor} of {name} is off by {error}"


def test_a_run_goes_on_from_native_to_deepspeed_and_back(case, runs):  # noqa: F811
    """ddp on 2 -> stages 1 and 2 on 2 -> stage 3 on 3 -> one native process: numbers of the run that never changed."""
    yaml = str(case[1]["odd"])
    check_goes_on(runs, "native, stage 1", 2)
    check_goes_on(runs, "native, stage 2", 4)
    start_from(runs / "native, stage 1", 4, runs / "stage 3 on 3")
    train_all([(yaml, use(3, CUT, *SAVING), str(runs / "stage 3 on 3"))], 3)
    check_goes_on(runs, "stage 3 on 3", 4)
    start_from(runs / "stage 3 on 3", 6, runs / "native on 1")
    train_all([(yaml, ["parallel.strategy=single", CUT], str(runs / "native on 1"))], 1)
    check_goes_on(runs, "native on 1", 6)


@pytest.mark.parametrize("name", ["stage 1", "stage 3"])
def test_the_same_stage_goes_on_bit_for_bit(runs, name):
    def numbers(run):
        return [[step[key] for key in ("loss", "grad_norm", "lr")] for step in any_split.read_run(runs / run)]

    assert numbers(f"{name} again") == numbers(name)[4:]
    mine, theirs = (load_file(runs / run / "final" / "model.safetensors") for run in (f"{name} again", name))
    assert all(torch.equal(mine[tensor], theirs[tensor]) for tensor in theirs)


def test_a_step_that_is_not_finite_is_left_out_as_natively(runs):
    def numbers(run):
        steps = any_split.read_run(runs / run)
        return [step["step"] for step in steps], [
            value for step in steps for value in (step["loss"], step["grad_norm"])
        ]

    steps, wanted = numbers("native, struck")
    assert 3 not in steps and len(steps) == 7
    for name in STRUCK:
        own, found = numbers(name)
        assert own == steps, name
        assert any_split.relative(found, wanted) < TOLERANCE, name


def test_native_zero_equals_deepspeeds_of_the_same_stage_and_sends_no_more(runs):
    """Stages 1 and 2 of DeepSpeed sum gradients by all-reduce, twice a reduce-scatter; stage 3 sends what ours does."""
    whole = any_split.read_run(runs / "native")[0]["sent_bytes"] / 2  # ddp: an all-reduce, which is two of these
    for stage in (1, 2, 3):
        native, theirs = any_split.read_run(runs / f"zero{stage}"), any_split.read_run(runs / f"stage {stage}")
        for key in ("loss", "grad_norm"):
            error = any_split.relative([step[key] for step in theirs], [step[key] for step in native])
            assert error < TOLERANCE, f"{key} of stage {stage} is off by {error}"
        for ours, step in zip(native, theirs, strict=True):
            sent, by_deepspeed = ours["sent_bytes"] / whole, step["sent_bytes"] / whole
            num_micro = round(sent - 1 if stage == 2 else sent / 3)
            wanted = {1: (2, 3), 2: (num_micro + 1, 2 * num_micro + 1), 3: (3 * num_micro, 3 * num_micro)}[stage]
            assert (sent, by_deepspeed) == pytest.approx(wanted, rel=0.01), f"stage {stage}, step {step['step']}"
