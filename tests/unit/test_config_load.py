"""What a good config means: short and odd forms, origins, extends, environment, and the way back from resolved YAML."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from duoka.config.catalog import EXECUTION_KEYS, is_execution_key, known_keys
from duoka.config.load import config_hash, load_config, resolved_yaml, result_differences
from duoka.config.loaded import Loaded
from duoka.config.rules import check_rules
from duoka.config.schema import RunConfig
from duoka.config.write import leaves
from duoka.config.yaml_text import yaml_text
from duoka.errors import Fault, Faults

CANONICAL = """\
model: demo                 # a Hub id, a local folder, `demo`
stage: sft
data: {train: [identity], eval: 0.1, max_length: 512, packing: true}
lora: {rank: 8, alpha: 16, dropout: 0.05, targets: all}     # left out: full fine-tuning
optim: {name: adamw, lr: 2e-5, schedule: cosine, warmup: 0.03, clip: 1.0, weight_decay: 0.0}
train: {epochs: 3, global_batch: 16, micro_batch: auto, precision: auto, recompute: auto, seed: 42}
parallel: {strategy: auto}
checkpoint: {every: 50, keep: 2, resume: auto}
log: {every: 10, to: [tensorboard]}
output: runs/identity
"""
SMALL = "model: demo\ndata: {train: [identity]}\n"


def load(tmp_path: Path, text: str | bytes, *overrides: str, name: str = "sft.yaml", **more: Any) -> Loaded:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_config(path, overrides, **more)


def test_the_canonical_form_loads_without_a_note(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    loaded = load(tmp_path, CANONICAL)
    config = loaded.config
    assert config.model.name == "demo" and config.data.train[0].name == "identity" and config.optim.lr == 2e-5
    assert config.lora is not None and config.lora.rank == 8 and config.output == "runs/identity"
    assert loaded.notes == () and capfd.readouterr() == ("", "")


@pytest.mark.parametrize("text", ["2e-5", "2.0e-5", '"2e-5"', "'2.0E-05'", "0.00002", ".00002", "+2e-5", "2E-5"])
def test_every_spelling_of_a_number_is_the_float(text: str, tmp_path: Path) -> None:
    assert load(tmp_path, SMALL + f"optim: {{lr: {text}}}\n").config.optim.lr == 2e-5
    assert load(tmp_path, SMALL, f"optim.lr={text}").config.optim.lr == 2e-5


@pytest.mark.parametrize("text", ["no", "off", "False", "FALSE", "n", '"false"', "Off", "0"])
def test_every_spelling_of_false_is_false(text: str, tmp_path: Path) -> None:
    assert load(tmp_path, SMALL + f"parallel: {{bucket_view: {text}}}\n").config.parallel.bucket_view is False


@pytest.mark.parametrize(
    "text",
    [
        b"\xef\xbb\xbf" + CANONICAL.encode(),
        CANONICAL.replace("\n", "\r\n").encode(),
        b"\xef\xbb\xbf" + CANONICAL.replace("\n", "\r\n").encode(),
        CANONICAL.rstrip("\n").encode(),
        ("---\n" + CANONICAL + "...\n").encode(),
    ],
    ids=["bom", "crlf", "bom-crlf", "no-last-newline", "document-marks"],
)
def test_bom_and_line_ends_change_nothing(text: bytes, tmp_path: Path) -> None:
    loaded = load(tmp_path, text)
    assert loaded.config == load(tmp_path, CANONICAL).config and loaded.notes == ()


def test_json_is_yaml(tmp_path: Path) -> None:
    assert (
        load(tmp_path, '{"model": "demo", "data": {"train": ["identity"]}, "optim": {"lr": 2e-5}}').config.optim.lr
        == 2e-5
    )


def test_anchors_and_merge_keys_are_fine(tmp_path: Path) -> None:
    text = SMALL + "checkpoint: &often {every: 7}\nlog:\n  <<: *often\n  to: []\n"
    config = load(tmp_path, text).config
    assert (config.checkpoint.every, config.log.every, config.log.to) == (7, 7, ())


def test_short_and_long_forms_mean_the_same(tmp_path: Path) -> None:
    long = "model: {name: demo}\ndata: {train: [{name: identity}]}\n"
    one = "model: demo\ndata: {train: identity}\n"
    assert load(tmp_path, SMALL).config == load(tmp_path, long).config == load(tmp_path, one).config


def test_an_empty_block_means_its_defaults_and_null_lora_full_fine_tuning(tmp_path: Path) -> None:
    config = load(tmp_path, SMALL + "optim:\n  # lr: 1\ntrain:\nlora: null\n").config
    assert config == load(tmp_path, SMALL).config and config.lora is None


def test_a_left_out_output_is_the_yamls_name(tmp_path: Path) -> None:
    loaded = load(tmp_path, SMALL, name="my.run.yaml")
    assert loaded.config.output == "runs/my.run" and loaded.origins["output"] == "default"


def test_samples_in_quotes_are_the_same_batch(tmp_path: Path) -> None:
    assert load(tmp_path, SMALL + 'train: {global_batch: "16"}\n').config == load(tmp_path, SMALL).config


def test_a_timeout_of_years_is_noted_not_refused(tmp_path: Path) -> None:
    loaded = load(tmp_path, SMALL + "parallel: {timeout: 180000000}\n")
    assert len(loaded.notes) == 1 and "more than a day" in loaded.notes[0]


def test_origins_name_file_line_command_line_and_default(tmp_path: Path) -> None:
    loaded = load(tmp_path, SMALL + "optim:\n  lr: 1e-4\n  clip: 1\n", "optim.clip=2", "lora.rank=4")
    origins = loaded.origins
    assert origins["model.name"] == "sft.yaml:1" and origins["data.train"] == "sft.yaml:2"
    assert origins["optim.lr"] == "sft.yaml:4" and origins["optim.clip"] == "command line"
    assert origins["lora.rank"] == "command line" and origins["lora.alpha"] == "default"
    assert set(origins) == set(leaves(loaded.config))


def test_overrides_replace_values_and_merge_blocks(tmp_path: Path) -> None:
    config = load(
        tmp_path, CANONICAL, "optim={lr: 1e-3}", "data.train=[a, b]", "model=./mine", "lora=null", "optim.clip=0.5",
        "optim.clip=0.25", 'output="x=y"',
    ).config  # fmt: skip
    assert config.optim.lr == 1e-3 and config.optim.weight_decay == 0.0 and config.optim.clip == 0.25
    assert [source.name for source in config.data.train] == ["a", "b"]
    assert config.model.name == "./mine" and config.lora is None and config.output == "x=y"


def test_extends_merges_blocks_and_replaces_lists(tmp_path: Path) -> None:
    (tmp_path / "bases").mkdir()
    (tmp_path / "bases" / "root.yaml").write_text("optim: {lr: 1, clip: 3}\ntrain: {seed: 1}\n")
    (tmp_path / "bases" / "base.yaml").write_text(
        "extends: root.yaml\nmodel: demo\ndata: {train: [a, b], max_length: 64}\noptim: {lr: 1e-3}\n"
    )
    loaded = load(tmp_path, "extends: bases/base.yaml\nmodel: {revision: x, name: m/n}\ndata: {train: [identity]}\n")
    config, origins = loaded.config, loaded.origins
    assert (
        config.optim.lr == 1e-3 and config.optim.clip == 3 and config.train.seed == 1 and config.data.max_length == 64
    )
    assert [source.name for source in config.data.train] == ["identity"] and config.model.name == "m/n"
    assert (origins["optim.lr"], origins["optim.clip"], origins["data.train"]) == (
        "base.yaml:4",
        "root.yaml:1",
        "sft.yaml:3",
    )


def test_a_short_model_below_a_long_one_keeps_its_name(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("model: m/n\ndata: {train: [identity]}\n")
    config = load(tmp_path, "extends: base.yaml\nmodel: {revision: v2}\n").config
    assert (config.model.name, config.model.revision) == ("m/n", "v2")


def test_a_fault_in_an_extended_file_names_that_file(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("model: demo\noptim: {lr: x}\n")
    with pytest.raises(Faults) as caught:
        load(tmp_path, "extends: base.yaml\ndata: {trian: [identity]}\n")
    assert [(Path(fault.file).name, fault.line) for fault in caught.value.faults] == [
        ("sft.yaml", 2), ("base.yaml", 2)
    ]  # fmt: skip


def test_extends_in_a_circle_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("extends: sft.yaml\n")
    with pytest.raises(Faults, match=r"in a circle: sft\.yaml -> a\.yaml -> sft\.yaml"):
        load(tmp_path, SMALL + "extends: a.yaml\n")


def test_extends_of_a_missing_file_names_its_line(tmp_path: Path) -> None:
    with pytest.raises(Faults, match="there is no file") as caught:
        load(tmp_path, SMALL + "extends: bse.yaml\n")
    assert caught.value.faults[0].line == 3


def test_the_environment_fills_values_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUOKA_TEST_LR", "3e-4")
    monkeypatch.delenv("DUOKA_TEST_ABSENT", raising=False)
    text = SMALL + "optim:\n  lr: ${env:DUOKA_TEST_LR}\n  clip: ${env:DUOKA_TEST_ABSENT,2}\n"
    loaded = load(tmp_path, text + "output: a/${env:DUOKA_TEST_ABSENT,b}/$${env:NOT}\n")
    config = loaded.config
    assert (config.optim.lr, config.optim.clip, config.output) == (3e-4, 2.0, "a/b/${env:NOT}")
    assert loaded.origins["optim.lr"] == "sft.yaml:4, env DUOKA_TEST_LR"
    assert load(tmp_path, resolved_yaml(loaded)).config == config


def test_a_missing_variable_that_an_override_replaces_is_not_missed(tmp_path: Path) -> None:
    text = SMALL + "output: ${env:DUOKA_TEST_ABSENT}\n"
    assert load(tmp_path, text, "output=runs/x").config.output == "runs/x"


def test_a_secret_is_written_as_the_variable_and_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL_TOKEN", "hunter2")
    loaded = load(tmp_path, "model: x/${env:MODEL_TOKEN}\ndata: {train: ['${env:MODEL_TOKEN}', b]}\n")
    assert loaded.config.model.name == "x/hunter2" and loaded.config.data.train[0].name == "hunter2"
    text = resolved_yaml(loaded)
    assert "hunter2" not in text and load(tmp_path, text).config == loaded.config.model_copy(
        update={"output": "runs/sft"}
    )


def test_the_resolved_yaml_lists_every_key_and_loads_equal(tmp_path: Path) -> None:
    loaded = load(tmp_path, CANONICAL, "train.seed=7")
    text = resolved_yaml(loaded)
    assert "  seed: 7 " in text and "# command line" in text and "  clip: 1.0 " in text and "# sft.yaml:5" in text
    plain = yaml.safe_load(text)
    again = load(tmp_path / "..", text, name=f"{tmp_path.name}.yaml")
    assert again.config == loaded.config and again.base == loaded.base.resolve()
    assert plain["optim"]["lr"] == 2e-5, "a plain YAML 1.1 reader must see the number too"
    for name in leaves(loaded.config):
        block = plain
        for part in name.split("."):
            assert part in block, name
            block = block[part]


def test_relative_paths_of_a_resolved_config_keep_their_folder(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "x"
    run.mkdir(parents=True)
    seen: list[Path] = []
    loaded = load(tmp_path, SMALL)
    (run / "config.yaml").write_text(resolved_yaml(loaded))

    def remember(config: RunConfig, base: Path) -> list[Fault]:
        seen.append(base)
        return []

    again = load_config(run / "config.yaml", checks=[remember])
    assert seen == [tmp_path] and again.config.output == "runs/sft"


def test_checks_are_placed_and_sorted_among_the_other_faults(tmp_path: Path) -> None:
    def no_such_set(config: RunConfig, base: Path) -> list[Fault]:
        return [
            Fault("there is no data set b", key="data.train.1.name", fix="did you mean a?"),
            Fault("record 3 is bad", key="data.train", file="b.jsonl", line=3),
            Fault("the schedule is wrong", key="optim.lr"),
        ]

    text = "model: demo\ndata:\n  train:\n  - a\n  - b\nlora: {rank: x}\noptim: {lr: y}\n"
    with pytest.raises(Faults) as caught:
        load(tmp_path, text, checks=[no_such_set])
    assert [(Path(fault.file).name, fault.line) for fault in caught.value.faults] == [
        ("sft.yaml", 5), ("sft.yaml", 6), ("sft.yaml", 7), ("b.jsonl", 3)
    ]  # fmt: skip
    assert caught.value.faults[0].source.strip() == "- b"


def test_differences_name_only_keys_that_change_results(tmp_path: Path) -> None:
    old = load(tmp_path, CANONICAL).config
    other = ["train.micro_batch=2", "data.packing=false", "train.recompute=full", "log.every=1", "checkpoint.keep=9"]
    other += ["output=x", "parallel.strategy=ddp", "train.eval_every=3", "data.workers=1"]
    same = load(tmp_path, CANONICAL, *other).config
    assert result_differences(old, same) == [] and config_hash(old) == config_hash(same)
    new = load(tmp_path, CANONICAL, "optim.lr=1e-4", "lora=null", "data.train=[a]").config
    found = {item.key: (item.old, item.new) for item in result_differences(old, new)}
    assert set(found) == {"optim.lr", "lora", "data.train"} and found["optim.lr"] == ("2.0e-05", "0.0001")
    assert found["lora"][1] == "null" and config_hash(old) != config_hash(new)


def test_two_spellings_of_one_batch_do_not_differ(tmp_path: Path) -> None:
    old, new = (load(tmp_path, SMALL, f"train.global_batch={text}").config for text in ("8k tokens", "8000 tokens"))
    assert result_differences(old, new) == [] and config_hash(old) == config_hash(new)


def test_every_execution_key_exists() -> None:
    names = [key.name for key in known_keys().values() if key.section is None]
    for key in EXECUTION_KEYS:
        assert any(is_execution_key(name) and name.startswith(key.rstrip("*")) for name in names), key


_TEXT = st.text(st.characters(blacklist_categories=("Cs",)), min_size=1, max_size=12).filter(lambda text: text.strip())
_WORD = st.text(string.ascii_lowercase + "0123456789_.$~-", min_size=1, max_size=8)
_NAME = st.one_of(
    _WORD, _TEXT, st.sampled_from(["no", "null", "2e-5", "~", "1_0", "${env:X}", "a: b", "# x", "007", "..."])
)
_SOURCE = st.one_of(
    _NAME, st.fixed_dictionaries({"name": _NAME}, optional={"max_samples": st.integers(1, 99) | st.none()})
)
_CONFIGS = st.fixed_dictionaries(
    {"model": _NAME, "data": st.fixed_dictionaries({"train": st.lists(_SOURCE, min_size=1, max_size=3)}, optional={
        "eval": st.floats(0, 0.99), "max_length": st.integers(8, 500), "packing": st.booleans()})},
    optional={
        "lora": st.fixed_dictionaries({}, optional={
            "rank": st.integers(1, 64), "alpha": st.floats(0.1, 64), "targets": st.lists(_NAME, min_size=1)}),
        "optim": st.fixed_dictionaries({}, optional={
            "lr": st.floats(1e-300, 1.0), "eps": st.floats(1e-30, 1.0), "clip": st.floats(0, 1e300),
            "schedule": st.sampled_from(["constant", "linear", "cosine"])}),
        "train": st.fixed_dictionaries({}, optional={
            "max_steps": st.none() | st.integers(1, 9), "seed": st.integers(0, 2**62),
            "global_batch": st.sampled_from([1, 16, "8k tokens", "9_000 tokens"])}),
        "checkpoint": st.fixed_dictionaries({}, optional={"every": st.sampled_from([5, "10min", "1 epoch", "5"])}),
        "log": st.fixed_dictionaries({}, optional={"to": st.sampled_from([[], ["tensorboard"]])}),
        "output": _NAME,
    },
)  # fmt: skip


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(raw=_CONFIGS)
def test_what_is_resolved_loads_equal(raw: dict[str, Any], tmp_path: Path) -> None:
    if check_rules(RunConfig.model_validate(raw)):
        return
    loaded = load(tmp_path, yaml_text(raw))
    again = load(tmp_path, resolved_yaml(loaded))
    assert again.config == loaded.config and config_hash(again.config) == config_hash(loaded.config)
    expected = RunConfig.model_validate(raw)
    assert loaded.config == expected.model_copy(update={"output": expected.output or "runs/sft"})


@settings(max_examples=200, deadline=None)
@given(value=st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | _NAME,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAME, inner, max_size=3),
))  # fmt: skip
def test_a_written_value_is_read_back_by_us_and_by_a_plain_yaml_reader(value: Any) -> None:
    from duoka.config.overlays import Layers, expand_env
    from duoka.config.yaml_lines import parse_yaml

    faults: list[Fault] = []
    tree = parse_yaml(f"k: {yaml_text(value)}\n", "x.yaml", faults)
    assert tree is not None and not faults, faults
    layers = Layers()
    assert expand_env(tree, layers).plain_value() == {"k": _unescaped_keys(value)} and not layers.faults
    assert yaml.safe_load(f"k: {yaml_text(value)}\n") == {"k": _as_written(value)}


def _unescaped_keys(value: Any) -> Any:
    """Keys are never filled in from the environment, so their escape stays."""
    if isinstance(value, dict):
        return {key.replace("${env:", "$${env:"): _unescaped_keys(item) for key, item in value.items()}
    return [_unescaped_keys(item) for item in value] if isinstance(value, list) else value


def _as_written(value: Any) -> Any:
    if isinstance(value, dict):
        return {_as_written(key): _as_written(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_as_written(item) for item in value]
    return value.replace("${env:", "$${env:") if isinstance(value, str) else value


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.text(st.sampled_from("model: demo\n\t-{}[]&*!|>'\"%@`#,?$env~\\x07abc012.é\r\ufeff"), max_size=60)
    | st.text()
)
def test_no_text_ends_in_a_traceback(text: str, tmp_path: Path) -> None:
    try:
        load(tmp_path, text.encode("utf-8", "surrogatepass"))
    except Faults as refused:
        assert refused.lines()
