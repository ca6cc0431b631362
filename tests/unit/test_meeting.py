"""The meeting of an elastic world, with members that only talk: who takes part, when worlds end, what is refused."""

import contextlib
import json
import os
import socket
import time
import types

import pytest

from duoka.cluster import admission, connection, elastic, meeting
from duoka.cluster.connection import Wire, prove, write_secret
from duoka.cluster.elastic import Machine
from duoka.cluster.launcher import Spec
from duoka.cluster.meeting import Meeting, Rules
from duoka.cluster.supervise import Request
from duoka.errors import ConfigError, WorkerFailed
from duoka.runs.folder import RunFolder
from duoka.runs.status import read_status

SAME = {"config": "a1", "--nproc": "2"}


class Table:
    """A meeting and its members, in one thread."""

    def __init__(self, tmp_path, least, most, *, counts=(), **rules):
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen(32)
        self.address, self.run = listener.getsockname(), RunFolder(tmp_path / "run")
        self.run.make()
        self.secret = write_secret(self.run.path)
        typed = Rules(least, most, *self.address, **rules)
        self.meeting = Meeting([listener], typed, self.run, 2, SAME, self.secret, counts)
        self.members, self.heard = {}, {}

    def connect(self):
        return Wire(socket.create_connection(self.address))

    def join(self, name, *, identity=SAME, is_host=False, wish=0, secret=None, **more):
        one = self.members[name] = self.connect()
        self.heard[name] = []
        nonce = self.hear(name, "meeting")
        proof = prove(secret or self.secret, "machine", (nonce, "mine"))
        hello = {"name": name, "identity": identity, "is_host": is_host, "wish": wish, **more}
        one.send(hello=hello, nonce="mine", proof=proof)
        self.tend()
        if secret is None and not more:
            assert self.last(name, "welcome") == prove(self.secret, "meeting", (nonce, "mine"))

    def hear(self, name, word):
        for _ in range(200):
            self.tend(1)
            if self.last(name, word) is not None:
                return self.last(name, word)
        raise AssertionError(f"{name} never heard {word}: {self.heard[name]}")

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

    def code(self, name):
        return self.last(name, "done")["exit_code"]

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
    monkeypatch.setattr(meeting, "FAREWELL_S", 0.1)
    monkeypatch.setattr(connection, "GOODBYE_S", 0.01)
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
    assert table.code("host") == 0 == table.code("spare")


def test_a_newcomer_makes_all_save_and_a_leaver_too(seat):
    table = seat(1, 2)
    table.join("host", is_host=True)
    table.join("guest")
    assert table.last("host", "stop") == 1 and table.last("host", "end") is None
    table.ended("host", 75, 0, 1)
    assert read_status(table.run).state == "starting" and read_status(table.run).pid == os.getpid(), "the run goes on"
    assert table.go("host") == (2, 0, 2) and table.go("guest") == (2, 1, 2) and "step 0" not in table.said("host")
    table.members["guest"].send(leaving="SIGTERM")
    table.tend()
    assert [table.last(name, "stop") for name in ("host", "guest")] == [2, 2]
    table.ended("guest", 75, 2, 2)
    table.ended("host", 75, 0, 2)
    assert table.go("host") == (3, 0, 1) and table.go("guest") == (2, 1, 2)
    table.members["host"].send(leaving="SIGINT")
    table.tend()
    table.ended("host", 75, 0, 3)
    assert table.code("host") == 75 and read_status(table.run).state == "stopped", "no run without the meeting"


def test_failures_are_tried_again_as_often_as_asked(seat):
    table = seat(1, 1, restarts=2)
    table.join("host", is_host=True)
    for world, code in ((1, -9), (2, -11)):
        table.ended("host", code, 0, world)
        assert table.go("host")[0] == world + 1 and f"restart {world} of 2" in table.said("host")
    table.ended("host", -11, 0, 3)
    assert table.code("host") == 5 and "the same failure at the same step twice" in "\n".join(
        table.last("host", "done")["lines"]
    )
    assert read_status(table.run).state == "failed"


def test_what_ranks_refuse_ends_the_run_unless_a_newcomer_brought_it(seat):
    table = seat(1, 2)
    table.join("host", is_host=True)
    table.join("other", identity={**SAME, "config": "b2"})
    for words in (table.last("other", "refused"), table.said("host")):  # true whoever reads it
        assert "config is b2 on other and a1 on the machine of the meeting" in words and not table.last("host", "stop")
    table.join("guest")
    table.ended("host", 75, 0, 1)
    table.ended("guest", 2, 2, 2)
    table.ended("host", 2, 0, 2)
    assert table.last("guest", "refused") and table.go("host") == (3, 0, 1)
    table.ended("host", 2, 0, 3)
    assert table.code("host") == 2


