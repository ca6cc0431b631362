"""Rotary embeddings that depend on a text's length: each document is turned as alone, whatever is read with it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from families import packed, padded
from needs import since
from transformers import AutoConfig, AutoModelForCausalLM

from duoka.data.feed.epoch_plan import MicroPlan
from duoka.data.feed.loader import build_batch
from duoka.data.tokens.template import Sample
from duoka.data.tokens.token_store import Arrays, TokenPart, TokenStore, pack_arrays, write_part
from duoka.model.answer import answer_rows, with_cache
from duoka.model.attention import register_attention
from duoka.model.build import LossModel
from duoka.model.own_lengths import document_lengths
from duoka.model.sampling import Sampling
from duoka.model.slots import register_slot_attention
from duoka.model.together import answers_by_rows
from duoka.parallel.task_rows import Row
from duoka.parallel.task_score import judge_rows, score_rows
from duoka.serve.batching.model import SlotModel
from duoka.serve.generate import generate

LONG = 16  # from here on angles depend on the length
FACTORS = {"short_factor": [1.0] * 8, "long_factor": [8.0] * 8}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": LONG, **FACTORS}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
BY_LAYER = {"full_attention": DYNAMIC, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
CASES = {
    "longrope": (
        "phi3",
        {"rope_parameters": LONGROPE, "max_position_embeddings": 64, "original_max_position_embeddings": LONG},
    ),
    "dynamic": ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": LONG}),
    "dynamic, in some layers": (
        "gemma3_text",
        {
            "rope_parameters": BY_LAYER, "max_position_embeddings": LONG, "head_dim": 16, "sliding_window": 8,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    ),
}  # fmt: skip


def build(case: str):
    """The model by transformers alone, and as duoka trains it."""
    kind, settings = CASES[case]
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    tokens = {"vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(kind, num_hidden_layers=2, **sizes, **tokens, **settings)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        alone = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        for parameter in alone.parameters():
            parameter.data.add_(0.5 * torch.randn_like(parameter))
    ours = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=register_attention()).eval()
    ours.load_state_dict(alone.state_dict())
    return alone, LossModel(ours)


def draw(lengths):
    numbers = torch.Generator().manual_seed(1)
    return [torch.randint(3, 96, (length,), generator=numbers) for length in lengths]


def loss_alone(alone, documents) -> float:
    """Each document by a model that has read nothing before."""
    total = 0.0
    for one in documents:
        fresh = copy.deepcopy(alone)
        with torch.no_grad():
            logits = fresh(one[None], use_cache=False).logits[0, :-1]
        total += float(F.cross_entropy(logits, one[1:], reduction="sum"))
    return total


def loss_of(model, batch) -> float:
    with torch.no_grad():
        return float(model(**batch)[0])


@pytest.mark.parametrize("case", CASES)
def test_a_document_is_turned_as_alone_beside_longer_ones_and_after_them(case: str) -> None:
    alone, ours = build(case)
    documents = draw((40, 10, 25, LONG, LONG + 1))
    wanted = loss_alone(alone, documents)
    assert loss_of(ours, packed(documents)) == pytest.approx(wanted, rel=1e-5)
    rows = padded(documents)
    ends = torch.tensor([len(one) for one in documents])[:, None]
    rows["position_ids"] = torch.where(rows["position_ids"] < ends, rows["position_ids"], 0)  # as the loader has it
    assert loss_of(ours, rows) == pytest.approx(wanted, rel=1e-5)
    for one in documents:
        assert loss_of(ours, packed([one])) == pytest.approx(loss_alone(alone, [one]), rel=1e-5), "of what came before"
    # The trial would be none if lengths made no difference.
    long, short = documents[:2]
    with torch.no_grad():
        both = torch.nn.utils.rnn.pad_sequence([long, short], batch_first=True)
        together = alone(both, use_cache=False).logits[1, : len(short) - 1]
    assert float(F.cross_entropy(together, short[1:], reduction="sum")) != pytest.approx(
        loss_alone(alone, [short]), rel=2e-5
    )


def test_lengths_are_those_of_documents_and_of_what_a_cache_has() -> None:
    rows = torch.tensor([[0, 1, 2, 0, 1, 0, 0], [0, 1, 2, 3, 4, 5, 6]])
    assert document_lengths(rows).tolist() == [[3, 3, 3, 2, 2, 1, 1], [7] * 7]
    assert document_lengths(torch.tensor([[5, 6]])).tolist() == [[7, 7]]


def test_padding_has_no_place_in_a_text(tmp_path) -> None:
    samples = [Sample(ids.int().numpy(), (ids > 0).numpy()) for ids in draw((5, 3))]
    pieces: list[Arrays] = [pack_arrays(samples)]
    write_part(tmp_path, pieces, {})
    batch = build_batch(TokenStore([TokenPart(tmp_path)]), MicroPlan(((0,), (1,))), False, 0)
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, 0, 0]]
    assert document_lengths(batch.position_ids).tolist() == [[5] * 5, [3, 3, 3, 1, 1]]


@since(transformers="5.20")
def test_an_answer_that_grows_past_the_turn_is_read_again_as_transformers_does() -> None:
    alone, ours = build("longrope")
    (prompt,) = draw((LONG - 4,))
    wanted = (
        copy.deepcopy(alone)
        .generate(prompt[None], do_sample=False, max_new_tokens=12, eos_token_id=-1, pad_token_id=0)[0, len(prompt) :]
        .tolist()
    )
    chatted = generate(copy.deepcopy(alone), prompt.tolist(), frozenset(), Sampling(max_new_tokens=12))
    assert list(chatted) == wanted
    assert not answers_by_rows(ours), "a long row would turn those beside it"
    with with_cache(ours.core):
        for found in answer_rows(ours, [prompt.tolist()] * 2, frozenset(), 12):
            assert found.ids == wanted


@pytest.mark.parametrize("case", ["longrope", "dynamic"])
def test_rows_of_a_task_are_scored_as_alone(case: str) -> None:
    alone, ours = build(case)
    rows = [Row(0, 0, tuple(one.tolist()), 1) for one in draw((40, 10, 20))]
    together = score_rows(ours, rows, torch.device("cpu"))
    # The last token is not read: nothing is asked behind it.
    for row, found in zip(rows, together, strict=True):
        ids = torch.tensor(row.ids)
        with torch.no_grad():
            logits = copy.deepcopy(alone)(ids[None, :-1], use_cache=False).logits[0]
        assert found == pytest.approx(-float(F.cross_entropy(logits, ids[1:], reduction="sum")), rel=1e-5)
    apart = [likely for row in rows for _, likely in judge_rows(ours, [row], torch.device("cpu"))]
    assert [likely for _, likely in judge_rows(ours, rows, torch.device("cpu"))] == apart


def test_a_server_takes_no_text_past_the_turn() -> None:
    alone, _ = build("longrope")
    alone.set_attn_implementation(register_slot_attention())
    served = SlotModel(alone, 2)
    assert (served.window, served.own_window) == (LONG, 64)
    alone, _ = build("dynamic")
    assert SlotModel(alone, 2).window == LONG
