"""Answers drawn for training: by counted numbers, in parts that no number of ranks changes; and the exact gradient."""

import itertools

import pytest
import torch

from duoka.data.feed.epoch_plan import MicroPlan
from duoka.data.feed.loader import GlobalBatch
from duoka.model.sampling import Sampling, choose_token, draw_rows, uniform
from duoka.train.rl.advantages import advantages
from duoka.train.rl.batch import AnswerRows, Learned, build_answers
from duoka.train.rl.draw import make_units, share_units
from duoka.train.rl.rollouts import Rollout, RolloutStep, read_rollouts, write_rollouts
from duoka.train.stages.stage import build_stage


@pytest.mark.parametrize("keep", [{}, {"top_k": 5}, {"top_p": 0.6}])
def test_many_rows_are_drawn_as_one_is(keep):
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(64, 97, generator=generator)
    sampling = Sampling(temperature=0.8, seed=11, **keep)
    numbers = [uniform(11, row, 4) for row in range(64)]
    tokens, logps = draw_rows(logits, sampling, numbers)
    assert tokens.tolist() == [choose_token(row, sampling, 4, sample=at) for at, row in enumerate(logits)]
    whole = (logits.double() / 0.8).log_softmax(-1)
    torch.testing.assert_close(logps, whole[torch.arange(64), tokens], rtol=0, atol=1e-13)  # of all tokens


def test_draws_are_counted_by_all_that_tells_them_apart():
    counts = list(itertools.product((1, 2), (0, 1), (0, 1), (0, 1), (0, 1)))
    numbers = {uniform(*one) for one in counts}
    assert len(numbers) == len(counts) and all(0 <= one < 1 for one in numbers)
    assert uniform(3, 4, 5) == uniform(3, 4, 5)


def test_units_are_of_one_length_and_no_number_of_ranks_changes_them():
    lengths = [7, 9, 7, 8, 9, 7]
    units = make_units(range(6), lengths, samples=4, rows=6)
    assert sorted(row for unit in units for row in unit) == [(p, s) for p in range(6) for s in range(4)]
    assert all(len({lengths[prompt] for prompt, _ in unit}) == 1 and len(unit) <= 6 for unit in units)
    for ranks in (1, 2, 3, 9):
        shares = share_units(units, ranks)
        assert sorted(unit for share in shares for unit in share) == sorted(units)
    assert make_units([5, 0, 2], lengths, 4, 6) == make_units([0, 2, 5], lengths, 4, 6)


@pytest.mark.parametrize(
    "text", ["a\u2028b", "a\x85b", "a\x0b\x0c\x1c\x1d\x1eb\r\n", "\u2029", '"\\', "多卡 😀", "\ufffd"]
)
def test_recorded_answers_come_back_whatever_stands_in_them(tmp_path, text):
    one = Rollout(0, 0, text, (3,), (4, 2), True, text, (-1.5, -0.25), (None, 1.0), None, (text,), (-1.0, 0.0), None)
    step = RolloutStep(7, "of these", (one, one))
    write_rollouts(tmp_path, step)
    assert read_rollouts(tmp_path, 7) == step


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_models_whose_attention_torch_s_own_lacks_answer_too(tmp_path, family):
    """Soft caps and sinks: trained by an attention of their own, and read from files by it."""
    from families import write_family

    from duoka.model.answer import answer_rows, with_cache
    from duoka.model.build import LossModel, load_model
    from duoka.model.request import ModelRequest

    folder = write_family(tmp_path / family, family)
    request = ModelRequest(folder, dtype=torch.float32, attention="sdpa")
    model = LossModel(load_model(request)).eval()
    prompt = [5, 9, 11, 7]
    (want,) = answer_rows(model, [prompt], frozenset(), 6)
    alone = prompt[:]
    for _ in range(6):
        with torch.no_grad():
            alone.append(int(model.core(input_ids=torch.tensor([alone])).logits[0, -1].argmax()))
    assert want.ids == alone[4:]
    trained = LossModel(load_model(ModelRequest(folder, dtype=torch.float32))).eval()
    before = trained.core.config._attn_implementation
    with with_cache(trained.core):
        assert answer_rows(trained, [prompt], frozenset(), 6)[0].ids == want.ids
    assert trained.core.config._attn_implementation == before


