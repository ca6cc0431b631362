"""lm-evaluation-harness through its local-completions, against `duoka serve`: the numbers are those in process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from serving import KEY, address_of, serving
from tiny import write_tiny_model

pytestmark = [pytest.mark.web, pytest.mark.timeout(400)]
TASK = """
task: letters
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_target: answer
doc_to_choice: "{{choices}}"
metric_list:
  - {metric: acc}
  - {metric: acc_norm}
"""
# The harness in a process of its own: it changes what other packages do.
CODE = """
import json, sys
import lm_eval
from lm_eval.tasks import TaskManager
tasks, what, arguments = sys.argv[1:]
if what == "in-process":
    import duoka.evals
    model, arguments = duoka.evals.lm_eval_model(arguments), None
else:
    model, arguments = "local-completions", json.loads(arguments)
found = lm_eval.simple_evaluate(model=model, model_args=arguments, tasks=["letters"], num_fewshot=0,
    task_manager=TaskManager(include_path=tasks, include_defaults=False), bootstrap_iters=0)
rows = sorted(found["samples"]["letters"], key=lambda one: one["doc_id"])
scores = {key: value for key, value in found["results"]["letters"].items() if isinstance(value, float)}
print("FOUND" + json.dumps({"scores": scores, "logps": [[one[0] for one in row["filtered_resps"]] for row in rows]}))
"""


def evaluate(tasks: Path, what: str, arguments: str) -> dict[str, Any]:
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tasks / "home"), "OPENAI_API_KEY": KEY}
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(tasks), what, arguments], capture_output=True, text=True, timeout=300, env=env,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND")]
    assert done.returncode == 0 and lines, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(lines[0][5:])
    return found


def test_the_harness_finds_the_same_through_http_and_in_process(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason='pip install "duoka[lm-eval]" aiohttp tenacity tiktoken')
    for package in ("aiohttp", "tenacity", "tiktoken"):
        pytest.importorskip(package, reason="the harness asks servers with it: pip install 'lm-eval[api]'")
    model = write_tiny_model(tmp_path / "model", layers=2)
    rows = [
        {"question": f"Which letter is number {number}?", "choices": list("abcd"), "answer": number % 4}
        for number in range(12)
    ]
    (tmp_path / "tasks").mkdir()
    data = tmp_path / "tasks" / "test.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (tmp_path / "tasks" / "letters.yaml").write_text(TASK % data, encoding="utf-8")
    here = evaluate(tmp_path / "tasks", "in-process", str(model))
    with serving(model) as server:
        there = evaluate(
            tmp_path / "tasks", "served",
            json.dumps({
                "base_url": f"{address_of(server)}/v1/completions", "model": "model", "tokenizer": str(model),
                "tokenizer_backend": "huggingface", "num_concurrent": 3, "max_retries": 1, "batch_size": 2,
            }),
        )  # fmt: skip
    assert there["scores"] == here["scores"] and len(here["scores"]) == 2
    for mine, theirs in zip(here["logps"], there["logps"], strict=True):
        assert theirs == pytest.approx(mine, abs=1e-4) and len(set(mine)) == 4