def test_nobody_comes(seat):
    table = seat(2, 2, wait_s=0.05)
    table.join("host", is_host=True)
    time.sleep(0.05)
    table.tend()
    assert table.code("host") == 5 and "1 of at least 2 machines joined" in table.last("host", "done")["lines"][0]


HOSTILE = (
    b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b'{"hello": 3}\n', b"\xff\xfe\x00\n", b"[" * 3000 + b"\n", b"1" * 4000 + b"\n",
    b'{"hello": {"name": "x", "identity": {}, "is_host": true, "wish": 0}, "nonce": "a", "proof": "b"}\n',
    b'{"hello": {}, "nonce": "a", "proof": "\xc3\xa9"}\n', b'{"hello": {}, "nonce": [1], "proof": null}\n',
    b'{"ended": 1, "exits": []}\n', b'{"leaving": "SIGTERM"}\n', b"x" * 33000,
)  # fmt: skip


def test_unverified_peers_are_rejected_and_a_world_goes_on(seat, monkeypatch):
    """Port scanners, other programs, machines without the secret: none is listened to, and nobody waits for them."""
    table = seat(1, 2)
    table.join("host", is_host=True)
    hostile = [table.connect() for _ in HOSTILE]
    table.tend()
    for line, words in zip(hostile, HOSTILE, strict=True):
        line.socket.sendall(words)
    monkeypatch.setattr(admission, "PARTING_S", 0.0)
    table.tend(8)
    for peer, words in zip(hostile, HOSTILE, strict=True):
        heard = peer.take()
        assert peer.is_lost, f"{words[:40]} is still there"
        assert all(set(one) <= {"meeting", "unknown"} for one in heard), "a peer learns nothing"
        peer.close_now()
    assert len(table.meeting._members) == 1 and table.last("host", "stop") is None
    assert table.said("host").count("127.0.0.1 was rejected") == 1, "said once, however often"
    table.join("other", secret="of another run")
    assert table.last("other", "unknown") is True and table.last("other", "refused") is None


def test_crowds_and_sluggards_at_the_door_cost_nothing(seat, monkeypatch):
    monkeypatch.setattr(admission, "MOST_UNVERIFIED", 4)
    table = seat(1, 2)
    table.join("host", is_host=True)
    crowd = [table.connect() for _ in range(8)]
    table.tend()
    assert len(table.meeting._admission._unverified) == 4, "the oldest had to go"
    table.join("guest")
    assert table.last("host", "stop") == 1, "and who belongs here still comes in"
    monkeypatch.setattr(admission, "GREETING_S", 0.0)
    for peer in crowd:
        peer.send(beat=True)
    table.tend()
    assert not table.meeting._admission._unverified, "a beat is no greeting"
    for peer in crowd:
        peer.close_now()


@pytest.mark.parametrize("words", [
    {"ended": 1, "exits": [{"rank": 0}]}, {"ended": 1, "exits": 7}, {"ended": 1},
    {"ended": 1, "exits": [{"rank": 5, "pid": 1, "code": 0, "time": 1, "by_us": False}] * 2},
    {"ended": 1, "exits": [{"rank": float("inf"), "pid": 1, "code": 0, "time": 1, "by_us": False}] * 2},
])  # fmt: skip
def test_a_member_that_talks_nonsense_is_gone(seat, words):
    table = seat(1, 1)
    table.join("host", is_host=True)
    table.members["host"].send(**words)
    table.tend()
    assert not table.meeting._members and table.meeting.is_alive() is False


def test_names_from_elsewhere_cannot_write_on_our_terminal(seat):
    table = seat(1, 3)
    table.join("host", is_host=True)
    table.join("\x1b]0;mine\x07 \ud800", wish=1)
    assert "?]0;mine? ? has joined" in table.said("host")
    table.join("odd", wish="soon")
    assert "odd" not in table.said("host")


class CutLink:
    """Between a machine and the meeting: passes on what both say, until it is cut without a word to either."""

    def __init__(self, address):
        self.address, self.is_cut = address, False
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setblocking(False)
        self.pairs = []

    def pump(self):
        with contextlib.suppress(BlockingIOError):
            self.pairs.append((self.listener.accept()[0], socket.create_connection(self.address)))
        for one, other in self.pairs if not self.is_cut else ():
            for source, target in ((one, other), (other, one)):
                source.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    target.sendall(source.recv(1 << 16))

    def close(self):
        for part in (self.listener, *(end for pair in self.pairs for end in pair)):
            part.close()


