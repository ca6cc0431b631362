"""`--nproc auto`: how many processes share a CPU's cores, by what was measured of threads and of exchanges."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from duoka.cli import plan as plan_cli
from duoka.cli import train as train_cli
from duoka.config.load import load_config
from duoka.errors import ConfigError
from duoka.plan import catalog, hardware
from duoka.plan.catalog import hardware_key
from duoka.plan.hardware import Gpu, Machine
from duoka.plan.processes import choose_processes, divisions
from duoka.plan.shape import DEMO_FACTS, shape_from_config

GIB = 2**30
SHAPE = shape_from_config(dict(DEMO_FACTS))
EIGHT = Machine(8, 64 * GIB, 64 * GIB)


def config_of(folder: Path, **train):
    path = folder / "run.yaml"
    train = {"global_batch": 64, "precision": "fp32", "micro_batch": "2048 tokens"} | train
    path.write_text(json.dumps({"model": "demo", "data": {"train": ["identity"], "max_length": 512}, "train": train}))
    return load_config(str(path)).config


def measured(machine=EIGHT, *, threads, link=5e9):
    """What `duoka bench hardware` would have written: threads keep that share of their speed, links are so fast."""
    return {
        "device": hardware_key(machine), "fp32_flops": 4e11, "memory_bytes_per_s": 5e10, "threads_share": threads,
        "link_bytes_per_s": link, "link_latency_s": 1e-4,
    }  # fmt: skip


def test_threads_that_lose_nothing_stay_in_one_process(tmp_path):
    found = choose_processes(config_of(tmp_path), SHAPE, EIGHT, measured=measured(threads=1.0))
    assert found.count == 1
    assert found.why.startswith("1 process of 8 threads: ")


def test_where_threads_lose_processes_take_over(tmp_path):
    found = choose_processes(config_of(tmp_path), SHAPE, EIGHT, measured=measured(threads=0.5))
    assert found.count == 8
    assert found.why.startswith("8 processes of 1 thread: ")
    assert "1 process of 8 threads: " in found.why


def test_a_slow_exchange_keeps_them_together(tmp_path):
    """The same threads: gradients that take longer than what threads lose."""
    assert choose_processes(config_of(tmp_path), SHAPE, EIGHT, measured=measured(threads=0.5, link=1e6)).count == 1


def test_the_number_is_that_of_the_fastest_plan(tmp_path):
    config = config_of(tmp_path)
    for share in (0.95, 0.85, 0.7):
        own = measured(threads=share)
        found = {one.num_processes: one.tokens_per_s for one in divisions(config, SHAPE, EIGHT, measured=own)}
        assert sorted(found) == [1, 2, 4, 8]
        chosen = choose_processes(config, SHAPE, EIGHT, measured=own).count
        assert found[chosen] * 1.03 >= max(found.values())
        assert all(rate * 1.03 < max(found.values()) for count, rate in found.items() if count < chosen)


def test_what_does_not_fit_is_no_answer(tmp_path):
    small, tiny = (Machine(8, 64 * GIB, size) for size in (3 * GIB, GIB))
    own = measured(small, threads=0.5)
    counts = [one.num_processes for one in divisions(config_of(tmp_path), SHAPE, small, measured=own)]
    assert counts == [1]
    found = choose_processes(config_of(tmp_path), SHAPE, tiny, measured=own)
    assert (found.count, found.why) == (1, "this run fits no number of processes here, and one will say why")


@pytest.mark.parametrize(("batch", "most"), [(1, 1), (2, 2), (5, 8)])
def test_ranks_without_a_sample_bring_nothing(tmp_path, batch, most):
    """8 ranks get through 5 samples in the time of one each; 4 in that of two."""
    config = config_of(tmp_path, global_batch=batch)
    found = divisions(config, SHAPE, EIGHT, measured=measured(threads=0.5, link=1e12))
    assert max(found, key=lambda one: one.tokens_per_s).num_processes == most


def test_threads_that_are_set_stay(tmp_path):
    """OMP_NUM_THREADS=4: two processes use the eight cores, one leaves four idle."""
    four = Machine(8, 64 * GIB, 64 * GIB, threads_per_rank=4)
    found = choose_processes(config_of(tmp_path), SHAPE, four, measured=measured(four, threads=1.0))
    assert found.count == 2
    assert "(1 process of 4 threads: " in found.why


def test_cores_are_shared_evenly(tmp_path):
    """Four processes on six cores would leave two of them idle."""
    six = Machine(6, 64 * GIB, 64 * GIB)
    found = divisions(config_of(tmp_path), SHAPE, six, measured=measured(six, threads=0.5))
    assert [(one.num_processes, one.num_threads) for one in found] == [(1, 6), (2, 3), (3, 2), (6, 1)]


def test_gpus_have_a_process_each(tmp_path):
    gpus = tuple(Gpu("NVIDIA H100 80GB HBM3", 80 * GIB, 79 * GIB, 9.0) for _ in range(3))
    assert choose_processes(config_of(tmp_path), SHAPE, Machine(8, 64 * GIB, 64 * GIB, gpus=gpus)).count == 3


def test_what_was_not_measured_is_said(tmp_path):
    found = choose_processes(config_of(tmp_path), SHAPE, EIGHT)
    assert "duoka bench hardware" in found.why
    assert "duoka bench hardware" not in choose_processes(
        config_of(tmp_path), SHAPE, EIGHT, measured=measured(threads=0.9)
    ).why  # fmt: skip


@pytest.fixture
def slow_threads(monkeypatch, tmp_path):
    monkeypatch.setattr(hardware, "read_machine", lambda: EIGHT)
    monkeypatch.setattr(catalog, "read_hardware", lambda: measured(threads=0.5))
    config_of(tmp_path)
    return tmp_path / "run.yaml"


def run(command, *words):
    return CliRunner().invoke(command, [str(word) for word in words], standalone_mode=False)


def test_plan_takes_auto_and_says_why(slow_threads):
    result = run(plan_cli.command, slow_threads, "--nproc", "auto")
    assert "note: --nproc auto: 8 processes of 1 thread: " in result.output
    assert "ddp8" in result.output


def test_plan_hints_where_nobody_asked(slow_threads):
    assert "--nproc 8 would be faster here: 8 processes of 1 thread: " in run(plan_cli.command, slow_threads).output
    assert "would be faster" not in run(plan_cli.command, slow_threads, "--nproc", "4").output


def test_train_takes_auto(slow_threads):
    result = run(train_cli.command, slow_threads, "--nproc", "auto", "--dry-run")
    assert result.return_value == 0, result.exception
    assert "note: --nproc auto: 8 processes" in result.output
    assert "ddp8" in result.output


@pytest.mark.parametrize("flags", [["--hosts", "a,b"], ["--slurm", "nodes=2"], ["--nodes", "2", "--meet", "a:29500"]])
def test_auto_is_for_one_machine(slow_threads, flags):
    error = run(train_cli.command, slow_threads, "--nproc", "auto", *flags).exception
    assert isinstance(error, ConfigError)
    assert flags[0] in error.what
    assert "--nproc 8" in (error.fix or "")


def test_auto_is_for_one_machine_by_hand_too(slow_threads, monkeypatch):
    monkeypatch.setenv("NNODES", "2")
    error = run(train_cli.command, slow_threads, "--nproc", "auto").exception
    assert isinstance(error, ConfigError)
    assert "NNODES" in error.what


def test_other_words_are_refused(slow_threads):
    assert "neither a number of processes nor auto" in str(
        run(plan_cli.command, slow_threads, "--nproc", "x").exception
    )
