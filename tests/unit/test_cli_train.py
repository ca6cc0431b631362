"""`duoka train` before any process starts: run folders, refusals, the dry run; and a rank's own end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from data_kit import write_ten_thousand

from duoka import cli as frame
from duoka.cli import work as ranks_command
from duoka.cluster.join import RefusedElsewhere, follow, lead
from duoka.cluster.launcher import Spec
from duoka.cluster.restart import LocalLauncher
from duoka.cluster.run_lock import check_claim, find_run_folder, hold_run
from duoka.cluster.verdict import Verdict, stopped
from duoka.config.load import load_config, resolved_yaml
from duoka.data.prepare import prepare_data
from duoka.errors import ConfigError, DuokaError, StorageError, WorkerFailed
from duoka.runs.events import EventWriter, global_log
from duoka.runs.failure import read_failures
from duoka.runs.folder import RunFolder
from duoka.runs.status import Status, leader_identity, read_status, write_status
from duoka.watch.report import end_lines

YAML = """
model: {model}
data: {{train: [identity], max_length: 128}}
optim: {{lr: 1e-3}}
train: {{epochs: 1, global_batch: 16}}
output: {output}
"""


@pytest.fixture
def home(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sft.yaml").write_text(YAML.format(model=tiny_model, output="runs/sft"), encoding="utf-8")
    return tmp_path


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Spec]:
    """Worlds that would have been started."""
    specs: list[Spec] = []

    def start(launcher: LocalLauncher, spec: Spec, say: object) -> Verdict:
        specs.append(spec)
        return stopped("stopped by a test")

    monkeypatch.setattr(LocalLauncher, "start", start)
    return specs


def make_run(home: Path, *overrides: str, step: int = 3) -> RunFolder:
    """A run that has made some steps."""
    loaded = load_config("sft.yaml", overrides)
    run = RunFolder(Path("runs/sft"))
    run.make()
    run.config.write_text(resolved_yaml(loaded), encoding="utf-8")
    log = EventWriter(global_log(run))
    for number in range(1, step + 1):
        log.write("step", step=number, loss=1.0)
    log.close()
    return run


def test_a_new_run_is_prepared_and_one_world_is_started(home: Path, started: list[Spec]) -> None:
    assert frame.run(["train", "sft.yaml", "--nproc", "2", "optim.lr=2e-3"]) == 75
    (spec,) = started
    assert spec.num_processes == 2 and spec.command[-2:] == ("train", str((home / "runs/sft/config.yaml").resolve()))
    assert spec.identity["optim.lr"] == "0.002", "another machine that differs is told which keys"
    stored = load_config("runs/sft/config.yaml")
    assert stored.config.optim.lr == 2e-3, "what ranks read is what the command line said"
    assert json.loads((home / "runs/sft/plan.json").read_text())["layout"]
    assert json.loads((home / "runs/sft/env.json").read_text())["packages"]["torch"]


def test_a_dry_run_checks_and_prints_the_plan_and_writes_nothing(
    home: Path, started: list[Spec], capsys: pytest.CaptureFixture[str]
) -> None:
    assert frame.run(["train", "sft.yaml", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "no fault" in out and "a new run" in out and "peak" in out
    assert started == [] and sorted(path.name for path in home.iterdir()) == ["sft.yaml"]


def test_all_faults_are_told_at_once_and_nothing_starts(
    home: Path, started: list[Spec], capsys: pytest.CaptureFixture[str]
) -> None:
    text = (home / "sft.yaml").read_text().replace("identity", "identiti")
    (home / "sft.yaml").write_text(text.replace("epochs", "epoks") + "parallel: {strategy: single}\n")
    assert frame.run(["train", "sft.yaml", "--nproc", "2"]) == 2
    err = capsys.readouterr().err
    for word in ("identiti", "epoks", "strategy is single"):
        assert word in err, err
    assert started == [] and not (home / "runs").exists()


@pytest.fixture(scope="module")
def ten_thousand(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ten_thousand(tmp_path_factory.mktemp("many") / "many.jsonl")


@pytest.mark.parametrize("nproc", ["1", "2"])
def test_one_wrong_record_in_10_000_is_refused_before_anything_starts(
    home: Path, started: list[Spec], capsys: pytest.CaptureFixture[str], ten_thousand: Path, nproc: str
) -> None:
    assert frame.run(["train", "sft.yaml", "--nproc", nproc, f"data.train=[{ten_thousand}]"]) == 2
    err = capsys.readouterr().err
    assert f"{ten_thousand}, line 7655" in err and "no whole JSON value" in err and "cut short" in err
    assert started == [] and not (home / "runs/sft/config.yaml").exists()


def test_one_wrong_record_in_10_000_is_skipped_counted_and_listed_the_same_for_any_world(
    home: Path, started: list[Spec], ten_thousand: Path
) -> None:
    seen = []
    for nproc in ("1", "2"):
        settings = [f"data.train=[{ten_thousand}]", "data.on_bad=skip", f"output=runs/{nproc}"]
        assert frame.run(["train", "sft.yaml", "--nproc", nproc, *settings]) == 75
        run = RunFolder(Path(f"runs/{nproc}"))
        report = json.loads((run.path / "data.json").read_text(encoding="utf-8"))
        counts = report["sets"][0]["counts"]
        assert (counts["num_records"], counts["num_kept"], counts["num_bad"]) == (10_000, 9_999, 1)
        (wrong,) = [json.loads(line) for line in (run.path / "bad.jsonl").read_text(encoding="utf-8").splitlines()]
        assert (wrong["file"], wrong["line"], wrong["set"]) == (str(ten_thousand), 7_655, str(ten_thousand))
        log = EventWriter(global_log(run))
        log.write("step", step=1, loss=1.0)
        log.close()
        (line,) = [line.strip() for line in end_lines(run) if "many.jsonl" in line]
        assert line.split(maxsplit=1)[1] == "many.jsonl: 9,999 samples of 10,000 records, 1 wrong"
        loaded = load_config(run.config)
        seen.append(prepare_data(loaded.config, loaded.base, Path(loaded.config.model.name)).train.fingerprint)
    assert [spec.num_processes for spec in started] == [1, 2] and seen[0] == seen[1]


def test_the_same_config_goes_on(home: Path, started: list[Spec]) -> None:
    run = make_run(home)
    assert check_claim(load_config("sft.yaml"), run) == "resumed"
    assert frame.run(["train", "sft.yaml", "log.every=7"]) == 75, "how it is run may change"
    assert len(started) == 1


@pytest.mark.parametrize("output", ["runs/sft/", "./runs/sft", "runs/../runs/sft"])
def test_other_spellings_of_the_folder_are_the_same_run(home: Path, output: str) -> None:
    make_run(home)
    loaded = load_config("sft.yaml", [f"output={output}"])
    assert check_claim(loaded, find_run_folder(loaded)) == "resumed"


def test_other_settings_are_refused_with_what_differs(
    home: Path, started: list[Spec], capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(home)
    before = run.config.read_bytes()
    assert frame.run(["train", "sft.yaml", "optim.lr=2e-3", "train.seed=7"]) == 2
    err = capsys.readouterr().err
    assert "optim.lr: 0.001 there, 0.002 now" in err and "train.seed: 42 there, 7 now" in err
    assert started == [] and run.config.read_bytes() == before


def test_a_run_that_never_made_a_step_may_be_started_with_mended_settings(home: Path) -> None:
    run = make_run(home, step=0)
    assert check_claim(load_config("sft.yaml", ["optim.lr=2e-3"]), run) == "new"


def test_a_finished_run_is_said_to_be_finished(
    home: Path, started: list[Spec], capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(home)
    run.final.mkdir()
    write_status(run, Status("done", step=3, total_steps=3))
    assert frame.run(["train", "sft.yaml"]) == 0
    assert started == [] and "is finished" in capsys.readouterr().out


def test_resume_never_does_not_overwrite(home: Path) -> None:
    run = make_run(home)
    with pytest.raises(ConfigError, match=r"checkpoint\.resume is never"):
        check_claim(load_config("sft.yaml", ["checkpoint.resume=never"]), run)


def test_a_folder_with_other_files_is_refused(home: Path, started: list[Spec]) -> None:
    (home / "runs/sft").mkdir(parents=True)
    (home / "runs/sft/thesis.tex").write_text("precious")
    assert frame.run(["train", "sft.yaml"]) == 2
    assert [path.name for path in (home / "runs/sft").iterdir()] == ["thesis.tex"] and started == []


def test_an_output_that_is_a_file_is_a_storage_error(home: Path, started: list[Spec]) -> None:
    (home / "runs").mkdir()
    (home / "runs/sft").write_text("")
    assert frame.run(["train", "sft.yaml"]) == 6


def test_a_run_that_lives_is_not_started_twice(home: Path) -> None:
    run = make_run(home)
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        write_status(run, Status("running", step=3, **leader_identity(sleeper.pid)))
        with pytest.raises(ConfigError, match=f"another process works in runs/sft: pid {sleeper.pid}"):
            check_claim(load_config("sft.yaml"), run)
        # The pid lives, but it is somebody else's now: the run is dead and may go on.
        status = read_status(run)
        assert status is not None
        write_status(run, replace(status, pid_started=status.pid_started - 500))
        assert check_claim(load_config("sft.yaml"), run) == "resumed"
    finally:
        sleeper.kill()
        sleeper.wait()


def test_a_folder_is_held_by_one_process_and_let_go_when_it_dies(home: Path) -> None:
    run = RunFolder(home / "runs/sft")
    program = (
        "import sys, time; from pathlib import Path; from duoka.cluster.run_lock import hold_run\n"
        "from duoka.runs.folder import RunFolder\n"
        f"with hold_run(RunFolder(Path({str(run.path)!r}))):\n    print('held', flush=True); time.sleep(60)\n"
    )
    holder = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match="another process works in"), hold_run(run):
            pass
    finally:
        holder.kill()
        holder.communicate()
    with hold_run(run):
        pass


def test_a_runs_own_config_means_that_run_wherever_it_lies(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(home)
    stored = run.config.resolve()
    monkeypatch.chdir("/")
    loaded = load_config(stored)
    assert find_run_folder(loaded).path == stored.parent
    assert check_claim(loaded, find_run_folder(loaded)) == "resumed"


def test_flags_that_start_a_world_are_refused_inside_one(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    assert frame.run(["train", "sft.yaml", "--nproc", "2"]) == 2
    assert "part of one already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "kind"),
    [
        (ConfigError("bad"), 2, "ConfigError"),
        (OSError(28, "No space left on device"), 6, "StorageError"),
        (RuntimeError("boom"), 1, "RuntimeError"),
        (SystemExit(0), 1, "SystemExit"),  # of a library, a hook, code of the model: alone it would pass for done
    ],
)
def test_a_rank_writes_down_why_it_ends_and_leaves_with_its_code(
    error: BaseException, code: int, kind: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_worker(loaded: object, run: object, on_hang: object) -> int:
        raise error

    left: list[int] = []
    fake = ModuleType("duoka.train.main")
    fake.run_worker = run_worker  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "duoka.train.main", fake)
    monkeypatch.setattr(ranks_command, "end_process", left.append)
    run = RunFolder(home / "runs/sft")
    with pytest.raises(type(error)):
        ranks_command.work(lambda: load_config("sft.yaml"), run, 1, supervised=True)
    (failure,) = read_failures(run)
    assert left == [code] == [failure.exit_code]
    assert (failure.rank, failure.kind, bool(failure.traceback)) == (1, kind, code == 1)


def test_waiting_ranks_go_on_when_rank_0_is_ready_and_not_by_an_old_answer(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    with lead(run) as leader:
        old = leader.folder / "answer.json"
    old.parent.mkdir(parents=True)
    old.write_text('{"state": "ready", "beat": 9, "words": {"1": "old"}}')
    released: list[float] = []
    waiting = threading.Thread(target=lambda: (follow(run, 1, silence_s=20), released.append(time.monotonic())))
    waiting.start()
    time.sleep(0.6)
    assert not released, "an answer to somebody else is no answer"
    with lead(run) as leader:
        time.sleep(0.8)
        assert not released, "rank 0 is still at work"
        ready_at = time.monotonic()
        run.logs.mkdir()
        leader.ready()
        waiting.join(10)
        assert released and released[0] > ready_at
        follow(run, 2, silence_s=10)  # a late one is answered too
    assert not (run.path / ".join").exists()


def test_ranks_leave_with_rank_0s_code_when_it_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder(tmp_path / "run")
    seen: list[DuokaError] = []

    def wait() -> None:
        try:
            follow(run, 1, silence_s=20)
        except DuokaError as error:
            seen.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    with pytest.raises(StorageError), lead(run):
        raise StorageError("the disk is full")
    waiting.join(10)
    assert isinstance(seen[0], RefusedElsewhere) and seen[0].exit_code == 6 and "the disk is full" in str(seen[0])


def test_a_second_world_that_is_refused_takes_no_ranks_of_the_first_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(tmp_path / "run")
    released: list[bool] = []
    monkeypatch.setenv("MASTER_PORT", "29500")
    waiting = threading.Thread(target=lambda: (follow(run, 1, silence_s=20), released.append(True)))
    waiting.start()
    with lead(run) as leader:
        time.sleep(0.6)
        monkeypatch.setenv("MASTER_PORT", "29501")
        with pytest.raises(ConfigError), lead(run):
            raise ConfigError("another process works here")
        leader.ready()
        waiting.join(10)
    assert released


def test_a_rank_whose_rank_0_never_comes_does_not_wait_for_ever(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match="has not heard from rank 0"):
        follow(RunFolder(tmp_path / "run"), 1, silence_s=0.5)


def test_the_list_of_runs_tells_the_living_from_the_dead(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, status in {
        "live": Status("running", step=5, total_steps=10, loss=1.5, world_size=2, **leader_identity()),
        "gone": Status("running", step=7, pid=os.getpid(), pid_started=1.0),
        "good": Status("done", step=10, total_steps=10, loss=0.5, exit_code=0),
        "bad": Status("failed", step=2, exit_code=5, cause="worker failed: rank 1"),
    }.items():
        run = RunFolder(home / "runs" / name)
        run.make()
        write_status(run, status)
    assert frame.run(["runs", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert {name: row["state"] for name, row in rows.items()} == {
        "live": "running", "gone": "dead", "good": "done", "bad": "failed",
    }  # fmt: skip
    assert [name for name, row in rows.items() if row["is_alive"]] == ["live"]
    assert frame.run(["runs", "runs"]) == 0
    text = capsys.readouterr().out
    assert "5/10  1.5000" in text and "worker failed: rank 1" in text
    assert frame.run(["runs", "stop", "gone"]) == 2, "there is nothing to stop"
    assert frame.run(["runs", "stop", "goof"]) == 2
    assert "did you mean good?" in capsys.readouterr().err


def test_runs_in_an_empty_place_is_no_error(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert frame.run(["runs"]) == 0
    assert "no runs in runs" in capsys.readouterr().out
    assert frame.run(["runs", "nowhere"]) == 2
