"""Many answers at once: each is what it would be alone, bit for bit, whoever else is answered."""

from __future__ import annotations

import json
import random
from pathlib import Path

import peft
import pytest
import torch
from families import write_family
from tiny import build_tiny_tokenizer, write_tiny_model
from transformers import AutoModelForCausalLM

from duoka.config.schema import LoraConfig
from duoka.errors import ConfigError
from duoka.model.build import load_model
from duoka.model.lora import save_adapter
from duoka.model.request import ModelRequest
from duoka.model.result import copy_tokenizer
from duoka.model.sampling import Sampling
from duoka.model.slots import SequenceCache, register_slot_attention
from duoka.serve.api.start import Settings, build_service
from duoka.serve.batching.model import CHUNK, Next, SlotModel
from duoka.serve.batching.scheduler import Done, Failed, IsFull, Job, Scheduler, Scored, TooLarge, TooMany
from duoka.serve.load_run import find_trained

BIG = 1 << 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "untied", tied=False)


@pytest.fixture(scope="module")
def plain(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture
def model(folder: Path) -> SlotModel:
    lm = load_model(ModelRequest(folder, dtype=torch.float32, attention=register_slot_attention())).eval()
    return SlotModel(lm, 4)


@pytest.fixture
def scheduler(model: SlotModel):
    made = Scheduler(model, bytes_per_token=model.check(), max_bytes=BIG)
    made.start()
    yield made
    made.close()


def job(prompt, *, new=12, sampling=None, **options) -> Job:
    return Job(tuple(prompt), sampling or Sampling(max_new_tokens=new), frozenset(), **options)


def answer(one: Job) -> list[Scored]:
    found = []
    while True:
        event = one.events.get(timeout=60)
        if isinstance(event, Failed):
            raise AssertionError(event.error)
        if isinstance(event, Done):
            return found
        if isinstance(event, Scored):
            found.append(event)


def ids(one: Job) -> list[int]:
    return [scored.token for scored in answer(one)]


def prompts(number: int, longest: int = 60) -> list[list[int]]:
    dice = random.Random(3)
    return [[dice.randrange(5, 90) for _ in range(dice.randrange(2, longest))] for _ in range(number)]


def test_greedy_answers_of_many_at_once_are_those_of_transformers(scheduler: Scheduler, plain) -> None:
    asked = prompts(10)
    jobs = [job(one) for one in asked]
    scheduler.submit(jobs)
    for one, prompt in zip(jobs, asked, strict=True):
        theirs = plain.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=12, eos_token_id=-1, pad_token_id=0
        )
        assert ids(one) == theirs[0, len(prompt) :].tolist()


def test_a_seed_draws_the_same_alone_and_among_others_to_the_last_bit(scheduler: Scheduler) -> None:
    asked = prompts(9)

    def ask(prompt: list[int], seed: int) -> Job:
        drawn = Sampling(1.0, 0.95, 10, seed, presence=0.5, frequency=0.2)
        return job(prompt, sampling=drawn, num_top=3)

    alone = []
    for seed, prompt in enumerate(asked):
        one = ask(prompt, seed)
        scheduler.submit([one])
        alone.append(answer(one))
    together = [ask(prompt, seed) for seed, prompt in enumerate(asked)]
    scheduler.submit(together[::-1])
    assert [answer(one) for one in together] == alone, "an answer depends on its neighbors"
    assert len({tuple(scored.token for scored in one) for one in alone}) > 5


def test_several_answers_to_one_prompt_differ_and_come_again(scheduler: Scheduler) -> None:
    def ask() -> list[list[int]]:
        jobs = [job([5, 6, 7], sampling=Sampling(1.0, 1.0, 8, 11), sample=number) for number in range(4)]
        scheduler.submit(jobs)
        return [ids(one) for one in jobs]

    first = ask()
    assert first == ask() and len({tuple(one) for one in first}) == 4


def test_a_prompt_that_begins_as_another_is_not_read_twice(scheduler: Scheduler) -> None:
    (long,) = prompts(1, 3)
    long = (long * 2 * CHUNK)[: 2 * CHUNK + 9]
    first = job(long, num_top=2)
    scheduler.submit([first])
    fresh = answer(first)
    assert scheduler.numbers.reused_tokens == 0
    again = job(long, num_top=2)
    scheduler.submit([again])
    assert answer(again) == fresh
    assert scheduler.numbers.reused_tokens == 2 * CHUNK


