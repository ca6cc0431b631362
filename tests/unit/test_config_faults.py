"""The table of bad configs: each with its line, its sentence and its advice, and nothing reported beside them."""

from __future__ import annotations

from pathlib import Path

import pytest
from bad_configs import CONTRADICTIONS, HEAD, OVERRIDES, UNKNOWN_KEYS, VALUES, YAML_ITSELF, Bad

from duoka.config.load import load_config
from duoka.config.rules import RULES, Rule
from duoka.errors import Fault, Faults


def faults_of(tmp_path: Path, text: str, overrides: tuple[str, ...] = ()) -> tuple[Fault, ...]:
    path = tmp_path / "sft.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(Faults) as caught:
        load_config(path, overrides)
    assert caught.value.exit_code == 2
    return caught.value.faults


@pytest.mark.parametrize(
    "case", [*YAML_ITSELF, *UNKNOWN_KEYS, *VALUES, *OVERRIDES], ids=lambda case: case.id.replace(" ", "-")
)
def test_a_bad_config_is_refused_with_line_reason_and_advice(case: Bad, tmp_path: Path) -> None:
    faults = faults_of(tmp_path, case.text, case.overrides)
    said = "\n".join(line for fault in faults for line in fault.lines())
    assert [fault.line for fault in faults] == [line for line, _, _ in case.faults], said
    for fault, (line, what, fix) in zip(faults, case.faults, strict=True):
        assert what in fault.what, said
        assert fix in fault.fix, said
        assert fault.source.strip() or not line, said


def test_the_table_of_bad_configs_has_at_least_forty_rows() -> None:
    assert len([*YAML_ITSELF, *UNKNOWN_KEYS, *VALUES, *OVERRIDES, *CONTRADICTIONS]) >= 40


@pytest.mark.parametrize("rule", [rule for rule in RULES if not rule.is_note], ids=lambda rule: rule.id)
def test_every_rule_refuses_its_contradiction_at_a_line(rule: Rule, tmp_path: Path) -> None:
    (fault,) = faults_of(tmp_path, CONTRADICTIONS[rule.id])
    assert fault.key in rule.keys and fault.line == 3 and fault.fix == rule.fix
    assert "{" not in fault.what.replace("{rank", "")


def test_all_rules_are_evaluated_and_sorted_by_line(tmp_path: Path) -> None:
    text = HEAD + "output: .\noptim: {lr: 5, warmup: 20}\ntrain: {max_steps: 5, global_batch: 2, micro_batch: 3}\n"
    faults = faults_of(tmp_path, text)
    assert [(fault.key, fault.line) for fault in faults] == [
        ("output", 3), ("optim.warmup", 4), ("optim.lr", 4), ("train.micro_batch", 5)
    ]  # fmt: skip
    assert "train.max_steps is in line 5 of" in faults[1].what


def test_a_fault_elsewhere_gives_a_new_model_no_name(tmp_path: Path) -> None:
    text = "model: {depth: 4, tokenizer: demo}\ndata: {train: [identity]}\ntrain: {tokens: 20y}\n"
    (fault,) = faults_of(tmp_path, text)
    assert fault.key == "train.tokens"


def test_schema_faults_do_not_hide_contradictions_and_unknown_keys(tmp_path: Path) -> None:
    text = HEAD + "lora: {rank: eight}\noptim: {lr: 7}\ntrian: {epochs: 2}\n"
    assert [fault.line for fault in faults_of(tmp_path, text)] == [3, 4, 5]


def test_a_refused_value_takes_no_part_in_the_rules(tmp_path: Path) -> None:
    """max_steps falls back to its default there, and warmup would look fine; lora.alpha would look odd."""
    text = HEAD + "optim: {warmup: many}\ntrain: {max_steps: 1}\nlora: {alpha: 1e9, rank: x}\n"
    assert [fault.key for fault in faults_of(tmp_path, text)] == ["optim.warmup", "lora.rank"]


