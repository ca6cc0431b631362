"""`log.alert`: starts the process that follows the run and tells others (`duoka alerts`), and does no more.

It reads what the run writes. That it hangs, or is killed, no step can feel; it outlives a rank 0 that is killed, or it
could not tell of that. A second one for the same run leaves at once.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

from duoka.process.lifeline import leaves_the_world
from duoka.sinks.sink import RunFacts, Sink


class AlertFollower(Sink):
    name = "alerts"
    trouble = "nobody is told what becomes of this run"

    def open(self, facts: RunFacts, say: Callable[[str], None]) -> None:
        # A session of its own: a Ctrl-C for the run is none for who tells of its end.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "duoka", "alerts", str(facts.folder.resolve())], env=leaves_the_world(),
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
