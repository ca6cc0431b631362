"""Tensor parallelism against one process: loss, norm, every gradient and the weights after two steps."""

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from tensor_models import (
    MODELS,
    Mean,
    build,
    compare,
    global_batch,
    make_optimizer,
    pack,
    train_here,
    train_plainly,
    write_model,
)
from worlds import run_world

FAMILIES = tuple(name for name in MODELS if name not in ("smollm", "moe"))  # 9 heads are for three ranks
SHORT = 1e-5
LORA = {"rank": 4, "alpha": 8.0}


def adapters(folder):
    """PEFT's adapters beside a model of transformers, begun where duoka's begin."""
    import peft

    from duoka.config.schema import LoraConfig
    from duoka.model.build import load_model
    from duoka.model.request import ModelRequest

    begun = load_model(ModelRequest(folder, dtype=torch.float32, lora=LoraConfig(**LORA))).state_dict()

    def adapt(model):
        settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
        adapted = peft.get_peft_model(model, settings)
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if parameter.requires_grad:
                    parameter.copy_(begun[name])
        return adapted

    return adapt


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("tensor")
    for name in MODELS:
        write_model(name, place / name)
        for optimizer in ("sgd", "adamw"):
            torch.save(train_plainly(place / name, optimizer), place / f"{name}-{optimizer}.pt")
    for name in ("llama", "phi3"):
        torch.save(train_plainly(place / name, "sgd", adapters(place / name)), place / f"{name}-lora.pt")
    return place


def look(folder, layouts, names, adaptive):
    """Every family under SGD, whose steps show each gradient as it is; those of `adaptive` under AdamW too."""
    from duoka.comm.world import end_world, start_world
    from duoka.config.schema import LoraConfig, ParallelConfig
    from duoka.model import adapted, gated
    from duoka.plan.layout import parse_layout

    world = start_world(ParallelConfig(strategy="fsdp"))

    def without_call(*_):
        asked.append(1)

    asked = []

    def check(name, layout, optimizer, num_micro, lora=None):
        engine = build(folder / name, layout, world, lora=lora and LoraConfig(**LORA))
        wanted = torch.load(folder / f"{name}-{'lora' if lora else optimizer}.pt")
        what = f"{name} under {layout.name}, {layout.recompute}, {optimizer}, {num_micro} micro-batches, lora {lora}"
        # AdamW divides a gradient by its own size: what is nearly zero may have either sign.
        compare(train_here(engine, optimizer, num_micro), wanted, 1e-4 if optimizer == "sgd" else 2e-3, what)
        return engine

    for text in layouts:
        layout = parse_layout(text)
        for name in names:
            engine = check(name, layout, "sgd", 3)
            if name in adaptive:
                check(name, layout, "adamw", 3)
            check_nothing_is_whole(engine)
        check(names[0], layout, "sgd", 1)
        # Once a world: where state is shared by FSDP, or nothing is.
        for recompute in ("full", "selective", "1/2") if text == layouts[0] else ():
            check(names[0], replace(layout, recompute=recompute), "sgd", 3)
        for name in {"llama", "phi3"} & set(names):
            check(name, layout, "sgd", 3, lora=True)
            if text == layouts[0]:  # adapters by PEFT's own code, and in steps
                check(name, replace(layout, recompute="selective"), "sgd", 3, lora=True)
                with (
                    mock.patch.multiple(adapted, call_of=without_call),
                    mock.patch.multiple(gated, call_of=without_call),
                ):
                    check(name, layout, "sgd", 3, lora=True)
    assert asked or not {"llama", "phi3"} & set(names), "nobody asked how an adapter is computed"
    if world.size == 2:
        check_shared_words(world)
        check_counted_dropout(folder / "llama", world)
        check_bytes(folder / "llama", world)
        check_drift_is_found(folder / "qwen3", world)
    world.barrier()
    end_world(world)


def check_nothing_is_whole(engine):
    """Every matrix is cut, and a weight that two modules share is one parameter, as it was."""
    from torch.distributed.tensor import DTensor

    from duoka.model.build import find_core

    for name, parameter in engine.named_trainable().items():
        if parameter.ndim > 1:
            assert isinstance(parameter, DTensor) and "tp" in parameter.device_mesh.mesh_dim_names, name
    core = find_core(engine.bare)
    is_one = core.get_input_embeddings().weight is core.get_output_embeddings().weight
    assert is_one == core.config.tie_word_embeddings
    assert ("lm_head.weight" in engine.named_trainable()) != is_one