# --- a toy whose answers can all be counted ---

WORDS, STOP, LENGTH, SAMPLES, TRIALS = 5, 0, 2, 4, 1500


class Toy(torch.nn.Module):
    """Logits of a word from the one before; what LossModel answers, for answers of up to two words."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.table = torch.nn.Parameter(torch.randn(WORDS, WORDS, dtype=torch.float64, generator=generator))

    def forward(self, input_ids, labels, temperature=1.0, **_):
        every = (self.table[input_ids] / temperature).log_softmax(-1)
        logps = every.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        return logps * (labels >= 0), -(every.exp() * every).sum(-1) * (labels >= 0)


def all_answers():
    """Every answer: it ends with the stop word, or is cut at two."""
    yield (STOP,)
    for first in range(1, WORDS):
        for second in range(WORDS):
            yield (first, second)


def reward(ids):
    return (3 * ids[0] + (ids[1] if len(ids) > 1 else 7)) % 4 / 3


def chance(table, prompt, ids):
    every, total = table.log_softmax(-1), 0.0
    for before, word in zip((prompt, *ids), ids, strict=False):
        total = total + every[before, word]
    return total


def draw(table, prompt, trial, sample):
    ids = []
    while len(ids) < LENGTH:
        number = [uniform(1, trial, prompt, sample, len(ids))]
        tokens, _ = draw_rows(table[[ids[-1] if ids else prompt]], Sampling(temperature=1.0), number)
        ids.append(int(tokens))
        if ids[-1] == STOP:
            break
    return tuple(ids)


@pytest.mark.parametrize(
    ("algorithm", "scale"),
    # Less its group's own mean an answer is worth (G - 1) / G of what it would be less the others'.
    [("rloo", 1.0), ("dr_grpo", (SAMPLES - 1) / SAMPLES / LENGTH)],
)
def test_the_estimate_s_mean_is_the_exact_gradient_of_the_expected_reward(algorithm, scale):
    from duoka.config.schema import RunConfig

    config = RunConfig.model_validate({
        "model": "demo", "stage": "rl", "data": {"train": ["task:sort"]},
        "rl": {"algorithm": algorithm, "samples": SAMPLES, "max_new_tokens": LENGTH},
    })  # fmt: skip
    stage, toy, prompt = build_stage(config), Toy(), 2
    expected = sum(chance(toy.table, prompt, ids).exp() * reward(ids) for ids in all_answers())
    assert abs(float(sum(chance(toy.table, prompt, ids).exp() for ids in all_answers())) - 1) < 1e-12
    (exact,) = torch.autograd.grad(expected, [toy.table])
    found = []
    for trial in range(TRIALS):
        answers = [draw(toy.table.detach(), prompt, trial, sample) for sample in range(SAMPLES)]
        (worth,) = advantages([[reward(ids) for ids in answers]], config.rl.row.advantage)
        learned = [
            Learned(at, Rollout(0, at, "", (prompt,), ids, True, "", (0.0,) * len(ids)), value)
            for at, (ids, value) in enumerate(zip(answers, worth, strict=True))
        ]
        rows = AnswerRows(learned)
        micro = build_answers(rows, MicroPlan((tuple(range(SAMPLES)),)), True, 0)
        batch = GlobalBatch([micro], rows.num_targets, SAMPLES, 0, 0, 0, rows.lengths)
        sums = stage.sums(toy, micro, torch.device("cpu"))
        loss = sum(value / stage.denominators(batch)[name] for name, value in sums.losses.items())
        found.append(torch.autograd.grad(-loss, [toy.table])[0])
    every = torch.stack(found)
    error = (every.mean(0) - scale * exact).abs()
    allowed = 4.5 * every.std(0) / TRIALS**0.5 + 1e-9
    assert (error < allowed).all() and float((scale * exact).abs().max()) > 5 * float(allowed.max()) / 4.5
