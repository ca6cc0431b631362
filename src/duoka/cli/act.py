"""What the page of `duoka board --control` does to a run, as the commands do it. Not a command itself."""

from __future__ import annotations

import subprocess
import sys
import threading

from duoka.cluster.listing import stop_run
from duoka.errors import ConfigError, DuokaError
from duoka.runs.folder import RunFolder
from duoka.runs.status import is_alive, read_status

OUTPUT = "board.log"  # in the run's logs/: what a run that was started from a page prints


def stop(run: RunFolder) -> str:
    """Ask it to save and leave. That may take minutes: the answer does not wait for it, and its limit is kept here."""
    status = read_status(run)
    if status is None or not is_alive(status) or status.state not in ("starting", "running"):
        raise ConfigError(f"no process of {run.path} lives on this machine")
    said: list[str] = []

    def work() -> None:
        try:
            stop_run(run, grace_s=None, at_once=False, say=said.append)
        except DuokaError as error:  # it ended by itself meanwhile
            said.extend(error.lines())

    threading.Thread(target=work, name="duoka-stop", daemon=True).start()
    return f"asked pid {status.pid} to save and leave"


def go_on(run: RunFolder) -> str:
    """Start the run's own config again, on as many processes as it had, in a session of its own."""
    status = read_status(run)
    if status is not None and is_alive(status) and status.state in ("starting", "running"):
        raise ConfigError(f"{run.name} is running already")
    if not run.config.is_file():
        raise ConfigError(f"{run.name} has no config.yaml to go on with")
    nproc = max(1, status.world_size if status else 1)
    command = [sys.executable, "-m", "duoka", "train", str(run.config.resolve()), f"output={run.path.resolve()}"]
    run.logs.mkdir(exist_ok=True)
    with (run.logs / OUTPUT).open("ab") as out:
        process = subprocess.Popen(
            [*command, "--nproc", str(nproc)], stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    # Reaped when it ends: a zombie would count as a run's process.
    threading.Thread(target=process.wait, name="duoka-reap", daemon=True).start()
    return f"started with {nproc} {'process' if nproc == 1 else 'processes'}; what it prints is in logs/{OUTPUT}"
