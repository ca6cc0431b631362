"""`duoka pretrain`: each flag of a guide is a key of a config; what has no meaning is said; nothing is guessed."""

import json

import pytest

from duoka.cli import run
from duoka.cli.lines import meaning_of_torchrun
from duoka.cli.pretrain import FLAGS, settings_of
from duoka.config.catalog import known_keys
from duoka.errors import ConfigError


def test_every_flag_is_a_key_or_says_why_not():
    for flag in FLAGS:
        assert (flag.key in known_keys()) != bool(flag.note), flag.name


def test_flags_become_keys_with_their_units():
    asked, notes = settings_of(
        {
            "depth": "12",
            "total_batch_size": "524288",
            "target_param_data_ratio": "20",
            "run": "base",
            "device_type": "cpu",
        }
    )
    assert asked == {
        "model.depth": "12", "train.global_batch": "524288 tokens", "train.tokens": "20x", "output": "runs/base"
    }  # fmt: skip
    assert len(notes) == 1 and "--device-type=cpu is passed over" in notes[0]
    asked, notes = settings_of({"eval_every": "-1", "save_every": "-1"})
    assert asked == {"train.eval_every": "1000000000", "checkpoint.every": "1000000000"}
    assert [note.partition(": ")[2] for note in notes] == ["only the end is measured", "only the end is saved"]
    assert settings_of({"num_iterations": "-1", "run": "dummy", "window_pattern": "L"}) == ({}, [])


@pytest.fixture
def place(tmp_path, monkeypatch, tiny_model):
    """A folder with text and a tokenizer under the names that need no flag."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl").write_text(json.dumps({"text": "hello " * 200}) + "\n", encoding="utf-8")
    (tmp_path / "tokenizer").symlink_to(tiny_model)
    return tmp_path


def test_the_guides_command_works_as_it_stands(place, capsys):
    assert run(["pretrain", "--depth=12", "--device_batch_size=8", "--run=base_d12_single", "--dry-run"]) == 0
    said = capsys.readouterr()
    assert "model.depth=12 train.micro_batch=8 output=runs/base_d12_single" in said.err
    assert "runs/base_d12_single: a new run" in said.out and "12 layers" in said.out
    assert "524,288 tokens per step" in said.out
    for name in ("data", "tokenizer"):  # whole paths: the run's config says the same from anywhere
        assert str(place / name) in said.err


@pytest.mark.parametrize("flag", ["--device-batch-size=32", "--device_batch_size=32", "--device_batch_size 32"])
def test_dashes_and_underscores_are_the_same(place, capsys, flag):
    assert run(["pretrain", "--depth", "4", *flag.split(), "--dry-run"]) == 0
    assert "train.micro_batch=32" in capsys.readouterr().err


REFUSED = [
    (["--depht=4"], "there is no option --depht", "did you mean --depth?"),
    (["--device-batchsize=4", "--depth=4"], "there is no option --device-batchsize", "--device-batch-size"),
    ([], "nothing says which model", "--depth=12"),
    (["--depth=4", "--data=nowhere"], "nowhere", ""),
    (["--depth=eight"], "model.depth must be a whole number", "model.depth=12"),
    (["--depth=4", "--total-batch-size=many"], "train.global_batch must be", ""),
]


@pytest.mark.parametrize(("words", "what", "fix"), REFUSED)
def test_what_cannot_be_meant_is_refused(place, capsys, words, what, fix):
    assert run(["pretrain", *words, "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert what in said and fix in said and "Traceback" not in said


def test_without_text_or_tokenizer_it_says_how_to_make_them(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(["pretrain", "--depth=4"]) == 2
    assert "duoka data tokenizer" in capsys.readouterr().err
    assert run(["pretrain", "--depth=4", "--tokenizer=demo"]) == 2
    assert "--data texts/" in capsys.readouterr().err


def test_a_guides_torchrun_line_is_duoka_pretrain(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--standalone", "--nproc_per_node=8", "-m", "scripts.base_train", "--depth=12", "--run=x"]
    assert meaning_of_torchrun(words).words == ("pretrain", "--nproc", "8", "--depth=12", "--run=x")
    nodes = ["--nproc_per_node=8", "--nnodes=2", "--node_rank=1", "--master_addr=h", "--master_port=29500"]
    meaning = meaning_of_torchrun([*nodes, "-m", "scripts.base_train", "--", "--depth=12"])
    assert meaning.words == ("pretrain", "--nproc", "8", "--depth=12")
    assert meaning.env == {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "h", "MASTER_PORT": "29500"}
    with pytest.raises(ConfigError, match="fixed number of machines"):
        meaning_of_torchrun(["--nnodes=1:2", "-m", "scripts.base_train", "--depth=12"])
    with pytest.raises(ConfigError, match="command of its own") as caught:
        meaning_of_torchrun(["--nproc_per_node=8", "-m", "scripts.chat_eval", "--source=mid"])
    assert "duoka eval runs/NAME --tasks" in caught.value.fix
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "base_train.py").write_text("", encoding="utf-8")  # the guide's own code is here
    assert meaning_of_torchrun(words).words[:4] == ("launch", "--nproc", "8", "--module")
