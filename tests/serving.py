"""`duoka serve` in this process, for as long as a test needs it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from duoka.model.sampling import Sampling
from duoka.serve.api.server import Server
from duoka.serve.api.start import Settings, build_service
from duoka.serve.batching.scheduler import IsFull, Job
from duoka.serve.load_run import find_trained

KEY = "the-key"


@contextlib.contextmanager
def serving(folder: Path, *, num_rows: int = 4, max_waiting: int = 8) -> Iterator[Server]:
    settings = Settings(key=KEY, num_rows=num_rows, max_waiting=max_waiting, cache_bytes=64 << 20, precision="fp32")
    service = build_service(find_trained(str(folder), say=print), {}, settings)
    made = Server(("127.0.0.1", 0), service)
    service.scheduler.start()
    threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield made
    finally:
        made.shutdown()
        service.scheduler.close()
        made.server_close()


@contextlib.contextmanager
def kept_busy(server: Server, *, num_jobs: int = 8) -> Iterator[None]:
    """So many answers on their way that each slot has one, and others wait."""
    jobs = [Job((5, 6), Sampling(max_new_tokens=1000), frozenset()) for _ in range(num_jobs)]
    until = time.monotonic() + 20
    while True:
        try:
            server.service.scheduler.submit(jobs)
            break
        except IsFull:  # an earlier test's client has left, and its thread has not heard of it yet
            assert time.monotonic() < until
            time.sleep(0.01)
    try:
        yield
    finally:
        for job in jobs:
            job.cancel()


def address_of(server: Server) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"
