"""A rank that comes before rank 0 listens goes on as soon as it does, and is refused by torch's client, not here."""

import datetime
import socket
import threading

from duoka.comm import world


def test_a_client_that_comes_early_waits_for_the_listener(monkeypatch):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        knocks = []

        def sleep(seconds):
            knocks.append(seconds)
            if len(knocks) == 3:
                listener.listen()

        monkeypatch.setattr(world.time, "sleep", sleep)
        world.wait_for_listener("127.0.0.1", listener.getsockname()[1], datetime.timedelta(seconds=30))
        assert len(knocks) == 3


def test_nobody_is_waited_for_beyond_the_timeout():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        wait = threading.Thread(
            target=world.wait_for_listener,
            args=("127.0.0.1", listener.getsockname()[1], datetime.timedelta(seconds=0.1)),
        )
        wait.start()
        wait.join(20)
        assert not wait.is_alive()


def test_a_name_that_does_not_resolve_is_told_by_who_connects():
    world.wait_for_listener("no-such-machine.invalid", 1, datetime.timedelta(seconds=30))
