"""Evaluation against a plain loop over transformers: one sample at a time, loss and accuracy by hand."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny import write_conversations
from transformers import AutoModelForCausalLM, AutoTokenizer

from duoka.cli import run as duoka
from duoka.comm.world import World
from duoka.config.schema import DataConfig, ModelConfig, RunConfig
from duoka.errors import ConfigError
from duoka.plan.layout import Layout
from duoka.serve.evaluate import EvalData, choose_layout, measure, read_eval_data
from duoka.serve.load_run import Trained, find_trained, load_trained
from duoka.units import Amount

NUM_SAMPLES = 23


def quiet(text: str) -> None:
    """Notes are not what is tested here."""


@pytest.fixture(scope="module")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_conversations(tmp_path_factory.mktemp("data") / "talks.jsonl", NUM_SAMPLES)


@pytest.fixture(scope="module")
def data(tiny_model: Path, conversations: Path) -> EvalData:
    return read_eval_data(Trained(str(tiny_model), tiny_model, str(tiny_model)), [str(conversations)], say=quiet)


def oracle(folder: Path, conversations: Path) -> tuple[float, float, int]:
    """(mean loss, accuracy, target tokens) over assistant turns, found by cutting the ChatML text by hand."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    loss_sum, correct, count = 0.0, 0, 0
    for line in conversations.read_text(encoding="utf-8").splitlines():
        ids, wanted = [], []
        for message in json.loads(line)["messages"]:
            head = tokenizer(f"<|im_start|>{message['role']}\n").input_ids
            body = tokenizer(f"{message['content']}<|im_end|>").input_ids
            tail = tokenizer("\n").input_ids
            ids += head + body + tail
            is_target = message["role"] == "assistant"
            wanted += [False] * len(head) + [is_target] * len(body) + [False] * len(tail)
        with torch.no_grad():
            scores = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        for place in range(1, len(ids)):
            if wanted[place]:
                loss_sum -= scores[place - 1, ids[place]].item()
                correct += int(scores[place - 1].argmax() == ids[place])
                count += 1
    return loss_sum / count, correct / count, count


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("micro", [Amount(1, "samples"), Amount(7, "samples"), Amount(300, "tokens")])
def test_any_batch_size_gives_the_loss_of_a_plain_loop(
    tiny_model: Path, conversations: Path, data: EvalData, packing: bool, micro: Amount
) -> None:
    loss, accuracy, count = oracle(tiny_model, conversations)
    trained = Trained(str(tiny_model), tiny_model, str(tiny_model))
    found = measure(trained, data, Layout(micro=micro, packing=packing), World())
    assert (found.num_samples, found.num_targets) == (NUM_SAMPLES, count)
    assert found.loss == pytest.approx(loss, rel=1e-5)
    assert found.accuracy == pytest.approx(accuracy, abs=1e-9)
    assert found.perplexity == pytest.approx(2.718281828459045**loss, rel=1e-4)


def test_shares_of_two_ranks_hold_every_sample_once(tiny_model: Path, data: EvalData) -> None:
    trained = Trained(str(tiny_model), tiny_model, str(tiny_model))
    # A world of one that looks at one rank's share: its sums are local, so the two must add up.
    whole = measure(trained, data, Layout(micro=Amount(300, "tokens")), World())
    parts = [_measure_share(trained, data, rank) for rank in range(2)]
    assert sum(part.num_samples for part in parts) == NUM_SAMPLES
    assert min(part.num_samples for part in parts) > 0
    assert sum(part.num_targets for part in parts) == whole.num_targets
    loss_sum = sum(part.loss * part.num_targets for part in parts)
    assert loss_sum / whole.num_targets == pytest.approx(whole.loss, rel=1e-6)


def _measure_share(trained: Trained, data: EvalData, rank: int):
    class LoneRank(World):
        def sum(self, values: list[float]) -> list[float]:
            return list(values)

    return measure(
        trained, data, Layout(dp=2, strategy="ddp", micro=Amount(300, "tokens")), LoneRank(rank=rank, size=2)
    )


