"""DUOKA_LANG and LANG: the frame of the command line in Chinese, with a word for everything that it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from duoka import cli as frame
from duoka import errors
from duoka.cli import words_zh
from duoka.cli.language import framed, language


@pytest.mark.parametrize(
    ("env", "wanted"),
    [
        ({}, "en"),
        ({"LANG": "zh_CN.UTF-8"}, "zh"),
        ({"LANG": "zh_CN.UTF-8", "LC_ALL": "C"}, "en"),
        ({"LANG": "en_US.UTF-8", "DUOKA_LANG": "zh"}, "zh"),
        ({"LANG": "zh_CN.UTF-8", "DUOKA_LANG": "en"}, "en"),
        ({"LANG": "zh_CN.UTF-8", "DUOKA_LANG": ""}, "zh"),
    ],
)
def test_the_first_variable_that_is_set_decides(env: dict[str, str], wanted: str) -> None:
    assert language(env) == wanted


def test_every_command_and_every_kind_of_error_has_its_words() -> None:
    kinds = {one.title for one in vars(errors).values() if isinstance(one, type) and issubclass(one, errors.DuokaError)}
    assert words_zh.COMMANDS.keys() == frame.COMMANDS.keys(), "cli/words_zh.py has a line for each command"
    assert words_zh.KINDS.keys() == kinds | {"usage error", "interrupted"}


def test_help_and_refusals_speak_chinese(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DUOKA_LANG", "zh")
    assert frame.run(["--help"]) == 0
    out = capsys.readouterr().out
    assert "命令" in out and "按 YAML 训练" in out and "退出码" in out and "Train as" not in out
    assert frame.run(["train", "none.yaml"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("配置错误：") and "none.yaml" in err and "duoka explain 2" in err
    assert frame.run(["trian"]) == 2
    assert capsys.readouterr().err.startswith("用法错误：")


def test_each_fault_of_several_has_its_kind_and_the_rest_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["config error: a: b", "  where: x", "config error: c"]
    assert framed(lines, 2) == lines
    monkeypatch.setenv("DUOKA_LANG", "zh")
    assert framed(lines, 2) == ["配置错误：a: b", "  where: x", "配置错误：c", "  中文说明：   duoka explain 2"]
