"""What processes of test_verbs_numbers.py run of verbs between ranks: local steps, late exchanges, functions."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from verbs import Small, Words, build, collate, count_over


def fresh(lr=0.3):
    model, _ = build(kind=torch.optim.SGD)
    return model, torch.optim.SGD(model.parameters(), lr=lr)


def weights_of(accelerator, model):
    return {name: tensor.tolist() for name, tensor in accelerator.get_state_dict(model).items()}


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def close(ours, theirs, tolerance=1e-5):
    for name, wanted in theirs.items():
        got = torch.as_tensor(ours[name], dtype=torch.float64)
        assert float((got - wanted.double()).norm()) <= tolerance * float(wanted.double().norm().clamp(min=1e-3)), name


def step_alone(accelerator):
    """Local SGD: each rank steps by its own gradients, and every second step the ranks take the mean."""
    from duoka.accelerator.local_sgd import LocalSGD

    size, rank = accelerator.num_processes, accelerator.process_index
    inputs = torch.randn(4, size, 3, 2, generator=torch.Generator().manual_seed(4))
    torch.manual_seed(0)
    plain = torch.nn.Linear(2, 1)
    alone = [copy.deepcopy(plain).double() for _ in range(size)]
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.3))
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2, enabled=True) as local:
        for step in inputs:
            accelerator.backward(model(step[rank]).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            local.step()
    theirs = [torch.optim.SGD(one.parameters(), lr=0.3) for one in alone]
    for number, step in enumerate(inputs):
        for own, one, other in zip(step, alone, theirs, strict=True):
            one(own.double()).square().mean().backward()
            other.step()
            other.zero_grad()
        if number % 2:
            mean = [torch.stack(each).mean(0) for each in zip(*(list(m.parameters()) for m in alone), strict=True)]
            for one in alone:
                for parameter, value in zip(one.parameters(), mean, strict=True):
                    parameter.data.copy_(value)
    close(weights_of(accelerator, model), alone[0].state_dict())
    accelerator.free_memory()


def exchange_late(accelerator):
    """The backward pass exchanges, though the forward pass was inside of no_sync."""
    rank = accelerator.process_index
    torch.manual_seed(0)
    model = accelerator.prepare(torch.nn.Linear(1, 1, bias=False))
    with accelerator.no_sync(model):
        loss = model(torch.full((1, 1), float(rank + 1))).mean()
    accelerator.trigger_sync_in_backward(model)
    accelerator.backward(loss)
    assert accelerator.unwrap_model(model).weight.grad.item() == pytest.approx(1.5)
    accelerator.free_memory()


def speak_without_it(accelerator):
    from duoka.accelerator import utils

    size, rank = accelerator.num_processes, accelerator.process_index
    state = utils.PartialState()
    assert (state.num_processes, state.process_index, str(state.distributed_type)) == (size, rank, "MULTI_CPU")
    with state.split_between_processes(list(range(4))) as mine:
        assert utils.gather_object(mine) == list(range(4))
    own = torch.tensor([float(rank)])
    assert utils.gather(own).tolist() == [0, 1] and utils.reduce(own).tolist() == [0.5]
    assert accelerator.reduce(own).tolist() == [1] and utils.broadcast(own).tolist() == [0]
    torch.manual_seed(rank)
    utils.synchronize_rng_states(["torch"])
    assert len(set(utils.gather(torch.rand(1)).tolist())) == 1
    utils.set_seed(1, device_specific=True)
    assert len(set(utils.gather(torch.rand(1)).tolist())) == size


# ------------------------------------------------------------------------- gradients outside of prepared models


def leave_the_model(accelerator):
    """What gradients a rank finds outside of prepared models: those of its own loss."""
    rank = accelerator.process_index
    torch.manual_seed(3)
    before, inside, after = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)
    alone = copy.deepcopy([before, inside, after])
    inputs = torch.full((2, 3), float(rank + 1), requires_grad=True)
    prompt = torch.ones(3, requires_grad=True)
    model = accelerator.prepare(inside)
    accelerator.backward(after(model(before(inputs) + prompt)).mean(), retain_graph=False)
    twin, twin_prompt = inputs.detach().clone().requires_grad_(), torch.ones(3, requires_grad=True)
    alone[2](alone[1](alone[0](twin) + twin_prompt)).mean().backward()
    assert torch.allclose(inputs.grad, twin.grad) and torch.allclose(prompt.grad, twin_prompt.grad)
    assert torch.allclose(before.weight.grad, alone[0].weight.grad)
    assert torch.allclose(after.weight.grad, alone[2].weight.grad)
    wanted = accelerator.reduce(alone[1].weight.grad, "mean")
    assert torch.allclose(whole(accelerator.unwrap_model(model).weight.grad), wanted)
    accelerator.free_memory()


def no_targets(accelerator):
    """A quotient made by hand, on a rank without targets: 0/0 must not come into anybody's weights."""
    rank = accelerator.process_index
    model, optimizer = accelerator.prepare(*fresh())
    ids, labels = torch.ones(1, 3, dtype=torch.long), torch.full((1, 3), 4 if rank else -100)
    for count in ((labels != -100).sum(), int((labels != -100).sum())):
        loss = count_over(model(ids), labels) / (labels != -100).sum()
        assert torch.isnan(loss) == (rank == 0)
        accelerator.backward(loss, mean_over=count)
        optimizer.step()
        optimizer.zero_grad()
    assert all(torch.isfinite(whole(p)).all() for p in model.parameters())
    accelerator.free_memory()