def test_a_message_is_three_short_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sft.yaml").write_text(HEAD + "lora:\n  rank: eight\n")
    with pytest.raises(Faults) as caught:
        load_config("sft.yaml")
    assert str(caught.value).splitlines() == [
        'config error: lora.rank must be a whole number of at least 1, got "eight"',
        "  sft.yaml, line 4:   rank: eight",
        "  write for example:   rank: 8",
    ]


def test_a_missing_file_names_its_nearest_neighbor(tmp_path: Path) -> None:
    (tmp_path / "sft.yaml").write_text(HEAD)
    with pytest.raises(Faults, match=r"there is no file .*stf\.yaml[\s\S]*did you mean .*sft\.yaml"):
        load_config(tmp_path / "stf.yaml")


def test_a_missing_file_beside_no_yaml_names_init(tmp_path: Path) -> None:
    with pytest.raises(Faults, match="duoka init"):
        load_config(tmp_path / "sub" / "sft.yaml")


def test_a_folder_is_refused_and_a_run_folder_names_its_config(tmp_path: Path) -> None:
    with pytest.raises(Faults, match="is a folder, not a YAML file"):
        load_config(tmp_path)
    (tmp_path / "config.yaml").write_text(HEAD)
    with pytest.raises(Faults, match=r"give its file: .*config\.yaml"):
        load_config(tmp_path)


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_another_encoding_is_refused_with_the_line(encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "sft.yaml"
    path.write_bytes(f"model: demo\noutput: café\n{HEAD}".encode(encoding))
    with pytest.raises(Faults, match="is not UTF-8 text") as caught:
        load_config(path)
    assert caught.value.faults[0].line == (2 if encoding == "latin-1" else 1)


def test_a_weights_file_given_as_config_is_refused_by_its_size(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\0" * 1_000_001)
    with pytest.raises(Faults, match="1,000,001 bytes"):
        load_config(path)


def test_aliases_that_grow_without_end_are_refused(tmp_path: Path) -> None:
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    lines += [f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]" for old, new in zip("abcdef", "bcdefg", strict=True)]
    faults = faults_of(tmp_path, "\n".join(lines))
    assert any("aliases grow without end" in fault.what for fault in faults)


def test_a_secret_from_the_environment_is_in_no_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "hunter2hunter2")
    text = HEAD + 'optim: {lr: "${env:MY_TOKEN}"}\nhf_token: ${env:MY_TOKEN}\npassword: swordfish\n'
    faults = faults_of(tmp_path, text)
    said = "\n".join(line for fault in faults for line in fault.lines())
    assert "hunter2" not in said and "swordfish" not in said
    assert '"${env:MY_TOKEN}"' in faults[0].what


def test_no_message_carries_terminal_codes_or_the_bom(tmp_path: Path) -> None:
    text = '\ufeffmodle: "\\e[31m"\n"\\e[32mx": 1\nstage: "\\e[31m"\n' + HEAD
    faults = faults_of(tmp_path, text, ("optim.lr=\x1b[31m",))
    said = "".join(line for fault in faults for line in fault.lines())
    assert len(faults) == 4 and said.isprintable() and faults[0].source.startswith("modle")


@pytest.mark.parametrize(
    "text",
    [
        "model: demo\ndta: {train: [identity]}\n",
        "mdl: demo\ndata: {train: [identity]}\n",
        "model: demo\ndata: {trian: [identity]}\n",
        "model_name_or_path: demo\ndata: {train: [identity]}\n",
    ],
)
def test_a_required_key_under_a_wrong_name_is_not_missing_too(tmp_path: Path, text: str) -> None:
    (fault,) = faults_of(tmp_path, text)
    assert "unknown key" in fault.what


@pytest.mark.parametrize("side", ["train", "eval"])
def test_a_word_in_a_data_set_is_taken_for_no_key_of_another_block(tmp_path: Path, side: str) -> None:
    sets = {"train": "[identity]", "eval": "[other]", side: "[{name: another, dept: 3}]"}
    text = f"model: demo\ndata:\n  train: {sets['train']}\n  eval: {sets['eval']}\n"
    fault = faults_of(tmp_path, text)[0]
    assert fault.what == f"unknown key data.{side}[0].dept" and fault.fix.startswith(f"known in data.{side}[0]: name")
