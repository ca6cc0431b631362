"""What comes next, made by a thread while what is there is worked on: for feeds, and loaders of people's own loops."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterable
from types import TracebackType
from typing import Any, Generic, TypeVar

At = TypeVar("At")
T = TypeVar("T")
_POLL_S = 0.05


class Walk(Generic[At, T]):
    """An iteration that can go on from another place; what it made ahead, and its thread, end with the block."""

    def __init__(self, start: Callable[[At], Generator[T]]) -> None:
        self._start = start
        self._items: Generator[T] | None = None

    def go_to(self, place: At) -> None:
        self.close()
        self._items = self._start(place)

    def __next__(self) -> T:
        assert self._items is not None, "go_to comes first"
        return next(self._items)

    def close(self) -> None:
        """Not left to Python's collection: an exception that somebody looks at would keep the thread alive."""
        if self._items is not None:
            self._items.close()

    def __enter__(self) -> Walk[At, T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def prefetched(items: Iterable[T], count: int) -> Generator[T]:
    """The same items, up to `count` of them made ahead by a thread, which ends when this iterator does."""
    ready: queue.Queue[tuple[str, Any]] = queue.Queue(maxsize=count)
    stop = threading.Event()

    def put(item: tuple[str, Any]) -> None:
        while not stop.is_set():
            try:
                ready.put(item, timeout=_POLL_S)
                return
            except queue.Full:
                continue

    def work() -> None:
        try:
            for item in items:
                put(("item", item))
                if stop.is_set():
                    return
            put(("end", None))
        except BaseException as error:
            # It belongs to whoever asks for the next item; a thread that dies silently would leave them waiting.
            put(("error", error))
            if not isinstance(error, Exception):
                raise

    thread = threading.Thread(target=work, name="duoka-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            what, item = ready.get()
            if what == "end":
                return
            if what == "error":
                raise item
            yield item
    finally:
        stop.set()
        thread.join()
