"""What is lost is counted and listed: one wrong record in 10,000, the run folder's data files, plan against loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_kit import config_for, simple_records, write_jsonl, write_ten_thousand
from test_data_loader import loader_of, store_of

from duoka.data.feed.loader import IGNORED
from duoka.data.prepare import prepare_data
from duoka.data.report import write_data_report
from duoka.data.tokens import tokenize
from duoka.errors import Faults
from duoka.runs.folder import RunFolder
from duoka.units import Amount


@pytest.fixture(scope="module")
def ten_thousand(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ten_thousand(tmp_path_factory.mktemp("many") / "many.jsonl")


@pytest.mark.parametrize("on_bad", ["error", "skip"])
def test_one_wrong_record_in_10_000_is_found_by_one_process_and_by_two(
    ten_thousand: Path, tiny_tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_bad: str
) -> None:
    monkeypatch.setattr(tokenize, "SMALL_BYTES", 0)
    outcomes = []
    for workers in (1, 2):
        monkeypatch.setenv("DUOKA_CACHE", str(tmp_path / f"cache-{workers}"))
        config = config_for(ten_thousand, on_bad=on_bad, workers=workers)
        if on_bad == "error":
            with pytest.raises(Faults) as caught:
                prepare_data(config, tmp_path, tiny_tokenizer_folder)
            outcomes.append([(fault.file, fault.line) for fault in caught.value.faults])
            continue
        prepared = prepare_data(config, tmp_path, tiny_tokenizer_folder)
        run = RunFolder(tmp_path / f"run-{workers}")
        run.make()
        write_data_report(prepared.report, run.path)
        listed = [json.loads(line) for line in (run.path / "bad.jsonl").read_text(encoding="utf-8").splitlines()]
        counts = json.loads((run.path / "data.json").read_text(encoding="utf-8"))["sets"][0]["counts"]
        assert (counts["num_records"], counts["num_kept"], counts["num_bad"]) == (10_000, 9_999, 1)
        outcomes.append([[(one["file"], one["line"]) for one in listed], prepared.train.fingerprint])
    assert outcomes[0] == outcomes[1]
    expected = [(str(ten_thousand), 7_655)]
    assert (outcomes[0] if on_bad == "error" else outcomes[0][0]) == expected


def test_a_wrong_record_is_listed_whatever_stands_in_it(tmp_path: Path, tiny_tokenizer_folder: Path) -> None:
    path = write_jsonl(tmp_path / "a\u2028\x85.jsonl", simple_records(3))
    with path.open("a", encoding="utf-8") as file:
        file.write(
            '{"messages": [{"role": "user", "content": "a\u2028b\x85c"}, {"role": "wrong\u2028", "content": "c"}]}\n'
        )
    report = prepare_data(config_for(path, on_bad="skip"), tmp_path, tiny_tokenizer_folder).report
    write_data_report(report, tmp_path)
    (wrong,) = (json.loads(line) for line in (tmp_path / "bad.jsonl").read_text(encoding="utf-8").split("\n") if line)
    assert wrong["file"] == str(path) and wrong["line"] == 4


def test_a_mended_set_leaves_no_list_of_wrong_records(tmp_path: Path, tiny_tokenizer_folder: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", simple_records(3))
    report = prepare_data(config_for(path), tmp_path, tiny_tokenizer_folder).report
    (tmp_path / "bad.jsonl").write_text("of an earlier start")
    write_data_report(report, tmp_path)
    assert not (tmp_path / "bad.jsonl").exists()


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_the_plans_target_count_is_what_a_loss_counts(tmp_path: Path, num_ranks: int, packing: bool) -> None:
    """Counted by a loss that knows nothing of the plan: every label that is no -100."""
    store = store_of(tmp_path / "part", np.random.default_rng(1).integers(2, 65, 53).tolist())
    options: dict[str, Any] = {"batch": Amount(9, "samples"), "micro": Amount(100, "tokens"), "packing": packing}
    walks = [loader_of(store, rank, num_ranks, **options).from_cursor(0, 0, 2.0) for rank in range(num_ranks)]
    total = 0
    for parts in zip(*walks, strict=True):
        counted = sum(int((one.labels != IGNORED).sum()) for part in parts for one in part.micro_batches)
        assert {part.global_targets for part in parts} == {counted}
        total += counted
    assert total == 2 * int(store.num_targets.sum())
