"""Options of a question, and questions behind the same solved ones: what they begin with is computed once."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from families import load_plain, write_family
from tiny import build_tiny_tokenizer, write_tiny_model
from transformers import AutoModelForCausalLM

from duoka.config.schema import ModelConfig
from duoka.model.build import LossModel
from duoka.parallel.task_rows import Row, group_rows
from duoka.parallel.task_score import build_judge, judge_rows, score_rows

CPU = torch.device("cpu")


def draw(*lengths: int) -> list[tuple[int, ...]]:
    numbers = torch.Generator().manual_seed(4)
    return [tuple(torch.randint(3, 200, (length,), generator=numbers).tolist()) for length in lengths]


def questions(count: int = 6) -> list[Row]:
    """Four options each, of one token and of several, behind solved ones that all have; and one that wants nothing."""
    shown, *rest = draw(50, *([12, 1, 1, 3, 5] * count))
    rows = []
    for number in range(count):
        asked, *options = rest[number * 5 : number * 5 + 5]
        before = shown + asked
        rows += [Row(number, place, before + option, len(before)) for place, option in enumerate(options)]
    return [*rows, Row(count, 0, shown, len(shown))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("sharing") / "model")


def judge(folder: Path, no_sharing: str = "") -> tuple[LossModel, list[int]]:
    """The model that tasks ask, and a list that hears how many tokens each pass computes."""
    lm = AutoModelForCausalLM.from_pretrained(folder).eval()
    model = build_judge(lm, ModelConfig(name=str(folder)), folder, CPU, "fp32", no_sharing)
    seen: list[int] = []
    lm.get_input_embeddings().register_forward_hook(lambda _, given, __: seen.append(given[0].numel()))
    return model, seen


def alone(lm: torch.nn.Module, row: Row) -> tuple[float, bool]:
    """By transformers, a row at a time."""
    with torch.no_grad():
        logits = lm(torch.tensor([row.ids]), use_cache=False).logits[0, row.start - 1 : -1]
    wanted = torch.tensor(row.wanted, dtype=torch.long)
    logps = logits.log_softmax(-1).gather(1, wanted[:, None])
    return float(logps.sum()), bool((logits.argmax(-1) == wanted).all())


def check(model: LossModel, plain: torch.nn.Module, rows: list[Row]) -> None:
    for row, (logp, is_likeliest), same in zip(
        rows, judge_rows(model, rows, CPU), score_rows(model, rows, CPU), strict=True
    ):
        want, is_right = alone(plain, row)
        assert logp == same == pytest.approx(want, rel=1e-5, abs=1e-6)
        assert is_likeliest == is_right


def test_options_have_the_numbers_that_they_have_alone_and_their_question_is_read_once(folder: Path) -> None:
    rows, plain = questions(), AutoModelForCausalLM.from_pretrained(folder).eval()
    best = int(plain(torch.tensor([rows[0].prompt])).logits[0, -1].argmax())
    rows[0] = Row(0, 0, (*rows[0].prompt, best), rows[0].start)
    model, seen = judge(folder)
    own = model.core.config._attn_implementation
    check(model, plain, rows)
    assert any(is_likeliest for _, is_likeliest in judge_rows(model, rows[:3], CPU))
    assert seen[0] == 50 + 6 * (12 + 2 + 4) and model.core.config._attn_implementation == own
    whole, computed = judge(folder, "nobody wants it")
    check(whole, plain, rows)
    assert computed[0] > 6 * seen[0]


def test_a_model_that_does_not_keep_documents_apart_computes_each_row_whole(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "lfm2", "lfm2", tokenizer=build_tiny_tokenizer())
    model, seen = judge(folder)
    rows = questions(2)
    check(model, load_plain(folder), rows)
    assert model.no_sharing and seen[0] == 8 * max(len(row.read) for row in rows)


def test_groups_hold_what_begins_alike_and_no_more_work_than_whole_rows(folder: Path) -> None:
    rows = [row for row in questions() if row.wanted]
    shuffled = [rows[place] for place in torch.randperm(24, generator=torch.Generator().manual_seed(1)).tolist()]
    groups = group_rows(shuffled, 2, shared=True)
    assert sorted(itertools.chain(*groups)) == list(range(24)) and max(map(len, groups)) == 8
    assert groups == group_rows(shuffled, 2, shared=True)
    sizes = [{place: shuffled[place].item for place in group} for group in groups]
    assert all(len(set(group.values())) <= 3 for group in sizes), "questions are not cut into more groups than needed"
    apart = [Row(0, 0, ids, 1) for ids in draw(*[30] * 12)]
    assert [len(group) for group in group_rows(apart, 4, shared=True)] == [4, 4, 4]
    assert [len(group) for group in group_rows(apart, 5, shared=False)] == [5, 5, 2]
