"""Ten thousand requests with cancels, slow readers and full queues: nothing is left of them (`make nightly`)."""

from __future__ import annotations

import gc
import json
import os
import random
import socket
import threading
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
from serving import KEY, serving
from tiny import write_tiny_model

NUMBER = int(os.environ.get("DUOKA_SOAK", "10000"))
CLIENTS = 8
GROWTH = 48 << 20  # of resident memory, from a fifth of the way to the end: what is kept for each request would be more


def request(body: dict[str, object]) -> bytes:
    text = json.dumps({"model": "tiny", "temperature": 1, **body})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(text)}\r\n\r\n{text}".encode()


def one(address: tuple[str, int], dice: random.Random) -> str:
    """A request of a kind that is drawn, and what came of it."""
    kind = dice.choices(("whole", "stream", "leaves", "slow", "many", "wrong"), (60, 20, 10, 1, 5, 4))[0]
    body: dict[str, object] = {"prompt": "ab" * dice.randint(1, 90), "max_tokens": dice.randint(1, 6)}
    if kind in ("stream", "leaves", "slow"):
        body |= {"stream": True, "ignore_eos": True, "max_tokens": 600 if kind == "leaves" else 12}
    body |= {"n": 9} if kind == "many" else {"top_k": "x"} if kind == "wrong" else {}
    with socket.create_connection(address, timeout=120) as client:
        client.sendall(request(body))
        if kind == "leaves":
            client.recv(200)
            return "left"
        got = b""
        while piece := client.recv(64 if kind == "slow" else 65536):
            got += piece
            time.sleep(0.02 if kind == "slow" else 0)
    status = got.split(b" ", 2)[1].decode()
    assert kind in ("many", "wrong") or status == "429" or got.rstrip().endswith((b"}", b"0")), got[-200:]
    return status


@pytest.mark.nightly
@pytest.mark.timeout(3000)
def test_ten_thousand_requests_leave_nothing_behind(tmp_path: Path) -> None:
    me, found, sizes = psutil.Process(), Counter[str](), []
    lock, left = threading.Lock(), iter(range(NUMBER))
    with serving(write_tiny_model(tmp_path / "tiny", tied=False), num_rows=4, max_waiting=8) as server:
        scheduler, address = server.service.scheduler, server.server_address[:2]
        threads_before = threading.active_count()

        def work(number: int) -> None:
            dice = random.Random(number)
            while True:
                with lock:
                    place = next(left, None)
                    if place is None:
                        return
                    if place in (NUMBER // 5, NUMBER - 1):
                        gc.collect()
                        sizes.append(me.memory_info().rss)
                said = one(address, dice)
                with lock:
                    found[said] += 1

        clients = [threading.Thread(target=work, args=(number,)) for number in range(CLIENTS)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        end = time.monotonic() + 120
        while (scheduler.num_active or scheduler.num_waiting or threading.active_count() > threads_before) and (
            time.monotonic() < end
        ):
            time.sleep(0.1)
        assert sum(found.values()) == NUMBER and set(found) == {"200", "400", "429", "left"}, found
        assert scheduler.num_active == scheduler.num_waiting == 0, "rows are still taken"
        assert threading.active_count() <= threads_before, [one.name for one in threading.enumerate()]
        assert sizes[1] - sizes[0] < GROWTH, f"memory grew from {sizes[0] >> 20} to {sizes[1] >> 20} MiB"
        assert len([one for one in me.net_connections() if one.status == "ESTABLISHED"]) == 0
