"""`duoka explain`: a text for every key, code and topic in both languages, and the numbers of one's own config."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

import duoka.errors
from duoka.cli import BROKEN_PIPE, INTERRUPTED
from duoka.cli.explain import command
from duoka.config.catalog import known_keys
from duoka.errors import ConfigError, DuokaError
from duoka.explain.find import LANGUAGES, chinese_keys, codes, find_entry, topics, value_words
from duoka.explain.numbers import TOPICS

CHINESE = re.compile("[\u4e00-\u9fff]")
ASKED_FOR = (  # topics of the guides that must have a text, by words that people use
    "DP", "DDP", "zero", "zero3", "fsdp", "mixed precision", "gradient accumulation", "global batch", "lr scaling",
    "resume", "checkpoint", "torchrun", "multi-node", "connection refused", "port conflict", "oom", "no speedup",
    "gpu 0", "timeout", "different loss", "nccl", "eval", "lora", "packing", "gradient checkpointing", "rank",
    "pipeline", "moe", "mixture of experts", "混合专家",
    "swap", "NCCL_ALGO", "NCCL_DEBUG", "NCCL_P2P_DISABLE", "FORCE_TORCHRUN", "交换区",
    "数据并行", "显存不足", "学习率", "断点续训", "连接被拒绝", "端口占用", "卡住", "多机多卡", "混合精度",
)  # fmt: skip

TESTS = Path(__file__).parents[1]
GUIDE_ERRORS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("guide_errors.yaml").read_text("utf-8"))
SYMPTOMS = (  # of the guides' FAQ
    ("one card uses 5 GB more memory than the others", "One card holds more than the others"),
    ("主卡显存比其他卡高 5 GB", "One card holds more than the others"),
    ("Connection refused when starting", "Connection refused, or timed out"),
    ("训练速度慢 多卡没有加速", "Slow, or no faster with more devices"),
    ("training is slow on two cards", "Slow, or no faster with more devices"),
    ("CUDA out of memory", "Out of memory"),
    ("显存不足怎么办", "Out of memory"),
    ("RuntimeError: NCCL error: unhandled system error", "NCCL unhandled system error"),
    ("Address already in use", "Address already in use"),
    ("GPU 0 60 GB, GPU 1 30 GB", "One card holds more than the others"),
    ("every rank has a different loss", "Losses that differ between ranks"),
    ("各进程的损失不一样", "Losses that differ between ranks"),
    ("accuracy is above 1", "Evaluation on several processes"),
    ("resume from a checkpoint", "Saving and going on"),
    ("怎样断点续训", "Saving and going on"),
    ("the run hangs and waits", "A run that stands still"),
    ("训练卡住不动", "A run that stands still"),
)


def explain(*words: str, **env: str) -> str:
    result = CliRunner().invoke(command, words, env=env, standalone_mode=False)
    if result.exception:
        raise result.exception
    return result.output


def test_every_key_has_a_chinese_text_and_no_text_is_of_a_key_that_is_gone() -> None:
    missing = known_keys().keys() - chinese_keys().keys()
    assert not missing, f"write them into explain/texts/keys.zh.yaml: {sorted(missing)}"
    assert not chinese_keys().keys() - known_keys().keys()
    for name, text in chinese_keys().items():
        assert CHINESE.search(text), name
    for name in known_keys():
        for language in LANGUAGES:
            entry = find_entry(name, language)
            assert entry is not None and entry.text.strip() and entry.key == name


def test_what_a_value_must_be_is_said_in_chinese_too() -> None:
    for key in known_keys().values():
        words = value_words(key, "zh")
        left = re.sub(r'"[^"]*"|\[[^]]*\]|[A-Za-z0-9]*[0-9][A-Za-z0-9]*', " ", words)
        english = (
            set(re.findall("[A-Za-z]{2,}", left))
            - {part for one in key.choices for part in re.split("[_-]", one)}
            - {"auto", "never", "all", "true", "false"}
        )
        assert not english, f"{key.name}: {words}"
        assert key.example != "null", f"{key.name} has no example"
    assert value_words(known_keys()["lora.targets"], "en") == "all, or a list of names"


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("stage.ld_alpha", "a number of at least 0 and at most 1"),
        ("stage.label_smoothing", "a number of at least 0 and below 0.5"),
        ("rl.top_p", "a number above 0 and at most 1"),
        ("rl.tool_rounds", "a whole number of at least 1 and at most 1000"),
        ("data.train.share", "a number above 0 and below 1"),
    ],
)
def test_a_value_s_words_have_both_of_its_bounds_and_no_looser_one_beside_them(key: str, words: str) -> None:
    assert value_words(known_keys()[key], "en") == words


def test_every_code_and_every_kind_of_error_has_a_text_in_both_languages() -> None:
    kinds = [one for one in vars(duoka.errors).values() if isinstance(one, type) and issubclass(one, DuokaError)]
    wanted = {one.exit_code for one in kinds} | {0, INTERRUPTED, BROKEN_PIPE}
    assert {int(code) for code in codes()} == wanted
    for language in LANGUAGES:
        for one in kinds:
            entry = find_entry(one.__name__, language)
            assert entry is not None and str(one.exit_code) in entry.title, one
            assert find_entry(one.title, language) is not None, one.title
        for code in wanted:
            entry = find_entry(str(code), language)
            assert entry is not None and bool(CHINESE.search(entry.text)) == (language == "zh")


def test_every_topic_has_a_title_a_text_and_a_word_on_guides_in_both_languages() -> None:
    for name, topic in topics().items():
        for language in LANGUAGES:
            assert all(topic[language][part].strip() for part in ("title", "text", "wrong")), name
            assert language == "en" or CHINESE.search(topic[language]["text"]), name
            assert language == "zh" or not CHINESE.search(topic[language]["text"] + topic[language]["wrong"]), name
        assert topic.get("numbers", "batch") in TOPICS, name
    for word in ASKED_FOR:
        assert find_entry(word, "en") is not None, word


def test_words_of_a_message_and_a_log_lead_to_their_topic(tmp_path: Path) -> None:
    for text, title in (
        ("RuntimeError: CUDA out of memory. Tried to allocate", "Out of memory"),
        ("[Errno 111] Connection refused", "Connection refused, or timed out"),
        ("The server socket has failed to bind: errno: 98 - Address already in use", "Address already in use"),
        ("NCCL error: unhandled system error", "NCCL unhandled system error"),
        ("RuntimeError: Distributed package doesn't have NCCL built in", "A script asks for nccl, and there is none"),
    ):
        entry = find_entry(text, "en")
        assert entry is not None and entry.title == title, text
    log = tmp_path / "rank.log"
    log.write_text("fine\nNCCL WARN x\nConnection refused\nConnection refused\n", "utf-8")
    said = explain(str(log))
    assert "rank.log:2: NCCL WARN x" in said and said.count("Connection refused, or timed out") == 1


@pytest.mark.parametrize("name", GUIDE_ERRORS)
def test_what_guides_say_wrongly_is_found_by_its_words_and_put_right(name: str) -> None:
    row = GUIDE_ERRORS[name]
    for place, language in enumerate(LANGUAGES):
        entry, topic = find_entry(row["ask"][place], language), topics()[row["topic"]][language]
        assert entry is not None and entry.title == topic["title"], f"{row['ask'][place]}: {entry and entry.title}"
        said = " ".join(f"{entry.text} {entry.wrong}".split())
        for words in row["says"]:
            assert words.split("|")[place if "|" in words else 0] in said, f"{language}: {words}"
    for test in row["tests"]:
        file, _, function = test.partition("::")
        assert f"def {function}" in (TESTS / file).read_text("utf-8"), test


def test_all_58_errors_are_there_and_each_says_something() -> None:
    assert list(GUIDE_ERRORS) == [f"E-{number:02}" for number in range(1, 59)]
    assert all(row["says"] and len(row["ask"]) == 2 for row in GUIDE_ERRORS.values())


@pytest.mark.parametrize(("symptom", "title"), SYMPTOMS)
def test_a_symptom_in_ones_own_words_leads_to_its_topic(symptom: str, title: str) -> None:
    entry = find_entry(symptom, "en")
    assert entry is not None and entry.title == title, f"{symptom}: {entry and entry.title}"


def test_a_key_of_another_tool_and_a_key_of_ours_are_told_with_their_effect() -> None:
    for word in ("cutoff_len", "--cutoff_len", "--cutoff-len=512"):  # as command lines have it, too
        assert "implemented -> data.max_length" in explain(word, LANG="C")
    assert "拒绝" in explain("use_muon", "--lang", "zh") or "已实现" in explain("use_muon", "--lang", "zh")
    said = explain("optim.lr", LANG="C")
    assert "results depend on it" in said and "LLaMA-Factory: learning_rate" in said


def test_a_word_of_trls_configs_is_told_with_ours_or_with_why_there_is_none() -> None:
    assert "TRL: rl.advantage\n" in explain("scale_rewards", LANG="C")
    assert "there is no such key here" in explain("--sync_ref_model", LANG="C")
    assert "没有这样的键" in explain("sync_ref_model", "--lang", "zh")


def test_figures_of_guides_are_recomputed_in_both_languages() -> None:
    for language in LANGUAGES:
        text = topics()["slow"][language]["wrong"]
        for hours, faster in ((36, 36 / 9), (16, 16 / 2)):
            assert f"{hours} " in text and f"{faster:.1f}" in text, text
        assert "3.8" in text and f"{36 / 9:.1f}" != "3.8"
        fewer_tokens = (32 * 8) / (1 * 32)  # 32 micro-steps of 8 against one of 32: per GPU and step
        assert f"{fewer_tokens:g}" in text and "32" in text, text


def test_zeros_figure_is_computed_again() -> None:
    """2 + 2 + K bytes of 7.5 billion parameters on 64 ranks, K = 12."""
    number, ranks, state = 7.5e9, 64, 12
    stages = (2 + 2 + state, 2 + 2 + state / ranks, 2 + (2 + state) / ranks, (2 + 2 + state) / ranks)
    gigabytes = [f"{number * each / 1e9:.{digits}f}" for each, digits in zip(stages, (0, 1, 1, 1), strict=True)]
    for language, last in (("en", " and "), ("zh", "、")):
        text = " ".join(topics()["zero"][language]["text"].split())
        joined = ", ".join(gigabytes[:3]) + last + gigabytes[3] if language == "en" else last.join(gigabytes)
        assert joined in text, f"{joined} is not in: {text}"


def test_the_guides_pins_are_outside_our_ranges_and_what_is_installed_is_inside() -> None:
    from importlib.metadata import requires, version

    from packaging.requirements import Requirement

    ranges = {one.name: one.specifier for one in map(Requirement, requires("duoka") or ()) if one.marker is None}
    for name, pinned in (("transformers", "4.35.2"), ("peft", "0.6.2"), ("torch", "2.1.0")):
        assert not ranges[name].contains(pinned) and ranges[name].contains(version(name), prereleases=True), name


def test_the_language_is_that_of_the_environment_unless_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LC_ALL", "LC_MESSAGES", "LANG"):
        monkeypatch.delenv(name, raising=False)
    assert CHINESE.search(explain("zero", LANG="zh_CN.UTF-8")) and not CHINESE.search(explain("zero", LANG="en_US"))
    assert not CHINESE.search(explain("zero", "--lang", "en", LANG="zh_CN.UTF-8"))
    assert not CHINESE.search(explain("zero", LANG="zh_CN.UTF-8", LC_ALL="C"))
    assert "resume" in explain() and "Exit code 5" in explain()


def test_the_numbers_of_ones_own_config_stand_below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text("model: demo\ndata: {train: [identity]}\noptim: {lr: 1e-4}\n", "utf-8")
    said = {name: explain(name, "--config", "x.yaml", "--nproc", "4", "--lang", "en") for name in topics()}
    assert "134.5M parameters" in said["zero"] and "(4Pt + 4Pt + 8Pt)/N" in said["zero"]
    assert "sqrt 0.000141, linear 0.0002" in said["lr-scaling"]
    assert "16 samples per step = 4 ranks" in said["batch-size"]
    assert "each sends 2 x 3/4" in said["communication"]
    # 16P + A = 18P + A/2 at A = 4P, of 134,515,008 parameters.
    assert "activations in fp32 exceed 4 bytes for each of them, 513 MiB" in said["precision"]
    assert "lora: Train low-rank adapters" in said["lora"] and "this config trains in full" in said["lora"]
    assert "optim.lr: 0.0001   (x.yaml:3)" in explain("optim.lr", "--config", "x.yaml", "--lang", "en")
    for name, topic in topics().items():
        assert ("In x.yaml" in said[name]) == ("numbers" in topic), name
    assert "在 x.yaml 中" in explain("zero", "--config", "x.yaml", "--lang", "zh")


def test_a_secret_of_ones_own_config_is_shown_as_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOOK_TOKEN", "hunter2-of-the-environment")
    text = "model: demo\ndata: {train: [identity]}\nlog: {alert: {webhook: '${env:HOOK_TOKEN}'}}\n"
    Path("x.yaml").write_text(text, "utf-8")
    said = explain("log.alert.webhook", "--config", "x.yaml", "--lang", "en")
    assert "hunter2" not in said and "${env:HOOK_TOKEN}" in said, said


def test_the_numbers_are_of_the_plan_with_what_was_measured_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a slow cable `duoka plan` takes more at once, and explain spoke of a machine that nobody had measured."""
    import json

    from duoka.plan import hardware
    from duoka.plan.catalog import hardware_key

    machine = hardware.Machine(4, 64 << 30, 48 << 30)
    monkeypatch.setattr(hardware, "read_machine", lambda: machine)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DUOKA_HARDWARE", "hardware.json")
    text = "model: demo\ndata: {train: [identity], max_length: 512}\nparallel: {strategy: fsdp}\n"
    Path("x.yaml").write_text(text + "train: {global_batch: 64k tokens, max_steps: 3}\n", "utf-8")
    said = []
    for speed in (1e7, 1e12):
        measured = {"device": hardware_key(machine), "link_bytes_per_s": speed, "half_flops": 1e11}
        Path("hardware.json").write_text(json.dumps(measured | {"fp32_flops": 1e11}), "utf-8")
        said.append(explain("batch-size", "--config", "x.yaml", "--nproc", "2", "--lang", "en"))
    assert "16 micro-batches of up to 2,048 tokens" in said[1] and "2 micro-batches of up to 16,384 tokens" in said[0]


def test_what_nobody_knows_gets_the_nearest_word() -> None:
    with pytest.raises(ConfigError, match="nothing to explain") as caught:
        explain("optim.warmpu")
    assert caught.value.fix == "did you mean optim.warmup?"
