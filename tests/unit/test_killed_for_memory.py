"""A rank that the kernel killed for want of memory is told apart from one that somebody killed."""

from pathlib import Path

import pytest

from duoka.cluster import blame
from duoka.cluster.blame import judge_world
from duoka.cluster.launch import WorldSpec
from duoka.plan.hardware import CgroupLimit, count_oom_kills, read_process_limit
from duoka.process.exits import RankExit
from duoka.runs.folder import RunFolder


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (2, 3, "the kernel killed it, for this container or job (300 MiB) was out of memory"),
        (2, 2, "nothing in duoka kills a healthy rank"),
        (None, 3, "nothing in duoka kills a healthy rank"),
    ],
)
def test_what_the_kernel_counted_says_who_killed(
    before: int | None, after: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(tmp_path / "run")
    run.make()
    monkeypatch.setattr(blame, "count_oom_kills", lambda: after)
    monkeypatch.setattr(blame, "read_cgroup_limit", lambda: CgroupLimit(300 << 20, 0))
    spec = WorldSpec(("python", "x.py"), 1, run, oom_kills=before)
    verdict = judge_world(spec, [RankExit(0, 1, -9, 1.0)], stopped_by="", left_at_once=False)
    assert words in "\n".join(verdict.lines) and verdict.exit_code == 5


def test_the_innermost_group_that_counts_is_asked(tmp_path: Path) -> None:
    own, root = tmp_path / "cgroup", tmp_path / "fs"
    own.write_text("0::/jobs/7/step\n", encoding="utf-8")
    assert count_oom_kills(root, own) is None
    (root / "jobs/7/step").mkdir(parents=True)
    for group, killed in ((".", 90), ("jobs", 80), ("jobs/7", 3)):
        (root / group / "memory.events").write_text(f"oom 9\noom_kill {killed}\n", encoding="utf-8")
    assert count_oom_kills(root, own) == 3
    own.write_text("4:memory:/job\n", encoding="utf-8")
    (root / "memory/job").mkdir(parents=True)
    (root / "memory/job/memory.oom_control").write_text("under_oom 0\noom_kill 1\n", encoding="utf-8")
    assert count_oom_kills(root, own) == 1


def test_the_tightest_limit_of_processes_is_found_wherever_it_stands(tmp_path: Path) -> None:
    """A job's or a nested container's; only the container's own root was looked at."""
    own, root = tmp_path / "cgroup", tmp_path / "fs"
    own.write_text("0::/jobs/7/step\n", encoding="utf-8")
    (root / "jobs/7/step").mkdir(parents=True)
    assert read_process_limit(root, own) is None
    for group, limit in (("jobs", "4096"), ("jobs/7", "64"), ("jobs/7/step", "max")):
        (root / group / "pids.max").write_text(f"{limit}\n", encoding="utf-8")
    assert read_process_limit(root, own) == 64