# ------------------------------------------------------------------------- two models, two optimizers


def play(generator, judge, optimizers, backward, noise, real):
    """The taught loop of two models: the judge learns from both, and is asked again for the generator's loss."""
    for _ in range(3):
        optimizers[1].zero_grad()
        backward(F.softplus(-judge(real)).mean())
        fake = generator(noise)
        backward(F.softplus(judge(fake.detach())).mean())
        optimizers[1].step()
        optimizers[0].zero_grad()
        backward(F.softplus(-judge(fake)).mean())
        optimizers[0].step()


def make_players():
    torch.manual_seed(9)
    models = [torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, n)) for n in (2, 1)]
    return models, [torch.optim.Adam(model.parameters(), lr=0.05) for model in models]


def two_players(accelerator):
    size, rank = accelerator.num_processes, accelerator.process_index
    noise, real = torch.randn(2, 4 * size, 2, generator=torch.Generator().manual_seed(2))
    models, optimizers = make_players()
    *prepared, first, second = accelerator.prepare(*models, *optimizers)
    mine = slice(rank * 4, rank * 4 + 4)
    play(*prepared, [first, second], accelerator.backward, noise[mine], real[mine])
    alone, their_optimizers = make_players()
    for model in alone:
        model.double()
    play(*alone, their_optimizers, torch.Tensor.backward, noise.double(), real.double())
    for ours, theirs in zip(prepared, alone, strict=True):
        trained = weights_of(accelerator, ours)  # whole on rank 0 alone where they are sharded
        if accelerator.is_main_process:
            close(trained, theirs.state_dict(), 1e-4)
    accelerator.free_memory()


def save_together(accelerator, tiny_model, folder):
    """Sharded weights are written by all ranks, and no tensor is ever whole on one; files of others stay."""
    from transformers import AutoModelForCausalLM

    import duoka.accelerator.saving as room

    model = accelerator.prepare(AutoModelForCausalLM.from_pretrained(tiny_model))
    gather, room.gather_state = room.gather_state, None
    try:
        accelerator.save_model(model, f"{folder}/one", save_function=accelerator.save)
        accelerator.save_model(model, f"{folder}/split", max_shard_size="100KB")
    finally:
        room.gather_state = gather
    accelerator.wait_for_everyone()
    accelerator.free_memory()


def forget_nothing(accelerator, folder):
    """A save in a window goes on bit for bit; unwrapped models and prepared optimizers are copied and pickled."""
    from duoka.errors import ConfigError

    rank = accelerator.process_index
    kept = {}
    for turn in ("whole", "again"):
        torch.manual_seed(1)
        small = Small(dropout=0.4)
        loader = DataLoader(Words(), batch_size=2, shuffle=True, collate_fn=collate)
        model, optimizer, loader = accelerator.prepare(small, torch.optim.Adam(small.parameters(), lr=0.03), loader)
        torch.manual_seed(50 + rank + 9 * (turn == "again"))
        batches = loader
        if turn == "again":
            accelerator.load_state(folder)
            batches = accelerator.skip_first_batches(loader, 5)
        losses = []
        for batch in batches:
            with accelerator.accumulate(model):
                loss = count_over(model(batch["ids"]), batch["labels"])
                accelerator.backward(loss / 10)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            if turn == "whole" and len(losses) == 5:  # in the second window of three
                accelerator.save_state(folder)
        kept[turn] = losses, weights_of(accelerator, model)
        if turn == "whole":
            accelerator.free_memory()
    assert kept["again"] == (kept["whole"][0][3:], kept["whole"][1])
    bare = accelerator.unwrap_model(model)
    for thing in (bare, optimizer):
        if accelerator.layout.is_sharded:
            with pytest.raises(ConfigError, match="cannot be pickled"):
                torch.save(thing, io.BytesIO())
            with pytest.raises(ConfigError, match="or copied"):
                copy.deepcopy(bare)
        else:
            torch.save(copy.deepcopy(thing), io.BytesIO())
    accelerator.free_memory()