def test_a_measurement_is_planned_with_lengths_as_they_are(data: EvalData) -> None:
    known = data.lengths
    assert (known.basis, known.num_samples, known.longest) == ("tokenized", len(data.store), data.store.lengths.max())


def test_a_model_needs_data_to_be_measured_on(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="it has no evaluation data"):
        read_eval_data(find_trained(str(tiny_model), say=quiet), [], say=quiet)


def test_a_run_that_kept_nothing_aside_says_so(tiny_model: Path, conversations: Path) -> None:
    config = RunConfig(model=ModelConfig(name=str(tiny_model)), data=DataConfig(train=({"name": str(conversations)},)))
    trained = Trained("runs/x", tiny_model, str(tiny_model), config=config)
    with pytest.raises(ConfigError, match="kept no data aside"):
        read_eval_data(trained, [], say=quiet)


def test_neither_run_nor_model_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "cats").mkdir(parents=True)
    (tmp_path / "runs" / "cats" / "config.yaml").write_text("model: demo\n")
    with pytest.raises(ConfigError, match="neither a run nor a model") as refusal:
        find_trained("./no/such/folder", say=quiet)
    assert "cats" in str(refusal.value)


@pytest.mark.parametrize(("precision", "difference"), [("fp32", 1e-5), ("bf16", 2e-2)])
def test_the_precision_that_was_asked_for_computes(
    tiny_model: Path, conversations: Path, capsys: pytest.CaptureFixture[str], precision: str, difference: float
) -> None:
    wanted, _, count = oracle(tiny_model, conversations)
    command = ["eval", str(tiny_model), "--data", str(conversations), "--precision", precision, "--json", "--nproc=1"]
    assert duoka(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["precision"] == precision and found["num_targets"] == count
    assert found["loss"] == pytest.approx(wanted, rel=difference)
    assert (abs(found["loss"] / wanted - 1) < 1e-6) == (precision == "fp32"), "bf16 rounds, fp32 does not"


def test_a_layout_is_planned_with_what_was_measured_here(
    data: EvalData, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As training plans: `duoka bench hardware` counted there and not here."""
    asked = []

    def plan(*_: object, local_size: int, cluster: object, **__: object) -> SimpleNamespace:
        asked.append((local_size, cluster))
        return SimpleNamespace(layout=Layout())

    monkeypatch.setattr("duoka.plan.catalog.local_cluster", lambda machine, size, local: ("measured", size, local))
    monkeypatch.setattr("duoka.plan.report.make_plan", plan)
    choose_layout(data, tiny_model, 4, 2)
    choose_layout(data, tiny_model, 4)
    assert asked == [(2, ("measured", 4, 2)), (4, ("measured", 4, 4))]


def test_what_conversations_begin_with_is_computed_once(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = {"role": "system", "content": "You answer every question that is asked here in one short sentence."}
    records = [
        {"messages": [system, {"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"it is {n}"}]}
        for n in range(8)
    ]
    file = tmp_path / "talks.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    plain = Trained(str(tiny_model), tiny_model, str(tiny_model))
    computed = []
    monkeypatch.setattr(
        "duoka.serve.evaluate.load_trained", lambda *_, **how: _counted(load_trained(plain, **how), computed)
    )
    found = []
    for is_shared in (True, False):
        wanted = DataConfig(train=({"name": str(file)},), prefix_sharing=is_shared)
        data = read_eval_data(plain, [str(file)], say=quiet, asked=wanted)
        found.append(measure(plain, data, Layout(micro=Amount(2000, "tokens"), packing=True), World()))
    shared, whole = found
    assert shared.loss == pytest.approx(whole.loss, rel=1e-6) and shared.accuracy == whole.accuracy
    assert computed[0] < 0.5 * computed[1]
    assert shared.loss == pytest.approx(oracle(tiny_model, file)[0], rel=1e-5)


def _counted(lm: torch.nn.Module, computed: list[int]) -> torch.nn.Module:
    lm.get_input_embeddings().register_forward_hook(lambda _, given, __: computed.append(given[0].numel()))  # type: ignore[operator]
    return lm
