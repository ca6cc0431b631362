"""How much of an exchange happened while the rank computed: the union of spans, less what was waited."""

from pathlib import Path

import pytest

from duoka.comm.ledger import Ledger
from duoka.runs.folder import RunFolder
from duoka.watch.costs import exchange_rows
from duoka.watch.history import History


def test_exchanges_at_once_are_counted_once():
    ledger = Ledger(spans=[[5.0, 6.0], [0.0, 2.0], [1.0, 3.0], [1.5, 1.75], [7.0, 0.0]])
    assert ledger.exchanged_s() == pytest.approx(4.0), "the last is not done yet"


def test_waiting_is_an_exchange_and_an_end_after_the_step_is_no_part_of_the_next():
    ledger = Ledger()
    late = ledger.begin()
    with ledger.waiting():
        pass
    assert [done > 0 for _, done in ledger.spans] == [False, True]
    ledger.take()
    late()
    assert ledger.exchanged_s() == 0.0


def logged(*pairs):
    history = History(RunFolder(Path("nowhere")))
    history.apply({"type": "traffic", "step": 2, "kinds": {"all-reduce": {"num_calls": 3, "sent_bytes": 1000}}})
    for step, (exchanged, waited) in enumerate(pairs, start=1):
        line = {"type": "step", "step": step, "loss": 1.0, "sent_bytes": 1000, "wait_s": waited}
        history.apply(line | ({} if exchanged is None else {"exchanged_s": exchanged}))
    return history


def test_the_end_report_says_what_was_hidden():
    """The first step, which lays out buckets, is left out."""
    history = logged((9.0, 9.0), (0.4, 0.1), (0.6, 0.1))
    assert history.exchange_hidden() == (pytest.approx(0.5), pytest.approx(0.8))
    assert "0.5 s a step, 80% of it while rank 0 computed" in [text for _, text in exchange_rows(history)]


def test_nothing_is_said_where_nothing_was_seen():
    assert logged((None, 0.2), (None, 0.2)).exchange_hidden() is None
