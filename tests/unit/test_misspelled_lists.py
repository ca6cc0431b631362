"""A misspelled key is answered with what its writer wrote: lists, and what is to come from the environment."""

import pytest

from duoka.config.load import load_config
from duoka.errors import Faults


@pytest.mark.parametrize(
    ("line", "meant", "advice"),
    [
        (
            "data: {trian: [a.jsonl, {name: b.jsonl, weight: 2}]}",
            "train",
            "train: [a.jsonl, {name: b.jsonl, weight: 2}]",
        ),
        ("optim: {beats: [0.9, 0.95]}", "betas", "betas: [0.9, 0.95]"),
        ("optim: {lrr: [1, 2]}", "lr", "lr: 2.0e-05"),
        ('ouptut: "${env:HOME}/runs"', "output", 'output: "${env:HOME}/runs"'),
        ('log: {ot: ["${env:TRACKER}"]}', "to", 'to: ["${env:TRACKER}"]'),
        ('data: {trian: ["${env:HOME}/a.jsonl"]}', "train", 'train: ["${env:HOME}/a.jsonl"]'),
    ],
)
def test_the_advice_is_the_line_that_was_meant(tmp_path, monkeypatch, line, meant, advice):
    monkeypatch.setenv("TRACKER", "tensorboard")
    path = tmp_path / "run.yaml"
    path.write_text(f"model: demo\n{line}\n" + ("" if "trian" in line else "data: {train: [identity]}\n"), "utf-8")
    with pytest.raises(Faults) as caught:
        load_config(str(path))
    told = str(caught.value)
    assert f"did you mean {meant}?" in told and f"write:   {advice}" in told, told


def test_what_was_advised_is_taken(tmp_path, monkeypatch):
    monkeypatch.setenv("FOLDER", "mine")
    path = tmp_path / "run.yaml"
    path.write_text('model: demo\ndata: {trian: ["${env:FOLDER}/a.jsonl"]}\n', "utf-8")
    with pytest.raises(Faults) as caught:
        load_config(str(path))
    line = next(one for one in str(caught.value).splitlines() if "write:" in one).split("write:")[1].strip()
    path.write_text(f"model: demo\ndata: {{{line}}}\n", "utf-8")
    assert [one.name for one in load_config(str(path)).config.data.train] == ["mine/a.jsonl"]
