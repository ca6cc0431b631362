"""`make gpu-check` where no GPU is: what it runs exists and says so, and its cases are rehearsed with tiny models.

What it measures of a card first runs on the fake GPU (test_gpu_budgets.py); the bodies of tests/gpu that take a device
run on the CPU in every suite.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STEP = {"num_tokens": 256, "data_s": 0.1, "forward_s": 0.2, "backward_s": 0.4, "optimizer_s": 0.1}


def recipe():
    """The commands of the target, as make would run them."""
    lines = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\ngpu-check:")[2].splitlines()[1:]
    return [line.strip().lstrip("@") for line in lines[: next(at for at, line in enumerate(lines) if not line)]]


@pytest.fixture
def series(monkeypatch):
    """benchmarks/gpu.py as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location("gpu_series", ROOT / "benchmarks" / "gpu.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_series", module)
    spec.loader.exec_module(module)
    return module


def test_its_two_parts_are_there(series, monkeypatch, capsys, tmp_path):
    """Without a GPU the second says that nothing is measured, and writes nothing."""
    promises, table = recipe()
    assert promises.startswith("DUOKA_TEST_GPUS=1 ") and promises.endswith(" -m pytest tests/gpu")
    assert len(list((ROOT / "tests" / "gpu").glob("test_*.py"))) >= 3
    script, *options = re.split(r"\s+", table.partition("python ")[2])
    assert (ROOT / script).samefile(series.__file__)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [script, *options])
    monkeypatch.setattr(series, "measure_card", lambda: {"name": "no GPU", "product_flops": None})
    series.main()
    assert "nothing is measured" in capsys.readouterr().out and not any(tmp_path.iterdir())


def test_what_a_case_wrote_becomes_a_row(series, tmp_path):
    run = tmp_path / "run"
    (run / "events").mkdir(parents=True)
    plan = {
        "layout": {"micro": "4096 tokens", "recompute": "1/2", "compile": True}, "batch": {"sentence": ""},
        "speed": {"tokens_per_s": 900.0}, "compute": {"flops_per_token": 6e9, "peak_flops": 1e15},
        "memory": {"peak_bytes": 5 * 2**30, "parts": {"framework": 2**30}},
    }  # fmt: skip
    (run / "plan.json").write_text(json.dumps(plan))
    steps = [{"type": "step", "t": 10.0 + 2 * place, "loss": 3.0 - place / 10, **STEP} for place in range(6)]
    lines = [{"type": "run", "t": 1.0}, *steps]
    (run / "events" / "run.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "events" / "rank00000.jsonl").write_text('{"memory_bytes": 3221225472}\n')
    found = series.read_run(run, 6)
    assert found["tokens_per_s"] == pytest.approx(2 * 256 / 4.0) and found["first_step_s"] == 9.0
    card = {"name": "a card", "product_flops": 5e14, "copy_bytes_per_s": 2e12, "torch": "2", "cuda": "13"}
    text = series.table({"card": card, "cases": {"full": found, "large": {"error": ["no memory", "exit 4"]}}})
    assert "| full | 4096 tokens, recompute 1/2, compiled | 128 | 900 | 0.1% | 0.2% | 3.00 | 4.00 |" in text
    assert "| large | not measured: exit 4 |" in text and "500 TFLOP/s" in text


def test_what_the_minutes_do_not_reach_is_said(series, monkeypatch, capsys, tmp_path):
    """And what an earlier part of the series measured stays."""
    files = {name: tmp_path / f"gpu.{name}" for name in ("json", "md")}
    files["json"].write_text(json.dumps({"cases": {"lora-8b": {"error": ["exit 4"]}}}))
    monkeypatch.setattr(series, "measure_card", lambda: {"name": "a card", "product_flops": None})
    monkeypatch.setattr(series, "read_documents", lambda size: ["a text"])
    options = ["--tiny", "--minutes", "0.5", "--out", str(files["json"]), "--table", str(files["md"])]
    monkeypatch.setattr(sys, "argv", ["gpu.py", *options])
    series.main()
    cases = json.loads(files["json"].read_text())["cases"]
    assert cases.keys() == series.CASES.keys() and cases["lora-8b"]["error"] == ["exit 4"]
    assert "| full-1b | not measured: the 0.5 minutes were spent |" in files["md"].read_text()
    assert "the 0.5 minutes were spent" in capsys.readouterr().out


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_every_case_is_rehearsed_with_a_tiny_model(tmp_path):
    out = tmp_path / "gpu.json"
    done = subprocess.run(
        [
            sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--tiny", "--out", str(out),
            "--table", str(tmp_path / "gpu.md"), "--logs", str(tmp_path / "logs"), "--limit", "300",
        ],
        capture_output=True, text=True, timeout=850, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    cases = json.loads(out.read_text())["cases"]
    assert len(cases) >= 8 and not {name: one["error"] for name, one in cases.items() if "error" in one}
    assert {cases["full-1b-recompute"]["layout"]["recompute"], cases["full-1b"]["layout"]["recompute"]} == {
        "full", "none",
    }  # fmt: skip
