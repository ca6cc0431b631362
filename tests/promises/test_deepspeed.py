"""Promise 1 with DeepSpeed as the engine: its stages give the plain loop's numbers, and go on where others stopped."""

import json
import shutil
from functools import partial

import pytest
import test_any_split as any_split
import torch
from families import write_family
from needs import need_deepspeed
from safetensors.torch import load_file
from test_any_split import CUT, LORA, PADDED, TOLERANCE, WHOLE, batches, case, oracles  # noqa: F401  (fixtures)
from test_packed_exchange import in_nodes_of_two
from tiny import build_tiny_tokenizer
from worlds import run_world, train_all, train_jobs

need_deepspeed()
pytestmark = pytest.mark.timeout(900)

# Tiny tensors: nothing stays gathered for being small, and buckets are filled more than once.
SMALL = {
    "reduce_bucket_size": 20000, "allgather_bucket_size": 20000, "stage3_param_persistence_threshold": 100,
    "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 20000,
}  # fmt: skip
SUB_GROUPS = "parallel.deepspeed.sub_group_size=20000"
SAVING = ("checkpoint.every=2", "checkpoint.keep=10")
# As large models have it: what is small stays gathered between passes, here all of it, but for each evaluation.
KEPT = ("parallel.deepspeed.stage3_param_persistence_threshold=1000000", "data.eval=[{held}]", "train.eval_every=1")


def use(stage, *more):
    strategy = ("ddp", "zero1", "zero2", "zero3")[stage]
    switches = [f"parallel.deepspeed.{name}={value}" for name, value in SMALL.items()]
    return [f"parallel.strategy={strategy}", "parallel.engine=deepspeed", *switches, *more]


