"""One machine's ranks on torch's elastic agent: `python -m duoka.parallel.agent SPEC.json`.

Started by cluster.supervise for worlds of more than one process; the only file that knows torch.distributed.elastic.
It starts the ranks, sees the first one fail, gives the others a short time to say why they end too, passes one
SIGTERM on, and writes what it saw to the report file. It prints nothing: its own log is logs/agent.log.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from duoka.parallel.exits import DRAIN_S, DRAIN_SAVED_S, RESUME_ME, SIGTERM_S, ExitWatch, RankExit, WorldReport
from duoka.parallel.lifeline import PARENT_PID, die_with_parent

_MONITOR_EVERY_S = 0.1
_ELASTIC = "torch.distributed.elastic"


@dataclass(frozen=True)
class AgentSpec:
    """Everything that the agent is told, as JSON."""

    command: list[str]
    num_processes: int
    port: int  # of the rendezvous; 0: a free one
    report: str
    log: str
    parent_pid: int


class Stop:
    """Remembers the one request to stop; ranks get it when there are ranks."""

    def __init__(self) -> None:
        self.asked = False
        self.watch: ExitWatch | None = None

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self.asked:
            self.asked = True
            if self.watch is not None:
                self.watch.send(signal.SIGTERM)


def main(path: str) -> int:
    spec = AgentSpec(**json.loads(Path(path).read_text(encoding="utf-8")))
    # Before torch is imported: two seconds in which a launcher may die.
    die_with_parent(spec.parent_pid)
    stop = Stop()
    signal.signal(signal.SIGTERM, stop.on_signal)
    # A Ctrl-C is the launcher's to answer, also where a terminal sends it to everybody.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Ranks of attempt N+1 would read attempt N's addresses from a store that the attempts share.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    # Torch's agent would take our signals for itself and lose the ranks' exit codes.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
    os.environ[PARENT_PID] = str(os.getpid())
    _log_to(Path(spec.log))
    exits: list[RankExit] = []
    try:
        run_ranks(spec, stop, exits)
    except (OSError, RuntimeError, ValueError) as error:
        logging.getLogger(_ELASTIC).exception("the agent failed")
        WorldReport(tuple(exits), f"{type(error).__name__}: {error}").write(Path(spec.report))
        return 1
    WorldReport(tuple(exits)).write(Path(spec.report))
    return 0


def run_ranks(spec: AgentSpec, stop: Stop, exits: list[RankExit]) -> None:
    """Start the ranks and see them to their end; `exits` fills in the order in which they end."""
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    if stop.asked:
        return
    rendezvous = get_rendezvous_handler(
        # Never static: a static store outlives its world, and the next one reads what the last one left.
        RendezvousParameters(
            backend="c10d",
            endpoint=f"127.0.0.1:{spec.port}",
            run_id=uuid.uuid4().hex,
            min_nodes=1,
            max_nodes=1,
            local_addr="127.0.0.1",
            is_host=True,
            timeout=60,
        )
    )
    try:
        worker = WorkerSpec(
            role="duoka", local_world_size=spec.num_processes, entrypoint=spec.command[0],
            args=tuple(spec.command[1:]), rdzv_handler=rendezvous, max_restarts=0,
            monitor_interval=_MONITOR_EVERY_S, local_addr="127.0.0.1",
        )  # fmt: skip
        _build_agent(worker, stop, exits).run()
    finally:
        rendezvous.shutdown()


def _build_agent(worker: Any, stop: Stop, exits: list[RankExit]) -> Any:
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

    class InheritedOutput(LogsSpecs):
        """Ranks redirect their own output (parallel.rank): torch's redirection would cut logs off at a resume."""

        @property
        def root_log_dir(self) -> str:
            return ""

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            none = dict.fromkeys(envs, "")
            return LogsDest(dict(none), dict(none), {}, {}, dict(none))

    class Agent(LocalElasticAgent):
        """Torch's agent, that lets ranks end by themselves before it ends them, and notes who went first."""

        def _monitor_workers(self, group: WorkerGroup) -> RunResult:
            if stop.watch is None:
                stop.watch = ExitWatch({one.global_rank: one.id for one in group.workers})
                if stop.asked:
                    stop.watch.send(signal.SIGTERM)
            watch = stop.watch
            watch.look()
            exits[:] = watch.exits
            if watch.running and must_end(watch, stop.asked):
                end_the_rest(watch)
                exits[:] = watch.exits
            elif watch.running:
                return RunResult(state=WorkerState.HEALTHY)
            return super()._monitor_workers(group)

    return Agent(worker, InheritedOutput(), start_method="spawn", exit_barrier_timeout=5, shutdown_timeout=5)


def must_end(watch: ExitWatch, stopping: bool) -> bool:
    """A rank failed. While the world stops on request, the launcher's grace time counts for ranks that leave."""
    failed = watch.first_failure
    leaving = (RESUME_ME, -signal.SIGTERM, 128 + signal.SIGTERM)
    return failed is not None and not (stopping and failed.code in leaving)


def end_the_rest(watch: ExitWatch) -> None:
    """A rank failed: wait shortly for the others, then SIGTERM, then SIGKILL. Returns when none is left."""
    failed = watch.first_failure
    drain_s = DRAIN_SAVED_S if failed is not None and failed.code == RESUME_ME else DRAIN_S
    for wait_s, number in ((drain_s, signal.SIGTERM), (SIGTERM_S, signal.SIGKILL), (2.0, None)):
        deadline = time.monotonic() + wait_s
        while watch.running and time.monotonic() < deadline:
            time.sleep(0.05)
            watch.look()
        if not watch.running:
            return
        if number is not None:
            watch.send(number)


def _log_to(path: Path) -> None:
    """What torch's agent has to say goes to a file: the launcher says it in its own words, once."""
    import torch  # noqa: F401  (makes the handlers that are taken away here)

    handler = logging.FileHandler(path, encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.getLogger().addHandler(handler)
    logging.getLogger().setLevel(logging.WARNING)
    for name in ("torch", "torch.distributed"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
