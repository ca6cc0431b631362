"""Promise 1: the same config gives the same losses, norms, rates and weights, however the work is split."""

import json
from functools import partial

import pytest
from oracle import train as oracle_train
from safetensors.torch import load_file
from tiny import write_conversations, write_tiny_model
from worlds import train_all

pytestmark = pytest.mark.timeout(400)

TOLERANCE = 1e-5
RECIPE = {"lr": 5e-3, "warmup": 0.2, "clip": 0.5, "weight_decay": 0.1}
NUM_SAMPLES, GLOBAL_BATCH = 26, 8  # the last batch of an epoch is short

YAML = """
model: {model}
data: {{train: [{data}], max_length: 512}}
optim: {{lr: 5e-3, warmup: 0.2, clip: 0.5, weight_decay: 0.1}}
train: {{epochs: 2, global_batch: 8, precision: fp32, seed: 7}}
checkpoint: {{every: 100}}
parallel: {{check_replicas: 2}}
log: {{to: []}}
output: {output}
"""

WHOLE, CUT = "train.micro_batch=100000 tokens", "train.micro_batch=300 tokens"
# Three packed samples need not fit a micro-batch of 300 tokens: accumulation differs from step to step.
PADDED = ("data.packing=false", "train.micro_batch=2")
LORA = "lora={rank: 3, dropout: 0}"
PAIRS = "parallel.shard_ranks=2"


def use(strategy, *more):
    return [f"parallel.strategy={strategy}", *more]


# name -> (model, processes, settings). tied: 64 wide; odd: nothing divides by 4, and a head of its own.
SPLITS = {
    "1 process": ("tied", 1, [WHOLE]),
    "1 process, accumulating": ("tied", 1, [CUT]),
    "1 process, one sample at a time": ("tied", 1, ["train.micro_batch=1"]),
    "1 process, padded": ("tied", 1, ["data.packing=false", "train.micro_batch=3"]),
    "1 process, recomputing": ("tied", 1, ["train.recompute=full"]),
    "1 process, recomputing what is cheap": ("tied", 1, ["train.recompute=selective", "parallel.offload=optimizer"]),
    "1 process, dp": ("tied", 1, ["data.packing=false", "parallel.strategy=dp"]),
    "1 process, odd, LoRA": ("odd", 1, [CUT, LORA]),
    "1 process, fsdp, odd": ("odd", 1, use("fsdp", CUT)),
    "1 process, zero1, LoRA": ("tied", 1, use("zero1", CUT, LORA)),
    "1 process, hsdp, offloading": ("tied", 1, use("hsdp", CUT, "parallel.offload=params")),
    "2 processes": ("tied", 2, use("ddp", WHOLE)),
    "2 processes, accumulating": ("tied", 2, use("ddp", CUT)),
    "2 processes, padded": ("tied", 2, use("ddp", *PADDED)),
    "2 processes, static graph, small buckets": (
        "tied",
        2,
        use("ddp", CUT, "parallel.static_graph=true", "parallel.bucket_mb=0.1"),
    ),
    "2 processes, odd, LoRA": ("odd", 2, use("ddp", CUT, LORA)),
    "2 processes, zero1": ("tied", 2, use("zero1", CUT)),
    "2 processes, zero1, odd, padded, recomputing": ("odd", 2, use("zero1", *PADDED, "train.recompute=1/2")),
    "2 processes, zero2": ("tied", 2, use("zero2", WHOLE)),
    "2 processes, zero2, odd": ("odd", 2, use("zero2", CUT)),
    "2 processes, fsdp": ("tied", 2, use("fsdp", WHOLE, "train.recompute=selective", "parallel.offload=optimizer")),
    "2 processes, fsdp, padded, recomputing": ("tied", 2, use("fsdp", *PADDED, "train.recompute=1/2")),
    "2 processes, fsdp, keeping weights": ("odd", 2, use("fsdp", CUT, "parallel.reshard=false")),
    "2 processes, fsdp, LoRA": ("tied", 2, use("fsdp", CUT, LORA)),
    "2 processes, zero2, LoRA, offloading": ("tied", 2, use("zero2", CUT, LORA, "parallel.offload=params")),
    "3 processes": ("tied", 3, [CUT]),
    "4 processes, zero1": ("odd", 4, use("zero1", CUT)),
    "4 processes, zero2, padded": ("tied", 4, use("zero2", *PADDED)),
    "4 processes, fsdp": ("odd", 4, use("zero3", CUT)),
    "4 processes, fsdp, LoRA": ("odd", 4, use("fsdp", WHOLE, LORA)),
    "4 processes, hsdp": ("odd", 4, use("hsdp", CUT, PAIRS)),
    "4 processes, hsdp, LoRA, padded": ("tied", 4, use("hsdp", *PADDED, PAIRS, LORA)),
}