DAILY = {
    "stage 0": ("tied", 2, use(0, CUT)),
    "stage 1": ("odd", 2, use(1, CUT, *SAVING)),
    "stage 2": ("odd", 2, use(2, CUT)),
    "stage 3": ("odd", 2, use(3, CUT, *SAVING)),
    "stage 3, kept": ("odd", 2, use(3, CUT, *SAVING, *KEPT)),
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
    "stage 3, kept again": ("odd", DAILY["stage 3, kept"][2], ("stage 3, kept", 4)),
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


# DeepSpeed's AutoTP: two ranks share every matrix. A tied head, and norms of single heads of whose gradients each has a
# part; on four ranks two data ranks share the state.
TENSOR = "parallel.tensor=2"
AUTOTP = {
    "autotp, stage 0": ("tied", 2, use(0, CUT, TENSOR)),
    "autotp, stage 1": ("tied", 2, use(1, CUT, TENSOR, *SAVING)),
    "autotp, stage 2, offloading": ("qwen3", 2, use(2, CUT, TENSOR, "parallel.offload=optimizer")),
    "autotp, stage 3, recomputing": ("qwen3", 2, use(3, CUT, TENSOR, "train.recompute=full")),
}
# AdamW makes whole steps of a few gradients of this model that are nearly nothing: in fp32 duoka's one process alone is
# 1e-5 from the oracle, which itself is 5e-6 from one in float64.
ROUNDING = {"qwen3": 3e-5}
AUTOTP_ON_4 = {
    "4 processes, autotp, stage 0": ("tied", 4, use(0, CUT, TENSOR)),
    "4 processes, autotp, stage 2": ("qwen3", 4, use(2, CUT, TENSOR)),
}


def start_from(source, step, target):
    name = f"step-{step:08d}"
    shutil.copytree(source / "checkpoints" / name, target / "checkpoints" / name)


CALM = {"DUOKA_INJECT": ""}


def in_small_pieces(jobs):
    """`train_jobs` where gathered weights of stages 1 and 2 are many pieces, the last of them short."""
    from duoka.parallel import deepspeed_traffic

    deepspeed_traffic.PIECE = 1000
    train_jobs(jobs)


def write_qwen3(case):  # noqa: F811
    folder, _, models, data = case
    models["qwen3"] = write_family(folder / "qwen3", "qwen3", tokenizer=build_tiny_tokenizer())
    yaml = folder / "qwen3.yaml"
    yaml.write_text(any_split.YAML.format(model=models["qwen3"], data=data, output=folder / "out"), encoding="utf-8")
    return yaml


@pytest.fixture(scope="module")
def runs(case):  # noqa: F811
    folder, yamls, _, data = case
    held = folder / "held.jsonl"
    held.write_text("".join(data.read_text(encoding="utf-8").splitlines(keepends=True)[:5]), encoding="utf-8")
    jobs = []
    fresh = {name: (model, settings, None) for name, (model, _, settings) in DAILY.items()}
    for name, (model, settings, before) in (fresh | GOING_ON).items():
        if before is not None:
            jobs.append(partial(start_from, folder / before[0], before[1], folder / name))
        settings = [setting.replace("{held}", str(held)) for setting in settings]
        jobs.append((str(yamls[model]), settings, str(folder / name)))
    strike = {"DUOKA_INJECT": "nan_grad step=3 rank=1"}
    jobs += [(str(yamls["odd"]), settings, str(folder / name), strike) for name, settings in STRUCK.items()]
    yamls["qwen3"] = write_qwen3(case)
    jobs += [(str(yamls[model]), settings, str(folder / name), CALM) for name, (model, _, settings) in AUTOTP.items()]
    jobs.append((str(yamls["tied"]), [TENSOR, CUT], str(folder / "tensor, native"), CALM))
    run_world(2, in_small_pieces, jobs)
    return folder


def compare(folder, name, splits, oracles, monkeypatch):  # noqa: F811
    monkeypatch.setitem(any_split.SPLITS, name, splits[name])
    any_split.compare_with_oracle(folder / name, name, oracles, ROUNDING.get(splits[name][0], TOLERANCE))


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


@pytest.fixture(scope="module")
def larger(case, runs):  # noqa: F811
    """What goes on on four ranks, and AutoTP on them."""
    start_from(runs / "native, stage 1", 4, runs / "stage 3 on 4")
    start_from(runs / "autotp, stage 1", 4, runs / "autotp on 4")
    jobs = [
        (str(case[1]["odd"]), use(3, CUT, *SAVING), str(runs / "stage 3 on 4")),
        (str(case[1]["tied"]), use(3, CUT, TENSOR, *SAVING), str(runs / "autotp on 4")),
    ]
    jobs += [(str(case[1][model]), settings, str(runs / name)) for name, (model, _, settings) in AUTOTP_ON_4.items()]
    train_all(jobs, 4)
    return runs


@pytest.fixture(scope="module")
def alone(case, larger):  # noqa: F811
    """What goes on natively on one process after that."""
    jobs = []
    for model, before, after in (
        ("odd", "stage 3 on 4", "native on 1"),
        ("tied", "autotp on 4", "native after autotp"),
    ):
        start_from(larger / before, 6, larger / after)
        jobs.append((str(case[1][model]), ["parallel.strategy=single", CUT], str(larger / after)))
    train_all(jobs, 1)
    return larger


@pytest.mark.parametrize("name", AUTOTP)
def test_autotp_equals_the_oracle_at_every_stage(runs, oracles, name, monkeypatch):  # noqa: F811
    compare(runs, name, AUTOTP, oracles, monkeypatch)


@pytest.mark.parametrize("name", AUTOTP_ON_4)
def test_autotp_beside_data_ranks_does_too(larger, oracles, name, monkeypatch):  # noqa: F811
    compare(larger, name, AUTOTP_ON_4, oracles, monkeypatch)


def test_autotp_goes_on_at_another_stage_and_size_and_natively(alone):
    """Two ranks of one layer -> four of two, their state shared -> one native process."""
    check_goes_on(alone, "autotp on 4", 4, "autotp, stage 1")
    check_goes_on(alone, "native after autotp", 6, "autotp, stage 1")


def test_autotp_sends_and_holds_what_the_plan_says(runs):
    """Seven sums of a layer's activations for each token, where duoka's own axis has four and those of the ends."""
    plan = json.loads((runs / "autotp, stage 1" / "plan.json").read_text(encoding="utf-8"))
    steps, native = (any_split.read_run(runs / name) for name in ("autotp, stage 1", "tensor, native"))
    layers, hidden = 2, 64
    for step, ours in zip(steps, native, strict=True):
        computed = step["num_tokens"] - step.get("shared_tokens", 0)
        assert step["sent_bytes"] == pytest.approx(7 * layers * 4 * hidden * computed, rel=0.01)
        assert ours["sent_bytes"] < step["sent_bytes"]
    events = [json.loads(line) for line in (runs / "autotp, stage 1" / "events" / "run.jsonl").open(encoding="utf-8")]
    held = next(event for event in events if event["type"] == "memory")["ranks"]
    want = next(row for row in plan["static"] if row["strategy"] == "zero1")
    assert len(held) == 2
    for rank in held:
        for part in ("weights", "gradients", "optimizer"):
            assert rank[f"{part}_bytes"] == pytest.approx(want[f"{part}_bytes"], rel=0.02), part


def test_a_run_goes_on_from_native_to_deepspeed_and_back(runs, larger, alone):
    """ddp on 2 -> stages 1 and 2 on 2 -> stage 3 on 4 -> one native process: numbers of the run that never changed."""
    check_goes_on(runs, "native, stage 1", 2)
    check_goes_on(runs, "native, stage 2", 4)
    check_goes_on(larger, "stage 3 on 4", 4)
    check_goes_on(alone, "native on 1", 6)


@pytest.mark.parametrize("name", ["stage 1", "stage 3", "stage 3, kept"])
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
