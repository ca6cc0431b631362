"""What guides teach in Python runs with the import line changed at 1 and 2 processes; raw torch scripts as they are."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import run_duoka
from worlds import free_port, run_world

HERE = Path(__file__).parent
NESTED = """
trainer:
  type: "ddp"
  max_epochs: 1
  per_device_train_batch_size: 4
  gradient_accumulation_steps: 2
  learning_rate: 2e-5
  fp16: true
model:
  model_name_or_path: "{model}"
  adapter_name_or_path: "lora"
  lora_rank: 8
  lora_alpha: 16
  lora_dropout: 0.05
data:
  dataset: "identity"
  max_seq_len: 64
  train_split: "train"
ddp:
  find_unused_parameters: false
  gradient_as_bucket_view: true
  timeout: 180000000
"""


def run_guides(yaml, folder):
    """Every guide's loop in turn on this rank; what they saw as JSON."""
    sys.path.insert(0, str(HERE / "guides"))
    import loops

    from duoka import Accelerator

    seen = {"basic": loops.train_basic(Accelerator())}
    size = Accelerator().num_processes
    for name, options in {"advanced": {}, "adapters": {"peft": True}}.items():
        project = f"{folder}/{name}-{size}"
        make = {"gradient_accumulation_steps": 2, "log_with": "tensorboard", "project_dir": project}
        seen[name] = loops.train_advanced(Accelerator(**make), **options)
        seen[f"{name} cut"] = loops.train_advanced(Accelerator(**make), stop_at=2, **options)
        seen[f"{name} resumed"] = loops.train_advanced(Accelerator(**make), resume=f"{project}/step_2", **options)
    seen["bf16"] = loops.train_advanced(Accelerator(mixed_precision="bf16", project_dir=f"{folder}/bf16"))
    seen["nested"] = loops.train_nested(yaml, f"{folder}/final-{size}")
    Path(f"{folder}/guides-{size}-{Accelerator().process_index}.json").write_text(json.dumps(seen))


@pytest.fixture(scope="module")
def seen(tmp_path_factory, tiny_model):
    folder = tmp_path_factory.mktemp("guides")
    yaml = folder / "ddp_train_config.yaml"
    yaml.write_text(NESTED.format(model=tiny_model), encoding="utf-8")
    for size in (1, 2):
        run_world(size, run_guides, str(yaml), str(folder))
    read = {size: json.loads((folder / f"guides-{size}-0.json").read_text()) for size in (1, 2)}
    return folder, read


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", ["advanced", "adapters"])
def test_going_on_as_the_guide_does_gives_the_same_losses(seen, size, name):
    runs = seen[1][size]
    assert runs[f"{name} cut"]["losses"] + runs[f"{name} resumed"]["losses"] == runs[name]["losses"]
    assert len(runs[name]["losses"]) == runs[name]["steps"] == 2 * {1: 5, 2: 3}[size]


def test_steps_are_counted_alike(seen):
    assert [seen[1][size]["basic"]["steps"] for size in (1, 2)] == [20, 10]


def test_saved_models_open_in_transformers_and_peft(seen):
    from peft import PeftModel
    from transformers import BertForSequenceClassification

    sys.path.insert(0, str(HERE / "guides"))
    from loops import prepare_model_and_optimizer

    folder, _ = seen
    for size in (1, 2):
        for way in ("way1", "model"):
            model = BertForSequenceClassification.from_pretrained(folder / f"advanced-{size}" / "step_2" / way)
            assert model.config.hidden_size == 16
            names = {path.name for path in (folder / f"adapters-{size}" / "step_2" / way).iterdir()}
            assert {"adapter_config.json", "adapter_model.safetensors"} <= names and "model.safetensors" not in names
            base, _ = prepare_model_and_optimizer()
            PeftModel.from_pretrained(base, folder / f"adapters-{size}" / "step_2" / way)


def test_tensorboard_has_the_losses_that_were_logged(seen):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, read = seen
    (file,) = sorted((folder / "advanced-1").rglob("events.*"), key=os.path.getmtime)[:1]
    events = EventAccumulator(str(file))
    events.Reload()
    logged = [scalar.value for scalar in events.Scalars("loss")]
    assert logged == pytest.approx(read[1]["advanced"]["losses"], rel=1e-6)


def test_the_nested_guide_trains_and_saves_one_adapter(seen):
    folder, read = seen
    for size in (1, 2):
        nested = read[size]["nested"]
        assert len(nested["losses"]) > nested["steps"], "it accumulated"
        # The schedule counts optimizer steps: as many on two processes as it says, and the last rate is near zero.
        assert nested["steps"] == nested["total"]
        assert nested["rates"][0] == pytest.approx(2e-5) and 0 < nested["rates"][-1] < 2e-5
        names = {path.name for path in (folder / f"final-{size}").iterdir()}
        assert {"adapter_model.safetensors", "tokenizer.json"} <= names
    assert read[1]["nested"]["total"] >= 2 * read[2]["nested"]["total"] - 1


def test_raw_torch_scripts_run_under_launch_untouched(tmp_path):
    done = run_duoka("launch", "--nproc", "2", HERE / "guides" / "ddp.py", tmp_path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ep: 1, loss") == 1, done.stdout
    weights = [json.loads((tmp_path / f"ddp-{rank}.json").read_text()) for rank in (0, 1)]
    assert weights[0] == weights[1]
    done = run_duoka("launch", HERE / "guides" / "spawn.py", free_port(), tmp_path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "spawn-0.txt").read_text() == (tmp_path / "spawn-1.txt").read_text()


@pytest.mark.nightly
def test_a_script_of_transformers_trainer_runs_alone_and_under_launch(tmp_path, tiny_model):
    """Two ranks each see other rows than one does; that they exchange shows in weights that are the same on both."""
    script = HERE / "guides" / "trainer.py"
    subprocess.run([sys.executable, script, tmp_path, tiny_model], cwd=tmp_path, check=True, timeout=200)
    alone = json.loads((tmp_path / "trainer-0.json").read_text())
    done = run_duoka("launch", "--nproc", "2", script, tmp_path, tiny_model, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / f"trainer-{rank}.json").read_text()) for rank in (0, 1))
    assert alone["size"] == 1 and first["size"] == second["size"] == 2
    assert "DISTRIBUTED" in first["mode"] and first["wrapped"] == "DistributedDataParallel" != alone["wrapped"]
    assert first["weights"] == second["weights"] != alone["weights"]


def test_items_are_shared_by_turns_as_a_guide_s_table_shows(tmp_path):
    done = run_duoka("launch", "--nproc", "8", HERE / "guides" / "shares.py", tmp_path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    shares = [(tmp_path / f"24-{rank}.txt").read_text() for rank in range(8)]
    assert shares == [f"{rank} {rank + 8} {rank + 16}" for rank in range(8)], "3 each, as the guide prints them"
    uneven = [(tmp_path / f"99-{rank}.txt").read_text().split() for rank in range(8)]
    assert sorted(int(one) for own in uneven for one in own) == list(range(99)), "each once"
    assert [len(own) for own in uneven] == [13, 13, 13] + [12] * 5
