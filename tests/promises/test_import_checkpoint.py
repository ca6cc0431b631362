"""What DeepSpeed saved by itself becomes a model folder, weight by weight, and no code in its files is run."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from importing import import_from
from needs import need_deepspeed
from safetensors.torch import load_file
from worlds import run_world

from duoka.errors import ConfigError, DuokaError, StorageError

need_deepspeed()
pytestmark = pytest.mark.timeout(300)
STAGES = (0, "narrow", 1, 2, 3)


@pytest.fixture(scope="module")
def saved(tmp_path_factory, tiny_model):
    from deepspeed_runs import save_checkpoints

    folder = tmp_path_factory.mktemp("deepspeed")
    run_world(2, save_checkpoints, str(tiny_model), str(folder), STAGES)
    return folder


def check_weights(target, place):
    found, known = load_file(target / "model.safetensors"), load_file(place / "known.safetensors")
    known = {name: value for name, value in known.items() if not name.startswith("exp_avg")}
    assert found.keys() == known.keys()
    for name, value in known.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("stage", STAGES)
def test_each_stages_weights_are_the_folders(saved, tiny_model, tmp_path, stage):
    told = import_from(saved / f"stage{stage}", tiny_model, tmp_path / "new")
    assert "step 2" in told and ("stage 3" in told) == (stage == 3)
    check_weights(tmp_path / "new", saved / f"stage{stage}")
    start = load_file(tiny_model / "model.safetensors")
    after = load_file(tmp_path / "new" / "model.safetensors")
    assert all(not torch.equal(after[name], start[name]) for name in start), "two steps at a rate of 0.01 change all"
    assert (tmp_path / "new" / "tokenizer.json").is_file()


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [1, 3])
def test_a_universal_checkpoint_too(saved, tiny_model, tmp_path, stage):
    module = "deepspeed.checkpoint.ds_to_universal"
    folders = ["--input_folder", str(saved / f"stage{stage}" / "global_step2"), "--output_folder", str(tmp_path / "u")]
    subprocess.run([sys.executable, "-m", module, *folders, "--inject_missing_state"], check=True, timeout=240)
    assert "universal" in import_from(tmp_path / "u", tiny_model, tmp_path / "new")
    check_weights(tmp_path / "new", saved / f"stage{stage}")


class Bomb:
    def __reduce__(self):
        return Path.touch, (Path("struck"),)


class Member:
    """An enumeration's, as Python before 3.11.4 writes it."""

    def __reduce__(self):
        from deepspeed.runtime.zero.config import ZeroStageEnum

        return getattr, (ZeroStageEnum, "gradients")


class Reached:
    def __reduce__(self):
        return getattr, (torch.Tensor, "numpy")


def test_members_of_enumerations_are_read_as_older_pythons_write_them(saved, tiny_model, tmp_path):
    place = tmp_path / "older"
    shutil.copytree(saved / "stage2" / "global_step2", place)

    def write(stage):
        for part in sorted(place.glob("*_optim_states.pt")):
            held = torch.load(part, weights_only=False)
            held["optimizer_state_dict"]["zero_stage"] = stage
            torch.save(held, part)

    write(Reached())
    with pytest.raises(ConfigError, match="could run code"):
        import_from(place, tiny_model, tmp_path / "new")
    write(Member())
    import_from(place, tiny_model, tmp_path / "new")
    check_weights(tmp_path / "new", saved / "stage2")


def test_code_in_a_file_is_not_run_and_gaps_are_named(saved, tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def refusal(folder, model=tiny_model) -> DuokaError:
        with pytest.raises(DuokaError) as caught:
            import_from(folder, model, tmp_path / "new")
        assert not (tmp_path / "new").exists()
        return caught.value

    (tmp_path / "bad").mkdir()
    torch.save({"module": Bomb()}, tmp_path / "bad" / "mp_rank_00_model_states.pt")
    fault = refusal(tmp_path / "bad")
    assert isinstance(fault, ConfigError) and "could run code" in str(fault) and not Path("struck").exists()

    (tmp_path / "half").mkdir()
    for file in (saved / "stage2" / "global_step2").iterdir():
        if "pp_rank_1" not in file.name:
            (tmp_path / "half" / file.name).symlink_to(file)
    fault = refusal(tmp_path / "half")
    assert isinstance(fault, StorageError) and "1 ranks, and was written by 2" in str(fault)

    (tmp_path / "none").mkdir()
    assert "no checkpoint of DeepSpeed" in str(refusal(tmp_path / "none"))
    (tmp_path / "none" / "latest").write_text("../elsewhere")
    assert "no such folder beside it" in str(refusal(tmp_path / "none"))


@pytest.mark.parametrize("stage", [2, 3])
def test_files_that_do_not_fit_together_are_refused(saved, tiny_model, tmp_path, stage):
    cut = tmp_path / "cut"
    shutil.copytree(saved / f"stage{stage}" / "global_step2", cut)

    def change(by):
        for part in sorted(cut.glob("*_optim_states.pt")):
            held = torch.load(part, weights_only=False)
            by(held["optimizer_state_dict"])
            torch.save(held, part)

    def refused(words):
        with pytest.raises(StorageError, match=words):
            import_from(cut, tiny_model, tmp_path / "new")

    name = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    change(lambda state: state.update({name: [torch.cat([one, torch.zeros(64)]) for one in state[name]]}))
    refused("numbers")
    change(lambda state: state.update({name: [one[:-80] for one in state[name]]}))
    refused("numbers|ends before")
    change(lambda state: state.clear())
    refused("written otherwise")


def test_the_fp32_weights_of_a_16_bit_stage_0_are_told_by_their_values(saved, tiny_model, tmp_path):
    """They lie beside the module without names: a group's as a list, or (DeepSpeed's fused optimizers) end to end."""
    file = "mp_rank_00_model_states.pt"
    place = tmp_path / "fused"
    place.mkdir()
    held = torch.load(saved / "stagenarrow" / "global_step2" / file, weights_only=False)
    lists = held["optimizer"].pop("fp32_groups")
    held["optimizer"]["fp32_groups_flat"] = [torch.cat([one.detach().flatten() for one in each]) for each in lists]
    assert len(lists) == 2
    torch.save(held, place / file)
    assert "its fp32 weights" in import_from(place, tiny_model, tmp_path / "new")
    check_weights(tmp_path / "new", saved / "stagenarrow")
    held["optimizer"]["fp32_groups_flat"][0] += 1.0
    torch.save(held, place / file)
    told = import_from(place, tiny_model, tmp_path / "unknown")
    assert "the 16-bit weights: whose the fp32 ones beside them are cannot be told" in told
