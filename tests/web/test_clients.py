"""Other projects' clients, unchanged, against the server: each in an environment of its own (`make clients`).

OpenAI's own Python client is in tests/unit/test_serve_clients.py.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import KEY, address_of, serving
from talking import ASKS_WEATHER, CALL, SUNNY, WEATHER, write_talking_model

from duoka.serve.api.server import Server

pytestmark = pytest.mark.web
HERE = Path(__file__).parent / "clients"
CLIENTS = Path(os.environ.get("DUOKA_CLIENTS", Path(sys.prefix) / "clients"))
DUOKA = "I am duoka 多卡 🎉."


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(write_talking_model(tmp_path_factory.mktemp("model") / "talking")) as made:
        yield made


@pytest.fixture
def told(server: Server, tmp_path: Path) -> Callable[..., Any]:
    """What a client's script prints as its last line."""

    def run(*command: object, needs: Path, cwd: Path = tmp_path) -> Any:
        if not needs.exists():
            pytest.skip("other projects' clients are not installed: make clients")
        given = [address_of(server), KEY, json.dumps(ASKS_WEATHER), json.dumps(WEATHER)]
        env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "OPENAI"))}
        env |= {"HOME": str(tmp_path), "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false"}
        done = subprocess.run(
            [*map(str, command), *given], cwd=cwd, env=env, capture_output=True, text=True, timeout=150
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run


def check(found: dict[str, Any]) -> None:
    assert found["text"] == found["streamed"] == DUOKA
    assert found["usage"] == found["streamed_usage"] > 30
    assert found["call"] == ["tool_calls", "weather"] and found["arguments"] == CALL["arguments"]
    assert found["width"] == 64


def test_litellm(told: Callable[..., Any]) -> None:
    found = told(CLIENTS / "bin/python", HERE / "with_litellm.py", needs=CLIENTS / "bin/python")
    check(found)
    assert found["later"] == DUOKA and found["refused"]


def test_langchain(told: Callable[..., Any]) -> None:
    found = told(CLIENTS / "bin/python", HERE / "with_langchain.py", needs=CLIENTS / "bin/python")
    check(found)
    assert found["spoken"] == SUNNY and found["scored"] > 20


def test_openai_for_node(told: Callable[..., Any], server: Server, tmp_path: Path) -> None:
    modules = CLIENTS / "node_modules"
    if not shutil.which("node"):
        pytest.skip("there is no node here")
    script = tmp_path / "with_openai.mjs"
    shutil.copy(HERE / "with_openai.mjs", script)
    (tmp_path / "node_modules").symlink_to(modules)
    found = told("node", script, needs=modules / "openai")
    check(found)
    assert found["later"] == DUOKA and found["apart"] < 1e-6
    assert found["refused"] == [404, "model_not_found"]
    assert server.service.scheduler.num_active == 0, "an aborted stream computes no more"


def test_the_command_llm(server: Server, tmp_path: Path) -> None:
    """In pieces, as it asks by itself, with the usage it writes to its log, and a tool of its own."""
    llm = CLIENTS / "bin/llm"
    if not llm.exists():
        pytest.skip("other projects' clients are not installed: make clients")
    known = {"model_id": "duoka", "model_name": "talking", "api_base": f"{address_of(server)}/v1"}
    known |= {"api_key_name": "duoka", "supports_tools": True}
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([known]))
    (tmp_path / "tools.py").write_text('def weather(city: str) -> str:\n    "Of a city."\n    return "sunny"\n')

    def ask(*words: str) -> str:
        env = {**os.environ, "LLM_USER_PATH": str(tmp_path), "PYTHONPATH": ""}
        command = [str(llm), *words]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, stdin=subprocess.DEVNULL)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout.strip()

    how = ("-m", "duoka", "--key", KEY, "-o", "temperature", "0")
    assert ask(*how, "Who are you?") == DUOKA
    assert ask(*how, "--no-stream", "你好") == "你好！我是多卡 🚀。"
    assert ask(*how, "--functions", str(tmp_path / "tools.py"), ASKS_WEATHER).endswith(SUNNY)
    assert json.loads(ask("logs", "-n", "1", "--json"))[0]["output_tokens"] > 10
