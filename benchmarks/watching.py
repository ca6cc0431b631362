"""Trainers watched from outside: CPU time of a process tree, peak memory, and the steps that it writes to its log.

Shared by the benchmarks that run duoka beside other tools (sft.py, pretrain.py). Nothing here knows a tool.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

# A look at a process tree costs 5 ms of a core that the watched ones may want.
LOOK_EVERY_S = 0.2


@dataclass
class Watched:
    """One run, from outside. Steps are (CPU seconds of the tree, wall seconds, real tokens) at each step's end."""

    steps: list[tuple[float, float, int]] = field(default_factory=list)
    peak_bytes: int = 0  # of the largest process
    sum_of_peaks_bytes: int = 0  # of all, their own peaks
    error: str = ""

    def numbers(self) -> dict[str, Any]:
        if self.error or not self.steps:
            return {"error": self.error or "no step"}
        first, last = self.steps[0], self.steps[-1]
        tokens = sum(step[2] for step in self.steps[1:])
        return {
            "first_step_cpu_s": round(first[0], 2), "first_step_wall_s": round(first[1], 2),
            "num_steps_measured": len(self.steps) - 1, "num_tokens": tokens,
            "tokens_per_cpu_s": round(tokens / (last[0] - first[0]), 2) if tokens else None,
            "tokens_per_wall_s": round(tokens / (last[1] - first[1]), 2) if tokens else None,
            "peak_bytes": self.peak_bytes, "sum_of_peaks_bytes": self.sum_of_peaks_bytes,
        }  # fmt: skip


class Tree:
    """A process and all that descends from it."""

    def __init__(self, pid: int) -> None:
        self.root = psutil.Process(pid)
        self.cpu_s: dict[int, float] = {}
        self.peak_bytes: dict[int, int] = {}

    def look(self) -> float:
        """CPU seconds so far, those of processes that have ended included."""
        with contextlib.suppress(psutil.Error):
            for process in [self.root, *self.root.children(recursive=True)]:
                with contextlib.suppress(psutil.Error, OSError, StopIteration):
                    times = process.cpu_times()
                    self.cpu_s[process.pid] = times.user + times.system
                    status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
                    high = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM"))
                    self.peak_bytes[process.pid] = high
        return sum(self.cpu_s.values())

    def end(self) -> None:
        with contextlib.suppress(psutil.Error):
            family = [self.root, *self.root.children(recursive=True)]
            for sign in (signal.SIGTERM, signal.SIGKILL):
                for process in family:
                    with contextlib.suppress(psutil.Error):
                        process.send_signal(sign)
                psutil.wait_procs(family, timeout=5)


def read_steps(logs: list[Path]) -> list[int]:
    """Real tokens of each step that all logs have."""
    columns = []
    for log in logs:
        lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
        found = []
        for line in lines:
            with contextlib.suppress(json.JSONDecodeError):  # a line that is being written
                event = json.loads(line)
                if event.get("type", "step") == "step":
                    found.append(int(event["num_tokens"]))
        columns.append(found)
    return [sum(step) for step in zip(*columns, strict=False)]


def watch(
    command: list[str],
    logs: list[Path],
    folder: Path,
    steps: int,
    limit_s: float,
    *,
    to_end: bool = False,
    cwd: Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> Watched:
    """Run until `steps` steps are done, then end it: what it writes afterwards is not the question, unless `to_end`."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "DUOKA_CACHE": str(folder / "cache"), "HF_HOME": str(folder / "hf")}
    env |= variables or {}
    seen, started = Watched(), time.monotonic()
    with (folder / "out.log").open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=env, cwd=cwd, start_new_session=True
        )
        tree = Tree(process.pid)
        try:
            while to_end or len(seen.steps) < steps:
                ended = process.poll() is not None
                cpu_s, wall_s = tree.look(), time.monotonic() - started
                for tokens in read_steps(logs)[len(seen.steps) :]:
                    seen.steps.append((cpu_s, wall_s, tokens))
                if ended or wall_s > limit_s:
                    break
                time.sleep(LOOK_EVERY_S)
        finally:  # also when a benchmark is stopped: what it watches has a session of its own
            tree.end()
    seen.peak_bytes = max(tree.peak_bytes.values(), default=0)
    seen.sum_of_peaks_bytes = sum(tree.peak_bytes.values())
    if len(seen.steps) < 2 or (to_end and process.wait() != 0):
        last = (folder / "out.log").read_text(errors="replace").strip().splitlines()
        seen.error = f"{len(seen.steps)} steps in {limit_s:.0f} s; last line: {last[-1][:200] if last else ''}"
    return seen


def end_like_an_interrupt() -> None:
    """SIGTERM (`timeout`) as Ctrl-C: what runs is ended, folders are removed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def stamp() -> dict[str, str]:
    """When a row was measured, and of which code."""
    source = Path(__file__).parent.parent / "src"

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(source), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    code = git("rev-parse", "--short", "HEAD") or "unknown"
    changed = " with changes" if git("status", "--porcelain", ".") else ""
    return {"measured": time.strftime("%Y-%m-%d %H:%M", time.gmtime()), "code": code + changed}


def fill_page(page: Path, text: str, name: str) -> None:
    """Put `text` where the page has `<!-- NAME: made by ... -->` up to `<!-- end -->`; a page without is an error."""
    start, found = f"<!-- {name}:", page.read_text(encoding="utf-8")
    if found.count(start) != 1:
        raise SystemExit(f"{page} has no single block that begins with '{start}'")
    head, rest = found.split(start)
    line, rest = rest.split("\n", 1)
    _, tail = rest.split("<!-- end -->", 1)
    page.write_text(f"{head}{start}{line}\n{text.strip()}\n<!-- end -->{tail}", encoding="utf-8")


def publish(found: dict[str, Any], text: str, out: Path, page: Path | None, name: str) -> None:
    """Figures into their JSON, and as `text` into a page's block and onto the screen."""
    out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if page:
        fill_page(page, text, name)
    print(text)


def machine_kind() -> str:
    """What its arithmetic is: figures of unlike machines are not compared."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    kinds = {"amx_bf16": "AMX", "avx512_bf16": "AVX-512 with bf16", "avx512f": "AVX-512", "avx2": "AVX2"}
    kind = next((name for flag, name in kinds.items() if flag in flags), platform.machine())
    return f"{len(os.sched_getaffinity(0))} cores, {kind}"


def describe_machine() -> dict[str, Any]:
    return {
        "kind": machine_kind(), "processor": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "threads_per_process": int(os.environ["OMP_NUM_THREADS"]), "python": platform.python_version(),
    }  # fmt: skip


def package_versions(python: str, names: tuple[str, ...]) -> dict[str, str]:
    if python == sys.executable:
        return {name: version(name) for name in names}
    code = f"import json,importlib.metadata as m;print(json.dumps({{n: m.version(n) for n in {names!r}}}))"
    return json.loads(subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout)