def test_log_probabilities_are_the_models_own(scheduler: Scheduler, plain) -> None:
    prompt = prompts(1)[0]
    one = job(prompt, num_top=4, scores_prompt=True)
    scheduler.submit([one])
    scored_prompt = one.events.get(timeout=60)
    assert isinstance(scored_prompt, list)
    whole = scored_prompt + answer(one)
    with torch.no_grad():
        row = plain(torch.tensor([[scored.token for scored in whole]])).logits[0].log_softmax(-1)
    assert whole[0].logprob is None and [scored.token for scored in whole[: len(prompt)]] == prompt
    for at, scored in enumerate(whole[1:]):
        assert scored.logprob == pytest.approx(float(row[at, scored.token]), abs=1e-4)
        assert [token for token, _ in scored.top] == row[at].topk(4).indices.tolist()


def test_who_leaves_frees_the_row_before_the_next_token(scheduler: Scheduler) -> None:
    long = [job([5, 6, number], new=2000) for number in range(7, 11)]
    scheduler.submit(long)
    for one in long:
        assert isinstance(one.events.get(timeout=60), Scored)
    waiting = job([8, 9])
    scheduler.submit([waiting])
    long[0].cancel()
    assert len(ids(waiting)) == 12
    for one in long:
        one.cancel()


def test_a_queue_has_an_end_and_what_never_fits_is_refused(model: SlotModel) -> None:
    scheduler = Scheduler(model, bytes_per_token=100, max_bytes=100 * 64, max_waiting=2)
    with pytest.raises(TooMany, match="3 answers are asked for at once, and at most 2 may wait"):
        scheduler.submit([job([5, 6]), job([5, 7]), job([5, 8])])
    scheduler.submit([gone := job([5, 6]), job([5, 7])])
    with pytest.raises(IsFull, match="2 requests wait"):
        scheduler.submit([job([5, 8])])
    gone.cancel()
    scheduler.submit([job([5, 8])])  # nobody has looked yet at who left
    with pytest.raises(IsFull, match="2 requests wait"):
        scheduler.submit([job([5, 9])])
    with pytest.raises(TooLarge, match="the cache here holds 64"):
        scheduler.submit([job([5] * 60)])
    with pytest.raises(TooLarge, match="window"):
        scheduler.submit([job([5] * model.window, new=1)])
    scheduler.start()
    scheduler.close()