def check_shared_words(world):
    """Losses of a head whose 61 words two ranks share, against all on one: values, and every gradient."""
    import duoka.model.chunks as chunks
    from duoka.model.chunks import Bend, LowRank
    from duoka.model.logps import token_logps
    from duoka.model.loss import Goal, sum_cross_entropy
    from duoka.model.vocabulary import VOCABULARY, WHOLE
    from duoka.parallel.tensor import share_words
    from duoka.parallel.tensor_exchange import bounds

    chunks.CHUNK_BYTES = 4 * 61 * 3  # as many chunks on the rank with 30 words as on the one with 31
    numbers = torch.Generator().manual_seed(5)

    def draw(*shape):
        return torch.randn(shape, generator=numbers)

    head = torch.nn.Linear(8, 61)
    share_words(head, world)
    first, size = bounds(61, world)
    hidden, weight, bias, low_rows, low_weight = draw(2, 9, 8), draw(61, 8), draw(61), draw(2, 9, 3), draw(61, 3)
    labels = torch.randint(0, 61, (2, 9), generator=numbers)
    labels[0, 3] = labels[1, 0] = -100
    by_token = draw(2, 9)

    def learn(words, ask):
        """What `ask` gives, and the gradients: of what is cut, of these words."""
        here = slice(None) if words is WHOLE else slice(first, first + size)
        inputs = [hidden, weight[here], bias[here], low_rows, low_weight[here]]
        leaves = [one.clone().requires_grad_() for one in inputs]
        rows, own, own_bias, low, own_low = leaves
        value, told = ask(rows, own, own_bias, LowRank(low, own_low), words)
        value.backward()
        found = [leaf.grad[first : first + size] if leaf.shape[0] == 61 else leaf.grad for leaf in leaves]
        return [value.detach(), *(one.detach() for one in told), *found]

    def ask_loss(goal):
        return lambda rows, own, bias, low, words: _first_apart(
            sum_cross_entropy(
                rows, own, labels, bias=bias, low=low, bend=Bend(1.3, 2.5), goal=goal, count=True, vocabulary=words
            )
        )

    def ask_logps(rows, own, bias, low, words):
        logps, entropy = token_logps(
            rows, own, labels, bias=bias, low=low, bend=Bend(0.7), more="entropy", vocabulary=words
        )
        return (logps * by_token + entropy * by_token.flip(0)).sum(), [logps, entropy]

    goals = [Goal(), Goal(smoothing=0.2), Goal(by_probability=True)]
    for ask in (*(ask_loss(goal) for goal in goals), ask_logps):
        pairs = zip(learn(getattr(head, VOCABULARY), ask), learn(WHOLE, ask), strict=True)
        for place, (ours, theirs) in enumerate(pairs):
            assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6), (ask, place, ours, theirs)


def _first_apart(answer):
    return answer[0], answer[1:]


def check_counted_dropout(folder, world):
    """Units of an adapter are dropped as in one process, also where a rank's input begins in the middle."""
    from duoka.comm.world import World
    from duoka.config.schema import LoraConfig
    from duoka.parallel.inputs import model_inputs
    from duoka.plan.layout import Layout, parse_layout

    lora = LoraConfig(**LORA, dropout=0.4)
    places = ((parse_layout("single.tp2"), world), (Layout(), World()))
    engines = [build(folder, layout, place, lora=lora) for layout, place in places]
    compare(*(train_here(engine, "sgd", 3) for engine in engines), 1e-4, "counted dropout", limit=0.0)
    # And both say the same: the likeliest word, and which targets it is.
    batch = global_batch(0, engines[1].mesh, 1).micro_batches[0]
    told = []
    for engine in engines:
        with engine.evaluate() as model, torch.no_grad():
            model.eval()
            _, correct = model(**model_inputs(batch, world.device))
            told.append((int(correct), [model.next_token(batch.input_ids[:, :length]) for length in range(1, 12)]))
    assert told[0] == told[1]


def check_bytes(folder, world):
    """What a step sends, of rows whose every token is a target, is what the plan says: within 2%."""
    from duoka.comm.ledger import LEDGER, sent_bytes
    from duoka.data.feed.loader import GlobalBatch
    from duoka.plan.layout import parse_layout
    from duoka.plan.recipe import Work
    from duoka.plan.shape import read_shape
    from duoka.plan.traffic import traffic

    tokens = 600
    micro = pack([(torch.arange(tokens) % 61, torch.ones(tokens, dtype=torch.bool))], [0])
    layout = parse_layout("single.tp2")
    for recompute in ("none", "full", "selective", "1/2"):
        layout = replace(layout, recompute=recompute)
        engine = build(folder, layout, world)
        LEDGER.take()
        engine.forward_backward(GlobalBatch([micro, micro], 2 * tokens, 1, 0, 0, 0, np.arange(1)), Mean())
        sent = sent_bytes(LEDGER.take())
        planned = traffic(Work(read_shape(folder), None, "cpu"), layout, 2, accumulation=2, tokens=tokens)
        total = sum(one.sent_bytes for one in planned)
        assert sent == pytest.approx(total, rel=0.02), (recompute, sent / total)


def check_drift_is_found(folder, world):
    """What both ranks have whole is compared, and what each has a part of is not."""
    from duoka.errors import WorkerFailed
    from duoka.plan.layout import parse_layout
    from duoka.store.contents import Contents
    from duoka.store.state import TrainState
    from duoka.train.replicas import check_replicas

    engine = build(folder, parse_layout("single.tp2"), world)
    named = engine.named_trainable()
    contents = Contents(engine, make_optimizer("sgd", named), TrainState())
    check_replicas(contents, world)
    drifted = "model.layers.1.self_attn.k_norm.weight"
    if world.rank == 1:
        with torch.no_grad():
            named[drifted][0] += 1e-6
    with pytest.raises(WorkerFailed, match=rf"rank 1 has other values than rank 0 in model\.{drifted}"):
        check_replicas(contents, world)


def test_two_ranks_of_a_layer_learn_what_one_process_learns(folder):
    run_world(2, look, folder, ["single.tp2"], FAMILIES, ("llama",))


def test_three_ranks_share_nine_tied_heads(folder):
    run_world(3, look, folder, ["single.tp3"], ("smollm",), ("smollm",))


def test_data_ranks_of_two_share_state_beside_it(folder):
    run_world(4, look, folder, ["fsdp2.tp2", "zero1x2.tp2"], ("qwen3", "llama"), ("qwen3",))


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_every_family_and_layout_learns_under_adamw_too(folder):
    run_world(2, look, folder, ["single.tp2"], FAMILIES, FAMILIES)
    run_world(4, look, folder, ["fsdp2.tp2", "zero1x2.tp2"], ("qwen3", "llama"), ("llama",))