def test_a_cut_link_is_noticed_by_both_and_by_the_machine_first(seat, monkeypatch, tmp_path):
    """No side is told. The ranks that are cut off end before the others begin a world without them."""
    monkeypatch.setattr(connection, "BEAT_EVERY_S", 0.01)
    monkeypatch.setattr(connection, "SILENT_S", 0.3)
    monkeypatch.setattr(admission, "LOST_S", 0.7)
    table = seat(1, 2)
    table.join("host", is_host=True)
    link = CutLink(table.address)
    hello = {"name": "far", "identity": SAME, "is_host": False, "wish": 1}
    far, said = machine(Rules(1, 2, *link.listener.getsockname()), tmp_path, hello)
    ended = []

    def until(is_so):
        for _ in range(2000):
            link.pump()
            far.look()
            table.tend(1)
            if is_so():
                return
        raise AssertionError((said, table.said("host")))

    until(lambda: len(table.meeting._members) == 2 and far.is_welcome)
    far.ranks = types.SimpleNamespace(look=lambda: True, close=lambda: ended.append(len(table.meeting._members)))
    link.is_cut = True
    until(lambda: ended)
    assert ended == [2] and "is lost: ending the ranks here" in said[-1]
    far.request.stop_by = "SIGTERM"
    until(lambda: len(table.meeting._members) == 1)
    link.close()
    assert connection.LOST_S > connection.SILENT_S and connection.LOST_S >= 10 + 2 * 2


def machine(rules, tmp_path, hello=None):
    said, run = [], RunFolder(tmp_path / "run")
    run.make()
    return Machine(rules, Spec((), 1, run), hello or {"is_host": False}, said.append, Request()), said


def answer(server, one, secret):
    """What a meeting says to who connects, as far as the welcome."""
    server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    server.sendall(b'{"meeting": "theirs"}\n')
    for _ in range(100):
        one.look()
        time.sleep(0.002)
        if one.nonces[1]:
            break
    proof = prove(secret, "meeting", one.nonces)
    server.sendall(json.dumps({"welcome": proof}).encode() + b"\n")


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(elastic, "RETRY_EVERY_S", 0.0)


def test_a_machine_whose_meeting_is_gone_waits_a_while_and_says_why_it_ends(tmp_path, monkeypatch, at_once):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        rules = Rules(1, 2, *listener.getsockname(), wait_s=0.0)
        one, said = machine(rules, tmp_path)
        assert one.look() is None
        listener.accept()[0].close()  # as a forwarder of ports does whose other end is down
        time.sleep(0.02)
        with pytest.raises(WorkerFailed, match=r"no rendezvous at 127(.|\n)*closes each connection at once"):
            one.look()
        secret = write_secret(one.spec.run.path)
        assert one.look() is None and one.wire is not None
        server, _ = listener.accept()
        answer(server, one, secret)
        server.sendall(json.dumps({"say": "world 1"}).encode() + b"\n")
        time.sleep(0.02)
        one.look()
        server.close()
    time.sleep(0.02)
    monkeypatch.setattr(elastic, "RETURN_S", 0.0)
    assert one.look() is None
    assert said[0] == "world 1" and "is lost: ending the ranks here" in said[1]
    with pytest.raises(WorkerFailed, match="did not come back"):
        one.look()
    fresh, _ = machine(rules, tmp_path)
    with pytest.raises(WorkerFailed, match="no rendezvous at 127"):
        fresh.look()


ORDERS = b'{"go": 1, "node": 0, "num_nodes": 1, "port": 1}\n{"done": {"kind": "done", "exit_code": 0}}\n'


@pytest.mark.parametrize(("words", "why"), [
    (b"", "sends nothing"), (b"HTTP/1.1 400 Bad Request\r\n", "is no duoka rendezvous"),
    (ORDERS, "is no duoka rendezvous"),
    (b'{"meeting": "a"}\n{"welcome": "b"}\n' + ORDERS, "is no duoka rendezvous"),
    (b'{"meeting": "a"}\n{"unknown": true}\n', "is of another run"),
])  # fmt: skip
def test_somebody_else_behind_the_address_gives_no_orders(tmp_path, monkeypatch, at_once, words, why):
    monkeypatch.setattr(elastic, "FOREIGN_S", -1.0)
    monkeypatch.setattr(connection, "SILENT_S", 0.02 if not words else 5.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one, said = machine(Rules(1, 2, *listener.getsockname()), tmp_path)
        write_secret(one.spec.run.path)
        connections = []
        listener.setblocking(False)
        with pytest.raises(ConfigError, match=f"this machine cannot join at 127.*{why}") as caught:
            for _ in range(200):
                assert one.look() is None
                with contextlib.suppress(BlockingIOError):
                    connections.append(listener.accept()[0])
                    connections[-1].sendall(words)
                time.sleep(0.002)
        for opened in connections:
            opened.close()
    assert one.ranks is None and len(said) == 1 and why in said[0], "said once"
    assert all(words in str(caught.value) for words in (f"pid {os.getpid()}", "the same folder for all machines"))


def test_a_refused_machine_is_a_config_error(tmp_path):
    one, _ = machine(Rules(1, 2, "127.0.0.1", 1), tmp_path)
    with pytest.raises(ConfigError, match="refused this machine"):
        one._hear({"refused": "torch is 1 there and 2 here"})
