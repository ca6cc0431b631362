"""The meeting of an elastic world, with members that only talk: who takes part, when worlds end, what is refused."""

import json
import socket
import time

import pytest

from duoka.cluster import elastic, meeting, wire
from duoka.cluster.elastic import _Machine
from duoka.cluster.meeting import Meeting, Rules
from duoka.cluster.supervise import Request
from duoka.cluster.wire import Wire
from duoka.errors import ConfigError, WorkerFailed
from duoka.runs.folder import RunFolder
from duoka.runs.status import read_status

SAME = {"config": "a1", "--nproc": "2"}


class Table:
    """A meeting and its members, in one thread."""

    def __init__(self, tmp_path, least, most, **rules):
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen(8)
        self.address = listener.getsockname()
        self.run = RunFolder(tmp_path / "run")
        self.run.make()
        self.meeting = Meeting(listener, Rules(least, most, *self.address, **rules), self.run, 2, SAME)
        self.members, self.heard = {}, {}

    def connect(self):
        return Wire(socket.create_connection(self.address))

    def join(self, name, *, identity=SAME, is_host=False, wish=0):
        self.members[name], self.heard[name] = self.connect(), []
        self.members[name].send(hello={"name": name, "identity": identity, "is_host": is_host, "wish": wish})
        self.tend()

    def tend(self, times=4):
        for _ in range(times):
            time.sleep(0.005)
            if self.meeting.verdict is None:
                self.meeting.tend()
            for name, member in self.members.items():
                self.heard[name] += member.take()

    def go(self, name):
        """(world, node, number of nodes) of the latest order to begin."""
        orders = [one for one in self.heard[name] if "go" in one]
        return tuple(orders[-1][key] for key in ("go", "node", "num_nodes")) if orders else None

    def said(self, name):
        return "\n".join(one["say"] for one in self.heard[name] if "say" in one)

    def last(self, name, word):
        return next((one[word] for one in reversed(self.heard[name]) if word in one), None)

    def ended(self, name, code, first, world):
        same = {"pid": 1, "code": code, "time": 1.0 + first, "by_us": False}
        exits = [{"rank": first + local, **same} for local in (0, 1)]
        self.members[name].send(ended=world, exits=exits)
        self.tend()

    def leave(self, name):
        self.members.pop(name).close()
        self.tend()

    def close(self):
        for member in self.members.values():
            member.socket.close()
        self.meeting.verdict = self.meeting.verdict or object()
        self.meeting.run()


@pytest.fixture
def seat(tmp_path, monkeypatch):
    monkeypatch.setattr(meeting, "LAST_CALL_S", 0.0)
    monkeypatch.setattr(meeting, "FIRST_WAIT_S", 0.0)
    monkeypatch.setattr(meeting, "_FAREWELL_S", 0.1)
    monkeypatch.setattr(wire, "_GOODBYE_S", 0.01)
    tables = []

    def make(least, most, **rules):
        tables.append(Table(tmp_path, least, most, **rules))
        return tables[-1]

    yield make
    for table in tables:
        table.close()


def test_worlds_follow_who_is_there(seat):
    table = seat(2, 2)
    table.join("guest", wish=1)
    assert table.go("guest") is None and "1 of at least 2" in table.said("guest")
    table.join("host", is_host=True)
    assert table.go("host") == (1, 0, 2) and table.go("guest") == (1, 1, 2), "rank 0 stays with the meeting"
    table.join("spare")
    assert table.go("spare") is None and table.last("host", "stop") is None, "two at most: it waits for a place"
    table.leave("guest")
    assert table.last("host", "end") == 1, "nothing goes on without a member"
    table.ended("host", 5, 0, 1)
    assert table.go("host") == (2, 0, 2) and table.go("spare") == (2, 1, 2)
    table.ended("spare", 0, 2, 1)
    table.ended("spare", 0, 2, 2)
    assert table.last("host", "done") is None, "a word about an old world means nothing"
    table.ended("host", 0, 0, 2)
    assert table.last("host", "done") == 0 == table.last("spare", "done")


def test_a_newcomer_makes_all_save_and_a_leaver_too(seat):
    table = seat(1, 2)
    table.join("host", is_host=True)
    assert table.go("host") == (1, 0, 1)
    table.join("guest")
    assert table.last("host", "stop") == 1 and table.last("host", "end") is None
    table.ended("host", 75, 0, 1)
    assert table.go("host") == (2, 0, 2) and table.go("guest") == (2, 1, 2)
    table.members["guest"].send(leaving="SIGTERM")
    table.tend()
    assert table.last("host", "stop") == 2 and table.last("guest", "stop") == 2
    table.ended("guest", 75, 2, 2)
    table.ended("host", 75, 0, 2)
    assert table.go("host") == (3, 0, 1) and table.go("guest") == (2, 1, 2)
    table.members["host"].send(leaving="SIGINT")
    table.tend()
    table.ended("host", 75, 0, 3)
    assert table.last("host", "done") == 75, "without the meeting's machine there is no run"


