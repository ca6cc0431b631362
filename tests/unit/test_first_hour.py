"""What somebody meets in the first hour: `duoka new`, `duoka env`, `duoka demo` up to where the training begins."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import duoka
from duoka import cli as frame
from duoka.cli import demo
from duoka.cluster.bug_report import fact_lines, read_commit_of_code, read_facts
from duoka.config.first import METHODS, first_yaml
from duoka.config.load import load_config
from duoka.hub.demo_model import INSTALL

ANSWERS = ["--data", "identity", "--method", "lora", "--model", "demo", "--max-length", "512", "--on", "1xRTX4090"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*words: str) -> int:
    return frame.run(list(words))


# --- duoka new ---


def test_flags_write_a_yaml_and_the_plan_says_whether_it_fits(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("new", "mine.yaml", *ANSWERS) == 0
    out = capsys.readouterr().out
    assert "wrote mine.yaml" in out and "verdict  fits" in out and 'duoka plan mine.yaml --on "1xRTX4090"' in out
    assert len(out.splitlines()) <= 12
    config = load_config(here / "mine.yaml").config
    assert config.data.max_length == 512 and config.lora is not None and config.output == "runs/mine"


@pytest.mark.parametrize("page", ["finetune.md", "finetune.zh-CN.md"])
def test_the_page_shows_the_file_that_is_written_whole(page: str) -> None:
    text = (Path(__file__).parents[2] / "docs" / "howto" / page).read_text(encoding="utf-8")
    written = first_yaml("demo", ["mine.jsonl"], "lora", 1024, "mine.yaml")
    assert f"```yaml\n{written}```\n" in text


def test_what_would_not_fit_is_written_and_ends_with_4(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "large").mkdir()
    facts = {"model_type": "llama", "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
             "intermediate_size": 28672, "vocab_size": 128256, "num_key_value_heads": 8}  # fmt: skip
    (here / "large" / "config.json").write_text(json.dumps(facts))
    words = ["new", "big.yaml", *ANSWERS, "--model", "large", "--method", "full"]
    assert run(*words) == 4
    assert "verdict  does not fit" in capsys.readouterr().out and (here / "big.yaml").is_file()


def test_without_a_terminal_what_no_flag_answers_is_said(here: Path) -> None:
    command = [sys.executable, "-m", "duoka", "new", "mine.yaml", "--on", "1xRTX4090"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for name, value in (("data", "identity"), ("method", "lora"), ("model", "demo"), ("max-length", "1024")):
        assert f"--{name} is not given: {value}" in done.stdout
    assert "--on is not given" not in done.stdout


def test_a_terminal_is_asked_what_no_flag_answers(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = iter(["identity", "wrong", "full", "demo", "7", "256", "1xRTX4090"])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("click.termui.visible_prompt_func", lambda text: print(text) or next(typed))
    assert run("new", "mine.yaml") == 0
    assert next(typed, None) is None, "an answer was not asked for"
    out = capsys.readouterr().out
    assert "1/5" in out and "5/5" in out and "qlora" in out
    config = load_config(here / "mine.yaml").config
    assert config.lora is None and config.data.max_length == 256


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["there.yaml"], "there.yaml exists already, and new overwrites nothing"),
        (["folder"], "folder is a folder"),
        (["mine"], "write:   duoka new mine.yaml"),
    ],
)
def test_a_name_that_cannot_be_written_is_refused(
    words: list[str], said: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "there.yaml").write_text("model: demo\n")
    (here / "folder").mkdir()
    assert run("new", *words, *ANSWERS) == 2
    assert said in capsys.readouterr().err
    assert (here / "there.yaml").read_text() == "model: demo\n" and not (here / "mine").exists()


def test_data_that_is_not_there_is_named_with_its_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("new", "mine.yaml", *ANSWERS, "--data", "none.jsonl") == 2
    err = capsys.readouterr().err
    assert "there is no file 'none.jsonl'" in err and "mine.yaml, line 5" in err


@pytest.mark.parametrize("method", METHODS)
def test_each_method_writes_what_the_schema_takes(method: str, here: Path) -> None:
    (here / "x.yaml").write_text(first_yaml("demo", ["identity"], method, 256, "x.yaml"))
    loaded = load_config(here / "x.yaml")
    assert not loaded.notes
    assert (loaded.config.model.quantization == "nf4") == (method == "qlora")
    assert (loaded.config.lora is None) == (method == "full")


# --- duoka env ---


def test_env_says_what_a_report_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("env", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["duoka"]["version"] == duoka.__version__ and facts["packages"]["torch"]
    assert facts["cpu"]["num_usable_cores"] >= 1 and facts["threads"]["OMP_NUM_THREADS"]
    assert run("env") == 0
    lines = capsys.readouterr().out.splitlines()
    named = {line.split()[0] for line in lines}
    assert {"duoka", "python", "torch", "cpu", "memory", "threads", "allocator", "gpu", "cuda"} <= named


def test_env_tells_no_secret_and_no_name(tmp_path: Path) -> None:
    home = "/home/somebody"
    env = {
        "HF_TOKEN": "hf_abcdef", "HTTPS_PROXY": "http://me:pw@proxy:80", "HOME": home, "HF_HOME": f"{home}/hf",
        "SLURM_JOB_USER": "somebody", "SLURM_JOB_NODELIST": "gpu-of-us", "OMP_NUM_THREADS": "3",
    }  # fmt: skip
    facts = read_facts(env, tmp_path)
    text = json.dumps(facts) + "\n".join(fact_lines(facts))
    for private in ("hf_abcdef", "me:pw", "somebody", "gpu-of-us"):
        assert private not in text, private
    assert facts["environment"]["HF_HOME"] == "~/hf" and "OMP_NUM_THREADS=3" in text


def test_an_installed_package_has_no_commit_though_it_lies_in_a_repository(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    package = tmp_path / ".venv" / "duoka"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    assert read_commit_of_code(package) is None


# --- duoka demo ---


def test_the_demo_writes_its_yaml_beside_the_run_and_over_nothing(here: Path) -> None:
    run_folder = demo.free_folder(Path("runs"))
    config = demo.write_config(run_folder)
    assert config == Path("runs/demo.yaml") and not load_config(config).notes
    config.write_text("mine")
    again = demo.free_folder(Path("runs"))
    assert again == Path("runs/demo-2") and demo.write_config(again) == Path("runs/demo-2.yaml")
    assert config.read_text() == "mine"


def test_the_demo_types_commands_that_there_are(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    typed: list[tuple[str, ...]] = []

    def duoka(*words: str, questions: tuple[str, ...] = (), read: bool = False) -> str:
        typed.append(words)
        name = "duoka" if words[1] != "demo" else "SmolLM"
        if words[0] == "chat":
            return "\n".join(json.dumps({"prompt": one, "answer": f"I am {name}."}) for one in questions)
        return json.dumps({"loss": 1.0, "perplexity": 2.7, "accuracy": 0.5, "num_samples": 12}) if read else ""

    monkeypatch.setattr("duoka.cli.demo.duoka", duoka)
    assert run("demo", "--nproc", "1") == 0
    assert [words[0] for words in typed] == ["chat", "train", "eval", "eval", "export", "chat"]
    for words in typed:
        command = frame.cli.get_command(None, words[0])  # type: ignore[attr-defined]
        command.make_context(words[0], list(words[1:]), resilient_parsing=False)


def test_a_demo_without_its_wheels_says_what_to_type(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("duoka.hub.models.missing_packages", lambda: ["gguf"])
    (here / "x.yaml").write_text("model: demo\ndata: {train: [identity]}\n")
    assert run("train", "x.yaml", "--dry-run") == 2
    err = capsys.readouterr().err
    assert "model.name: demo needs what is not installed: gguf" in err and INSTALL in err