@pytest.fixture(scope="module")
def adapters(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, seed in (("one", 1), ("two", 2)):
        torch.manual_seed(seed)
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        settings = peft.LoraConfig(r=4, lora_alpha=8 * seed, target_modules=["q_proj", "down_proj"])
        wrapped = peft.get_peft_model(base, settings)
        with torch.no_grad():
            for parameter_name, parameter in wrapped.named_parameters():
                if "lora_B" in parameter_name:
                    parameter.normal_(std=0.5)
        made[name] = tmp_path_factory.mktemp(name)
        wrapped.save_pretrained(made[name])
    return made


def test_rows_have_adapters_of_their_own(scheduler: Scheduler, folder: Path, adapters: dict[str, Path]) -> None:
    for name, where in adapters.items():
        scheduler.call(lambda name=name, where=where: scheduler.model.adapters.add(name, where))
    prompt = prompts(1)[0]
    found = {name: job(prompt, adapter=name, num_top=1) for name in (None, *adapters)}
    scheduler.submit(list(found.values()))
    together = {name: answer(one) for name, one in found.items()}
    for name in (None, *adapters):
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        lm = base if name is None else peft.PeftModel.from_pretrained(base, adapters[name])
        theirs = lm.eval().generate(
            input_ids=torch.tensor([prompt]), do_sample=False, max_new_tokens=12, eos_token_id=-1, pad_token_id=0
        )
        assert [scored.token for scored in together[name]] == theirs[0, len(prompt) :].tolist(), name
        alone = job(prompt, adapter=name, num_top=1)
        scheduler.submit([alone])
        assert answer(alone) == together[name], "an answer depends on its neighbors' adapters"
    scheduler.call(lambda: scheduler.model.adapters.remove("one"))
    assert scheduler.model.adapters.names == ("two",)


def test_a_name_that_comes_again_answers_by_its_new_weights(scheduler: Scheduler, adapters: dict[str, Path]) -> None:
    prompt = (prompts(1)[0] * CHUNK)[: CHUNK + 9]

    def ask(weights: str, name: str) -> list[Scored]:
        scheduler.call(lambda: scheduler.model.adapters.add(name, adapters[weights]))
        one = job(prompt, adapter=name, num_top=1)
        scheduler.submit([one])
        found = answer(one)
        scheduler.remove_adapter(name)
        return found

    first, second, new = ask("one", "it"), ask("two", "it"), ask("two", "never-used")
    assert second == new, "a prompt was not read again, and its keys are those of the adapter that went"
    assert first != second and scheduler.numbers.reused_tokens == 0


def test_an_adapter_that_goes_ends_its_own_answers_and_no_other(
    scheduler: Scheduler, adapters: dict[str, Path]
) -> None:
    for name in ("one", "two"):
        scheduler.call(lambda name=name: scheduler.model.adapters.add(name, adapters[name]))
    alone = job([5, 6, 7], new=60, adapter="two")
    scheduler.submit([alone])
    wanted = ids(alone)
    going, other = job([5, 6, 7], new=900, adapter="one"), job([5, 6, 7], new=60, adapter="two")
    scheduler.submit([going, other])
    assert isinstance(going.events.get(timeout=60), Scored)
    scheduler.remove_adapter("one")
    with pytest.raises(AssertionError, match="'one' was unloaded"):
        answer(going)
    assert ids(other) == wanted
    late = job([5, 6, 7], adapter="one")  # it was read before the adapter went, and waits behind it
    scheduler.submit([late])
    with pytest.raises(AssertionError, match="'one' was unloaded"):
        answer(late)


@pytest.mark.parametrize("family", ["phi3", "gpt_bigcode"])
def test_parts_of_one_product_are_computed_alone_as_beside_others(tmp_path: Path, family: str) -> None:
    folder = write_family(tmp_path, family, tokenizer=build_tiny_tokenizer())
    lm = load_model(ModelRequest(folder, dtype=torch.float32, attention=register_slot_attention())).eval()
    model, found = SlotModel(lm, 4), []
    for count in (1, 3):
        caches = [SequenceCache(20) for _ in range(count)]
        for place, cache in enumerate(caches):
            model.read(cache, [9, 8, 7 + place], 0, None)
        found.append(model.decode([Next(cache, 50, 3) for cache in caches])[0])
    assert torch.equal(*found)


def test_an_adapter_of_other_sizes_is_refused(adapters: dict[str, Path], tmp_path: Path) -> None:
    other = AutoModelForCausalLM.from_pretrained(write_tiny_model(tmp_path / "other", hidden=32))
    with pytest.raises(ConfigError, match="down_proj is 80 x 32, and the adapter's is 160 x 64"):
        SlotModel(other, 2).adapters.add("one", adapters["one"])


def test_an_adapter_of_experts_and_routers_is_served_by_itself(tmp_path: Path) -> None:
    base = write_family(tmp_path / "base", "qwen3_moe", tokenizer=build_tiny_tokenizer())
    trained = load_model(ModelRequest(base, dtype=torch.float32, lora=LoraConfig(rank=2, alpha=4)))
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    folder = tmp_path / "adapter"
    folder.mkdir()
    save_adapter(trained, folder)
    copy_tokenizer(base, folder)
    facts = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(facts | {"base_model_name_or_path": str(base)}))
    settings = Settings(key="k", num_rows=2, cache_bytes=BIG, precision="fp32")
    service = build_service(find_trained(str(folder), say=print), {}, settings)
    assert service.facts.models == {"adapter": None}, "it is no product beside linear layers"
    text = list(range(8, 28))
    ours = service.scheduler.model.read(SequenceCache(20), text, 0, None, keep_all=True)
    trained.eval().get_base_model().set_attn_implementation("eager")
    with torch.no_grad():
        assert torch.allclose(ours, trained(input_ids=torch.tensor([text]), use_cache=False).logits[0], atol=1e-4)


def test_an_adapter_of_another_model_is_refused(model: SlotModel, adapters: dict[str, Path], tmp_path: Path) -> None:
    other = write_tiny_model(tmp_path / "other", tied=False)
    lm = AutoModelForCausalLM.from_pretrained(other)
    del lm.model.layers[0].self_attn.q_proj
    with pytest.raises(ConfigError, match="of another model"):
        SlotModel(lm, 2).adapters.add("one", adapters["one"])


def test_a_model_whose_layers_hold_more_than_keys_is_refused(model: SlotModel) -> None:
    layer = model.lm.model.layers[0]
    whole = layer.forward

    def with_state(hidden, *args, **kwargs):
        return whole(hidden + hidden.cumsum(1) * 0.3, *args, **kwargs)

    layer.forward = with_state
    with pytest.raises(ConfigError, match="more than keys and values"):
        model.check()
