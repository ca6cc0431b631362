"""Prefetching by a thread, while the current item is in use: for feeds, and for the loaders of users' own loops."""

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
    """A prefetching iteration that can jump to another place; queue and thread end with the block."""

    def __init__(self, start: Callable[[At], Generator[T]]) -> None:
        self._start = start
        self._items: Generator[T] | None = None

    def go_to(self, place: At) -> None:
        self.close()
        self._items = self._start(place)

    def __next__(self) -> T:
        assert self._items is not None, "call go_to first"
        return next(self._items)

    def close(self) -> None:
        """Not left to garbage collection: a traceback held by a debugger or a test would keep the thread alive."""
        if self._items is not None:
            self._items.close()

    def __enter__(self) -> Walk[At, T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def prefetched(items: Iterable[T], count: int) -> Generator[T]:
    """The same items, up to `count` of them prefetched by a thread, which ends when this iterator does."""
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
            # Raised where the next item is asked for; a thread that dies silently would leave the consumer waiting.
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
