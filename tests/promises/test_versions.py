"""What docs/versions.md promises: a YAML and a checkpoint that an earlier version wrote still work, in this one.

tests/fixtures/make.py wrote the folders, with the version that they are named by.
"""

import json
import shutil
from pathlib import Path

import pytest
from worlds import run_world

from duoka.config.load import load_config

VERSIONS = sorted((Path(__file__).parents[1] / "fixtures").glob("version-*"))


def go_on(folders):
    """Go on with each folder's run, as `duoka train run.yaml` in it does."""
    import os

    from duoka.comm.world import World
    from duoka.runs.folder import RunFolder
    from duoka.train.main import read_inputs, run_in_world

    for folder in folders:
        os.chdir(folder)
        run = RunFolder(Path(folder) / "run")
        run.make()
        run_in_world(read_inputs(load_config("run.yaml"), run), World())


@pytest.fixture(scope="module")
def gone_on(tmp_path_factory):
    """A copy of each version's folder, in which its run has been gone on with."""
    copies = {}
    for version in VERSIONS:
        copies[version.name] = tmp_path_factory.mktemp("versions") / version.name
        shutil.copytree(version, copies[version.name])
    run_world(1, go_on, [str(copy) for copy in copies.values()])
    return copies


def test_there_is_a_folder_of_a_version():
    assert VERSIONS and all((version / "run.yaml").is_file() for version in VERSIONS)


@pytest.mark.parametrize("version", VERSIONS, ids=lambda path: path.name)
def test_a_yaml_of_an_earlier_version_loads_without_a_word(version, monkeypatch):
    monkeypatch.chdir(version)
    loaded = load_config("run.yaml")
    assert not loaded.notes
    assert loaded.config.train.max_steps == 6 and loaded.config.optim.weight_decay == 0.1


@pytest.mark.parametrize("name", [version.name for version in VERSIONS])
def test_a_checkpoint_of_an_earlier_version_goes_on_with_its_numbers(name, gone_on):
    folder = gone_on[name]
    lines = map(json.loads, (folder / "run" / "events" / "run.jsonl").read_text(encoding="utf-8").splitlines())
    ours = {line["step"]: line for line in lines if line["type"] == "step"}
    wanted = {int(step): one for step, one in json.loads((folder / "numbers.json").read_text()).items()}
    assert ours.keys() == wanted.keys(), "the run began anew, or did not end"
    for step, one in wanted.items():
        for number, value in one.items():
            assert ours[step][number] == pytest.approx(value, rel=1e-4), f"{number} of step {step}"
    assert (folder / "run" / "final" / "model.safetensors").is_file()
