"""Two starts into one folder: the first works on, and nothing of it is touched by the one that is refused."""

import errno
import fcntl
import socket

import pytest

from duoka.cluster import elastic
from duoka.cluster.connection import read_secret
from duoka.cluster.launcher import Spec
from duoka.cluster.meeting import Rules
from duoka.cluster.pipeline.manifest import hold_pipeline
from duoka.cluster.run_lock import hold_run
from duoka.errors import ConfigError
from duoka.parallel.deepspeed_disk import SwapFolder
from duoka.runs.cache import hold_lock
from duoka.runs.folder import RunFolder
from duoka.watch.alerts import only_one


def rules_here():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return Rules(1, 2, *free.getsockname())


@pytest.fixture
def spec(tmp_path, monkeypatch):
    monkeypatch.setenv("DUOKA_ALLOW_LOOPBACK", "1")
    run = RunFolder(tmp_path / "run")
    run.make()
    return Spec(("true",), 1, run)


def test_a_second_rendezvous_on_another_port_takes_nothing_from_the_first(spec):
    with elastic.open_meeting(rules_here(), spec) as first:
        secret = read_secret(spec.run.path)
        with pytest.raises(ConfigError, match="another process works in"), elastic.open_meeting(rules_here(), spec):
            pass
        assert first.is_alive() and read_secret(spec.run.path) == secret, "machines of the first may come back"
    with elastic.open_meeting(rules_here(), spec) as again:
        assert again.is_alive()


def test_a_rendezvous_is_refused_where_a_run_without_one_works(spec):
    with hold_run(spec.run):
        (spec.run.logs / "beat-rank00000.json").write_text("{}")
        with pytest.raises(ConfigError, match="another process works in"), elastic.open_meeting(rules_here(), spec):
            pass
        assert not read_secret(spec.run.path) and (spec.run.logs / "beat-rank00000.json").exists()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_cache_on_a_file_system_without_locks_is_used_without(tmp_path, monkeypatch, number):
    """Lustre without -o flock, NFS without lockd: every start ended there with "Function not implemented"."""

    def refuse(file, how):
        raise OSError(number, "no locks here")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with hold_lock(tmp_path / "lock", on_wait=lambda: pytest.fail("nobody is waited for")):
        pass
    run = RunFolder(tmp_path / "run")
    with only_one(run) as is_mine:
        assert is_mine, "alerts of all runs there were lost: another process told them, it said"
    with hold_pipeline(tmp_path / "stages"):
        pass
    assert SwapFolder(tmp_path / "swap", run).path.is_dir()


def test_other_faults_of_a_lock_are_told(tmp_path, monkeypatch):
    def refuse(file, how):
        raise OSError(errno.EIO, "the disk")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(OSError, match="the disk"), hold_lock(tmp_path / "lock", on_wait=lambda: None):
        pass
