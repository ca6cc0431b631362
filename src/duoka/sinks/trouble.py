"""The one place where whatever a sink raises ends: said once, never passed on to who trains."""

from __future__ import annotations

import threading
from collections.abc import Callable

from duoka.process.secrets import hide_secrets
from duoka.sinks.sink import Sink


class Troubles:
    """`warn` gets one line for each trouble, from whatever thread: a full disk would be said at every step."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._said: set[str] = set()
        self._lock = threading.Lock()

    def attempt(self, sink: Sink, call: Callable[[], None]) -> bool:
        """Whether the call came to its end."""
        try:
            call()
        except Exception as error:  # noqa: BLE001  (a tracker's package may raise anything; the run goes on)
            self._say(sink, error)
            return False
        return True

    def _say(self, sink: Sink, error: Exception) -> None:
        words = (getattr(error, "strerror", None) or str(error)).strip() or type(error).__name__
        reason = words.splitlines()[0]
        text = hide_secrets(f"warning: {sink.trouble or f'{sink.name} has a fault'}: {reason}")
        with self._lock:
            if text in self._said:
                return
            self._said.add(text)
        self._warn(text)
