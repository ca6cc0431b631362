"""DeepSpeed alone goes on with a run of ours, at its stages and on other numbers of ranks, as a plain loop would."""

from pathlib import Path

import pytest
import torch
from commands import run_duoka
from deepspeed_runs import go_on
from needs import need_deepspeed
from safetensors.torch import load_file
from tiny import write_conversations, write_tiny_model
from worlds import run_world

need_deepspeed()
pytestmark = pytest.mark.timeout(400)

YAML = """
model: {model}
data: {{train: [{data}], max_length: 128}}
optim: {{lr: 5e-3, weight_decay: 0.1}}
train: {{max_steps: 5, global_batch: 4, precision: fp32, seed: 7}}
checkpoint: {{every: 3, keep: 5}}
parallel: {{strategy: fsdp}}
log: {{to: []}}
output: {output}
"""
ROWS = [[[5, 9, 3, 22, 41, 8], [7, 7, 30, 2, 11, 19]], [[1, 2, 3, 4, 5, 6], [9, 8, 7, 6, 5, 4]]]


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deepspeed-export")
    model = write_tiny_model(folder / "model", tied=True, odd=True)
    data = write_conversations(folder / "chats.jsonl", 12, seed=3)
    yaml = folder / "run.yaml"
    yaml.write_text(YAML.format(model=model, data=data, output=folder / "out"), encoding="utf-8")
    trained = run_duoka("train", yaml, f"output={folder / 'run'}", "--nproc", "2", cwd=folder)
    assert trained.returncode == 0, trained.stderr
    done = run_duoka("export-checkpoint", folder / "run", "-o", folder / "universal", "--checkpoint", "3")
    assert done.returncode == 0, done.stderr
    assert '"load_universal": true' in done.stdout and "step 3" in done.stdout
    places = (str(model), str(folder / "universal"), str(folder))
    run_world(1, go_on, *places, [3], [rows[:1] for rows in ROWS], False)
    run_world(2, go_on, *places, [1, 2, 3], ROWS, False)
    run_world(2, go_on, *places, [1, 2], ROWS, True)
    return folder, model


def of_checkpoint(folder: Path) -> dict:
    """Whole tensors of ours by name: the boxes of both ranks, laid side by side."""
    from duoka.store.reader import opened

    with opened(folder) as (reader, saved):
        import torch.distributed.checkpoint as dcp

        found = {name: torch.empty(tuple(one.size)) for name, one in saved.items() if hasattr(one, "size")}
        dcp.load(found, storage_reader=reader, no_dist=True)
    return found


def plain_steps(model: Path, start: dict, steps: list, is_split: bool) -> list:
    """What torch alone makes of it: the parameters by name after each step."""
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    named = dict(lm.named_parameters())
    groups = [{"params": [one], "weight_decay": 0.0 if is_split and one.ndim < 2 else 0.1} for one in named.values()]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    for name, parameter in named.items():
        parameter.data.copy_(start[f"model.{name}"])
        moments = {kind: start[f"optim.{kind}.{name}"].clone() for kind in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(3.0), **moments}
    found = []
    for number, rows in enumerate(steps):
        for group in optimizer.param_groups:  # DeepSpeed asks a schedule for the first time after its first step
            group["lr"] = 1e-2 if number == 0 else 1e-2 / (1 + 3 + number)
        for row in rows:
            ids = torch.tensor([row])
            (lm(input_ids=ids, labels=ids).loss / len(rows)).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append({name: parameter.detach().clone() for name, parameter in named.items()})
    return found


@pytest.mark.parametrize(
    ("size", "stage", "is_split"),
    [(1, 3, False), (2, 1, False), (2, 2, False), (2, 3, False), (2, 1, True), (2, 2, True)],
)
def test_deepspeed_goes_on_with_our_weights_moments_and_steps(case, size, stage, is_split):
    folder, model = case
    start = of_checkpoint(folder / "run" / "checkpoints" / "step-00000003")
    known = load_file(folder / f"{size}-{stage}-{is_split}.known")
    assert known["step"].tolist() == [3, 3]
    names = [name.removeprefix("model.") for name in start if name.startswith("model.")]
    assert len(names) > 10
    for name in names:
        assert known[f"0.{name}"].equal(start[f"model.{name}"])
        for kind in ("exp_avg", "exp_avg_sq"):
            assert known[f"0.{kind}.{name}"].equal(start[f"optim.{kind}.{name}"])
    steps = [rows[:size] for rows in ROWS]
    for number, wanted in enumerate(plain_steps(model, start, steps, is_split), 1):
        for name in names:
            torch.testing.assert_close(known[f"{number}.{name}"], wanted[name], rtol=1e-5, atol=2e-6)


def test_our_own_reader_finds_the_same_weights(case, tmp_path):
    folder, model = case
    done = run_duoka("import-checkpoint", folder / "universal", "--model", model, "-o", tmp_path / "back")
    assert done.returncode == 0 and "universal, step 3" in done.stdout, done.stderr
    back = load_file(tmp_path / "back" / "model.safetensors")
    start = of_checkpoint(folder / "run" / "checkpoints" / "step-00000003")
    assert all(value.equal(start[f"model.{name}"]) for name, value in back.items() if f"model.{name}" in start)
    assert len(back) >= 10


def test_steps_that_the_optimizer_did_not_take_are_not_counted(case, tmp_path):
    """Of three steps one was left out: AdamW's next one is its third, by which it weighs both moments."""
    folder, _ = case
    words = (f"output={tmp_path / 'run'}", "train.max_steps=3", "faults.nonfinite=skip")
    strike = {"DUOKA_INJECT": "nan_grad step=2 rank=0"}
    trained = run_duoka("train", folder / "run.yaml", *words, "parallel.strategy=single", env=strike)
    assert trained.returncode == 0, trained.stderr
    done = run_duoka("export-checkpoint", tmp_path / "run", "-o", tmp_path / "universal")
    assert done.returncode == 0, done.stderr
    place = tmp_path / "universal" / "global_step3" / "zero"
    counts = [torch.load(one, weights_only=True) for one in place.glob("*/step.pt")]
    assert len(counts) > 10 and {float(count) for count in counts} == {2.0}
    whole = torch.load(place / "optimizer_state.pt", weights_only=True)["optimizer_state_dict"]
    assert float(whole["state"][0]["step"]) == 2.0


def test_what_cannot_be_exported_is_said(case, tmp_path):
    folder, _ = case
    full = run_duoka("export-checkpoint", folder / "run", "-o", folder / "universal")
    assert full.returncode == 2 and "nothing is overwritten" in full.stderr
    missing = run_duoka("export-checkpoint", folder / "run", "-o", tmp_path / "a", "--checkpoint", "4")
    assert missing.returncode == 2 and "it has: 3, 5" in missing.stderr, missing.stderr
    for setting, words in (
        ("lora={rank: 2}", "holds adapters"),
        ("optim={name: muon, lr: 0.02, adamw_lr: 3e-4}", "was trained by muon"),
    ):
        trained = run_duoka("train", folder / "run.yaml", f"output={tmp_path / words}", setting, "train.max_steps=1")
        assert trained.returncode == 0, trained.stderr
        refused = run_duoka("export-checkpoint", tmp_path / words, "-o", tmp_path / "b")
        assert refused.returncode == 2 and words in refused.stderr and "duoka export" in refused.stderr
        assert not (tmp_path / "b").exists()
