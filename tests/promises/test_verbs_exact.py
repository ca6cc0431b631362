"""The verbs: one step's gradient is the mean over the whole window, whatever the split; against a plain oracle."""

import json

import pytest
import torch
from verbs import LOST, NUM_SAMPLES, Words, build, collate, count_over
from worlds import run_world

from duoka.data.feed.epoch_plan import shuffled

TOLERANCE = 1e-5
GLOBAL = 8  # samples of one step: 22 samples give two whole steps and a short one

# name -> processes, (strategy, accumulation, how backward is called, batch size of a rank, precision)
CASES = {
    "single, one batch": (1, ("single", 1, "sum", 8, "no")),
    "single, accumulating": (1, ("single", 4, "mean", 2, "no")),
    "single, plain": (1, ("single", 2, "plain", 4, "no")),
    "ddp": (2, ("ddp", 1, "sum", 4, "no")),
    "ddp, accumulating": (2, ("ddp", 4, "mean", 1, "no")),
    "ddp, plain": (2, ("ddp", 4, "plain", 1, "no")),
    "zero1, accumulating": (2, ("zero1", 2, "sum", 2, "no")),
    "zero1, plain": (2, ("zero1", 4, "plain", 1, "no")),
    "zero2, accumulating": (2, ("zero2", 2, "mean", 2, "no")),
    "zero3, accumulating": (2, ("zero3", 2, "sum", 2, "no")),
    "fsdp, plain": (2, ("fsdp", 2, "plain", 2, "no")),
    "4 of ddp": (4, (None, 1, "sum", 2, "no")),
    "4 of ddp, plain": (4, ("ddp", 2, "plain", 1, "no")),
    "4 of fsdp": (4, ("fsdp", 2, "mean", 1, "no")),
    "4 of hsdp": (4, ("hsdp", 1, "sum", 2, "no")),
    "ddp in bf16": (2, ("ddp", 2, "sum", 2, "bf16")),
    "fsdp in bf16": (2, ("fsdp", 2, "sum", 2, "bf16")),
}


def oracle(plain):
    """One process, one pass over each global batch, written without duoka but for the order of samples."""
    model, optimizer = build(kind=torch.optim.SGD if plain else torch.optim.AdamW)
    data, first, norms, step = Words(), None, [], 0
    for epoch in range(2):
        order = shuffled(NUM_SAMPLES, f"exact/3/{epoch}").tolist()
        for at in range(0, NUM_SAMPLES, GLOBAL):
            batch = collate([data[i] for i in order[at : at + GLOBAL]])
            logits = model(batch["ids"])
            if plain:
                loss = logits[:, 0].square().sum(1).mean()
            else:
                loss = count_over(logits, batch["labels"]) / (batch["labels"] != -100).sum()
            loss.backward()
            first = first or {name: p.grad.clone() for name, p in model.named_parameters()}
            if not plain:
                norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.7)))
                for group in optimizer.param_groups:
                    group["lr"] = 0.03 / (1 + step)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
    return {"first": first, "norms": norms, "state": dict(model.state_dict()), "steps": step}


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verbs")
    from verbs import train_cases

    for size in (1, 2, 4):
        # A process alone has a process group only for sharded strategies; none of these is one.
        cases = {name: case for name, (wanted, case) in CASES.items() if wanted == size}
        run_world(size, train_cases, cases, str(folder))
    return {name: json.loads((folder / f"{name}-0.json").read_text()) for name in CASES} | {"folder": folder}


@pytest.fixture(scope="module")
def oracles():
    return {plain: oracle(plain) for plain in (False, True)}


def error(ours, theirs):
    return max(
        float((torch.tensor(ours[name]) - tensor).norm() / tensor.norm().clamp(min=1e-3))
        for name, tensor in theirs.items()
    )


@pytest.mark.parametrize("name", CASES)
def test_every_split_of_the_verbs_equals_the_oracle(seen, oracles, name):
    _, (_, _, form, _, precision) = CASES[name]
    ours, wanted = seen[name], oracles[form == "plain"]
    tolerance = TOLERANCE if precision == "no" else 3e-2
    assert error(ours["first"], wanted["first"]) < tolerance, "the first step's gradients"
    if form != "plain":
        assert max(wanted["norms"]) > 0.7, "clipping must have been active"
        assert ours["norms"] == pytest.approx(wanted["norms"], rel=tolerance if precision == "no" else 0.1)
        assert ours["steps"] == wanted["steps"] == 6, "the schedule counts optimizer steps"
        assert ours["lr"] == pytest.approx([0.03 / 7])
    assert error(ours["state"], wanted["state"]) < (tolerance if precision == "no" else 0.2)


def test_the_tolerance_would_catch_a_mean_of_means(oracles):
    """What the taught loop gives elsewhere: batches of unequal lengths, each divided by its own count."""
    model, _ = build()
    data, order = Words(), shuffled(NUM_SAMPLES, "exact/3/0").tolist()[:GLOBAL]
    for half in (order[:4], order[4:]):
        batch = collate([data[i] for i in half])
        (count_over(model(batch["ids"]), batch["labels"]) / (batch["labels"] != -100).sum() / 2).backward()
    wrong = {name: p.grad.tolist() for name, p in model.named_parameters()}
    assert error(wrong, oracles[False]["first"]) > 100 * TOLERANCE


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_fp16_steps_as_fp32_does_and_leaves_out_an_overflow(seen, strategy):
    """Norms are those of true gradients (taken before clipping, after the scale), though the scale doubles each step;
    a second optimizer's gradients still have the old one."""
    half, whole = (json.loads((seen["folder"] / f"{strategy} scaled {p}-0.json").read_text()) for p in ("fp16", "fp32"))
    other = json.loads((seen["folder"] / f"{strategy} scaled fp16-1.json").read_text())
    lost = [at == LOST for at in range(6)]
    assert half["skipped"] == other["skipped"] == half["unchanged"] == lost
    del half["norms"][LOST], whole["norms"][LOST]
    assert max(whole["norms"]) > 0.8 and half["norms"] == pytest.approx(whole["norms"], rel=3e-2)
    assert error(half["state"], {name: torch.tensor(value) for name, value in whole["state"].items()}) < 3e-2
    assert half["lr"] == pytest.approx(whole["lr"]) and half["scale"] == 256.0 * 2**3
