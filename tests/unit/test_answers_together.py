"""Answers to prompts of many lengths at once: each as if it were alone, in every architecture that takes part."""

import pytest
import torch
from families import write_family

from duoka.model.answer import answer_rows, with_cache
from duoka.model.build import LossModel, load_model
from duoka.model.request import ModelRequest
from duoka.model.sampling import Sampling, draw_rows, uniform
from duoka.model.together import answer_together, computes_by_rows, with_slots
from duoka.train.rl.draw import share_rows, width_of

SAMPLING = Sampling(temperature=1.0)
PROMPTS = [[5, 9, 11, 7, 22, 31], [8], [5, 9, 11], [5, 9, 11, 7, 22, 31], list(range(40, 61)), [3, 4]]
ROOMS = [7, 9, 3, 7, 5, 0]


def build(folder, family):
    return LossModel(load_model(ModelRequest(write_family(folder / family, family), dtype=torch.float32))).eval()


def chooser(seeds):
    """By numbers that are counted, as in training; the model's own logits decide, so that small errors show in them."""

    def choose(logits, position, rows):
        return draw_rows(logits, SAMPLING, [uniform(seeds[row], position) for row in rows])

    return choose


def together(model, rows, stops=frozenset(), width=8):
    with with_slots(model.core):
        asked = [(PROMPTS[row], ROOMS[row]) for row in rows]
        return answer_together(model, asked, stops, width, chooser(rows))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "phi3", "olmo2", "gpt_neox"])
def test_rows_are_what_they_are_alone(tmp_path, family):
    model = build(tmp_path, family)
    assert computes_by_rows(model.core)
    found = together(model, range(len(PROMPTS)))
    assert [len(one.ids) for one in found] == ROOMS
    before = model.core.config._attn_implementation
    for row, one in enumerate(found):
        (alone,) = together(model, [row])
        assert alone.ids == one.ids and alone.logps == one.logps, "the same bits, whoever stands beside it"
        if not ROOMS[row]:
            continue
        with with_cache(model.core):
            choose = lambda logits, position, row=row: chooser([row])(logits, position, [0])  # noqa: E731
            (wanted,) = answer_rows(model, [PROMPTS[row]], frozenset(), ROOMS[row], choose)
        assert wanted.ids == one.ids
        torch.testing.assert_close(torch.tensor(wanted.logps), torch.tensor(one.logps), rtol=0, atol=2e-5)
    assert model.core.config._attn_implementation == before


def test_a_row_ends_at_its_stop_token_and_others_go_on(tmp_path):
    model = build(tmp_path, "llama")
    whole = together(model, range(len(PROMPTS)))
    stop = whole[0].ids[2]
    found = together(model, range(len(PROMPTS)), frozenset({stop}))
    at = whole[0].ids.index(stop)
    assert found[0].ended and found[0].stop == stop and found[0].ids == whole[0].ids[:at]
    assert found[0].logps == whole[0].logps[: at + 1]
    others = [row for row in range(1, len(PROMPTS)) if stop not in whole[row].ids]
    assert others and all(found[row] == whole[row] for row in others)


def test_answers_go_on_where_they_are_cut_over_few_rows_and_many(tmp_path):
    model = build(tmp_path, "llama")
    narrow, wide = (together(model, range(len(PROMPTS)), width=width) for width in (2, 32))
    assert [one.ids for one in narrow] == [one.ids for one in wide]


@pytest.mark.parametrize("family", ["qwen3_moe", "mamba2", "lfm2", "gpt_oss", "bloom"])
def test_what_cannot_be_computed_by_rows_is_seen(tmp_path, family):
    request = ModelRequest(write_family(tmp_path / family, family), dtype=torch.float32, attention="eager")
    assert not computes_by_rows(load_model(request))


def test_ranks_share_rows_evenly_and_a_pass_is_as_wide_on_any_number_of_them():
    lengths = [7, 3, 7, 9]
    every = {(prompt, sample) for prompt in range(4) for sample in range(6)}
    for ranks in (1, 2, 3, 5, 30):
        shares = share_rows(range(4), lengths, 6, 4, ranks)
        rows = [row for share in shares for part in share for row in part]
        assert len(shares) == ranks and len(rows) == len(every) and set(rows) == every
        counts = [sum(map(len, share)) for share in shares]
        assert max(counts) - min(counts) <= 1 and all(len(part) <= 4 for share in shares for part in share)
    assert [width_of(count, 64) for count in (1, 8, 9, 64, 256, 257, 9999)] == [8, 8, 16, 32, 32, 64, 64]
    assert width_of(64, 5) == 5