def test_failures_are_tried_again_as_often_as_asked(seat):
    table = seat(1, 1, restarts=2)
    table.join("host", is_host=True)
    for world, code in ((1, -9), (2, -11)):
        table.ended("host", code, 0, world)
        assert table.go("host")[0] == world + 1 and f"restart {world} of 2" in table.said("host")
    table.ended("host", -11, 0, 3)
    assert table.last("host", "done") == 5
    assert "the same failure at the same step twice" in "\n".join(table.last("host", "lines"))
    assert read_status(table.run).state == "failed"


def test_what_ranks_refuse_ends_the_run_unless_a_newcomer_brought_it(seat):
    table = seat(1, 2)
    table.join("host", is_host=True)
    table.join("other", identity={**SAME, "config": "b2"})
    assert "config is b2 there and a1 here" in table.last("other", "refused") and table.last("host", "stop") is None
    table.join("guest")
    table.ended("host", 75, 0, 1)
    table.ended("guest", 2, 2, 2)
    table.ended("host", 2, 0, 2)
    assert table.last("guest", "refused") and table.go("host") == (3, 0, 1)
    table.ended("host", 2, 0, 3)
    assert table.last("host", "done") == 2


def test_nobody_comes_and_strangers_are_shown_out(seat):
    table = seat(2, 2, wait_s=0.05)
    strangers = [table.connect() for _ in range(3)]
    for stranger, words in zip(strangers, (b"GET / HTTP/1.1\n", b"[1]\n", b'{"hello": 3}\n'), strict=True):
        stranger.socket.sendall(words)
    table.join("host", is_host=True)
    for stranger in strangers:
        stranger.take()
        assert stranger.is_lost
        stranger.close()
    time.sleep(0.05)
    table.tend()
    assert table.last("host", "done") == 5 and "1 of at least 2 machines came" in table.last("host", "lines")[0]


def test_a_silent_member_counts_as_gone(seat, monkeypatch):
    table = seat(1, 2)
    table.join("host", is_host=True)
    table.members["mute"] = table.connect()
    table.heard["mute"] = []
    monkeypatch.setattr(wire, "SILENT_S", 0.1)
    monkeypatch.setattr(wire, "BEAT_EVERY_S", 0.0)
    mute = table.members.pop("mute")
    table.tend(40)
    assert len(table.meeting._members) == 1 and not table.members["host"].is_lost
    mute.close()


def machine(rules, tmp_path, **more):
    said = []
    run = RunFolder(tmp_path / "run")
    return _Machine(rules, 1, (), run, {"is_host": False}, said.append, Request(), **more), said


def test_a_machine_whose_meeting_is_gone_waits_a_while_and_says_why_it_ends(tmp_path, monkeypatch):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        rules = Rules(1, 2, *listener.getsockname(), wait_s=0.0)
        one, said = machine(rules, tmp_path)
        assert one.look() is None and one.wire is not None
        server, _ = listener.accept()
        server.sendall(json.dumps({"say": "world 1"}).encode() + b"\n")
        time.sleep(0.02)
        one.look()
        server.close()
    time.sleep(0.02)
    monkeypatch.setattr(elastic, "RETURN_S", 0.0)
    assert one.look() is None
    assert said[0] == "world 1" and "is gone: ending the ranks here" in said[1]
    with pytest.raises(WorkerFailed, match="did not come back"):
        one.look()
    fresh, _ = machine(rules, tmp_path)
    with pytest.raises(WorkerFailed, match="nobody answers at 127"):
        fresh.look()


def test_somebody_else_behind_the_address_is_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr(wire, "SILENT_S", 0.0)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(8)
        one, said = machine(Rules(1, 2, *listener.getsockname(), wait_s=0.1), tmp_path)
        for _ in range(5):
            one.look()
            time.sleep(0.01)
        listener.close()
        time.sleep(0.1)
        with pytest.raises(WorkerFailed, match="nobody answers"):
            one.look()
            one.look()
    assert not said


def test_a_refused_machine_is_a_config_error(tmp_path):
    one, _ = machine(Rules(1, 2, "127.0.0.1", 1), tmp_path)
    with pytest.raises(ConfigError, match="refused this machine"):
        one._hear({"refused": "torch is 1 there and 2 here"})