# Each of these is close to one above: `make nightly` runs them too.
NIGHTLY = (
    "1 process, one sample at a time", "1 process, padded", "1 process, fsdp, odd", "1 process, zero1, LoRA",
    "1 process, hsdp, offloading", "2 processes, padded", "2 processes, zero1", "2 processes, zero2, odd",
    "2 processes, fsdp, padded, recomputing", "4 processes, zero1", "4 processes, zero2, padded",
    "4 processes, fsdp, LoRA", "4 processes, hsdp",
)  # fmt: skip
DAILY = [name for name in SPLITS if name not in NIGHTLY]


def read_run(folder):
    lines = [json.loads(line) for line in (folder / "events" / "run.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line["type"] == "step"]


def relative(ours, theirs):
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def worst(ours, theirs):
    """The largest relative error over tensors by name, and whose it is."""
    assert ours.keys() <= theirs.keys() and len(ours) >= len(theirs) - 1, "a tied head may be left out, nothing else"
    return max((float((ours[name] - theirs[name]).norm() / theirs[name].norm()), name) for name in ours)


@pytest.fixture(scope="module")
def case(tmp_path_factory, tiny_model):
    """The folder of all runs, a YAML per model, the models, the data."""
    folder = tmp_path_factory.mktemp("split")
    data = write_conversations(folder / "chats.jsonl", NUM_SAMPLES, seed=3)
    models = {"tied": tiny_model, "odd": write_tiny_model(folder / "model", tied=False, odd=True)}
    yamls = {}
    for name, model in models.items():
        yamls[name] = folder / f"{name}.yaml"
        yamls[name].write_text(YAML.format(model=model, data=data, output=folder / "out"), encoding="utf-8")
    return folder, yamls, models, data


def run_splits(case, names):
    """Train these splits, one world per number of processes; returns name -> run folder."""
    folder, yamls, _, _ = case
    # A process alone needs a process group only for a sharded strategy: such runs have a world of their own.
    worlds = {}
    for name in names:
        model, size, overrides = SPLITS[name]
        alone = size == 1 and "strategy" in overrides[0]
        worlds.setdefault((size, alone), []).append((str(yamls[model]), overrides, str(folder / name)))
    for (size, _), jobs in sorted(worlds.items()):
        train_all(jobs, size)
    return {name: folder / name for name in names}


@pytest.fixture(scope="module")
def runs(case):
    return run_splits(case, DAILY)


@pytest.fixture(scope="module")
def batches(case):
    """The order of samples, which the oracle takes as given."""
    from duoka.config.load import load_config
    from duoka.data.feed.epoch_plan import EpochPlan
    from duoka.data.prepare import prepare_data
    from duoka.units import parse_amount

    yaml = case[1]["tied"]
    config = load_config(yaml).config
    store = prepare_data(config, yaml.parent, case[2]["tied"]).train
    plan = EpochPlan(
        store.lengths, store.num_targets, fingerprint=store.fingerprint, seed=7, global_batch=parse_amount(GLOBAL_BATCH)
    )
    return [plan.batch(epoch, i).tolist() for epoch in (0, 1) for i in range(plan.num_batches(epoch))]


@pytest.fixture(scope="module")
def oracles(case, batches):
    """By (model, with adapters): the plain loop, which begins from the same adapters and shares nothing else."""
    from duoka.config.schema import LoraConfig
    from duoka.model.lora import apply_lora

    adapt = partial(apply_lora, lora=LoraConfig(rank=3, dropout=0.0), seed=7)
    return {
        (name, lora): oracle_train(case[3], model, batches, **RECIPE, adapt=adapt if lora else None)
        for name, model in case[2].items()
        for lora in (False, True)
    }


def test_lengths_differ_widely_and_the_last_batch_is_short(runs):
    steps = read_run(runs["1 process"])
    assert len(steps) == 8
    assert steps[3]["num_samples"] == NUM_SAMPLES % GLOBAL_BATCH
    targets = [step["num_targets"] for step in steps]
    assert max(targets) > 1.5 * min(targets)


def compare_with_oracle(folder, name, oracles, tolerance=TOLERANCE):
    model, _, overrides = SPLITS[name]
    losses, norms, rates, weights = oracles[model, LORA in overrides]
    steps = read_run(folder)
    assert max(norms) > RECIPE["clip"], "clipping must have been active"
    for key, want in (("loss", losses), ("grad_norm", norms), ("lr", rates)):
        error = relative([step[key] for step in steps], want)
        assert error < tolerance, f"{key} of {name} is off by {error}"
    final = folder / "final"
    if LORA in overrides:
        weights = {key.replace(".default.", "."): value for key, value in weights.items()}
        error, tensor = worst(load_file(final / "adapter_model.safetensors"), weights)
    else:
        error, tensor = worst(load_file(final / "model.safetensors"), weights)
    assert error < tolerance, f"{tensor} of {name} is off by {error}"


@pytest.mark.parametrize("name", DAILY)
def test_every_split_equals_the_oracle(runs, oracles, name):
    compare_with_oracle(runs[name], name, oracles)


def compare_held_with_plan(folder, name):
    """Weights, gradients and optimizer state from storages, beside the plan's formulas, which know none of them."""
    events = [json.loads(line) for line in (folder / "events" / "run.jsonl").read_text().splitlines()]
    held = next(event for event in events if event["type"] == "memory")
    plan = json.loads((folder / "plan.json").read_text())
    layout = plan["layout"]
    rows = {row["strategy"]: row for row in plan["static"]}
    want = rows["single" if layout["strategy"] == "dp" else layout["strategy"]]
    accumulates = any(event.get("num_micro_batches", 0) > 1 for event in events) or layout["dp"] == 1
    assert len(held["ranks"]) == layout["dp"]
    for rank, one in enumerate(held["ranks"]):
        assert one["activations_bytes"] > 0 and one["num_tokens"] > 0
        parts, limit = ["weights", "gradients", "optimizer"], 0.02
        if LORA in SPLITS[name][2] and layout["shard"] > 1:
            parts, limit = ["weights"], 0.1  # adapters of three rows are padded to be shared
        if layout["strategy"] == "zero1" and not accumulates:
            parts.remove("gradients")  # nothing adds up: they are exchanged layer by layer
        for part in parts:
            ratio = one[f"{part}_bytes"] / want[f"{part}_bytes"]
            assert abs(ratio - 1) < limit, f"{part} of rank {rank}, {name}: {ratio:.3f} of the plan's"


EVEN = {name for name, (model, *_) in SPLITS.items() if model == "tied"}


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_the_other_splits_do_too(case, oracles):
    for name, folder in run_splits(case, NIGHTLY).items():
        compare_with_oracle(folder, name, oracles)
        if name in EVEN:
            compare_held_with_plan(folder, name)


@pytest.mark.parametrize("name", [name for name in DAILY if name in EVEN])
def test_bytes_held_by_each_rank_are_the_planned_ones(runs, name):
    compare_held_with_plan(runs[name], name)


def test_recomputing_keeps_less(runs):
    def activations(name):
        lines = (runs[name] / "events" / "run.jsonl").read_text().splitlines()
        held = next(event for event in map(json.loads, lines) if event["type"] == "memory")
        return held["ranks"][0]["activations_bytes"]

    whole, cheap, least = (activations(f"1 process{how}") for how in (
        "", ", recomputing what is cheap", ", recomputing",
    ))  # fmt: skip
    assert least < 0.5 * whole and least < cheap < whole


def test_the_tolerance_would_catch_a_mean_of_means(case, batches, oracles):
    """The check has teeth: averaging two halves' means, as many loops do, is off by far more than the tolerance."""
    oracle = oracles["tied", False]
    wrong = oracle_train(case[3], case[2]["tied"], batches, **RECIPE, mean_of_halves=True)
    assert relative(wrong[0], oracle[0]) > 100 * TOLERANCE
    error = max(float((wrong[3][key] - theirs).norm() / theirs.norm()) for key, theirs in oracle[3].items())
    assert error > 100 * TOLERANCE


def test_several_buckets_travel_while_the_rank_computes(runs):
    """Of gradients in one bucket nothing is hidden: it begins where the backward pass ends."""
    shares = {}
    for name in ("2 processes, static graph, small buckets", "2 processes, fsdp, keeping weights"):
        steps = read_run(runs[name])[1:]
        spent, waited = (sum(step[key] for step in steps) for key in ("exchanged_s", "wait_s"))
        shares[name] = 1 - waited / spent
    assert all(0 < share < 1 for share in shares.values()), shares
