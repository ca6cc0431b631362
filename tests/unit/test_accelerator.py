"""The verbs in one process: what they refuse, what they keep, and forms that need no second process."""

import importlib.util
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, WeightedRandomSampler

from duoka import Accelerator
from duoka.accelerator.json_state import pack, room_for, unpack
from duoka.accelerator.nested import send
from duoka.accelerator.settings import read_parallel, read_precision, read_steps
from duoka.errors import ConfigError


def small():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_importing_duoka_alone_imports_no_torch():
    code = "import sys, duoka; print('torch' in sys.modules, 'pydantic' in sys.modules); duoka.print0('once')"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["False", "False", "once"]


def test_what_is_not_there_is_refused_by_name(tmp_path):
    for make, message in [
        (lambda: Accelerator(mixed_precision="fp8"), "(?s)mixed_precision is 'fp8'.*duoka train.*precision: fp8"),
        (lambda: Accelerator(strategy="dp"), "strategy is 'dp'"),
        (lambda: Accelerator(nonsense=[]), "no argument nonsense"),
        (lambda: Accelerator(gradient_accumulation_steps=0), "gradient_accumulation_steps is 0"),
        (lambda: Accelerator(log_with="comet_ml"), "duoka writes to tensorboard and wandb"),
        (lambda: Accelerator(parallel={"bucket_mb": -1}), "parallel: bucket_mb"),
        (lambda: Accelerator(strategy="fsdp", parallel={"compress": "powersgd"}), "which only ddp knows"),
        (lambda: Accelerator(parallel={"shard_ranks": 2}), "which only hsdp knows"),
        (lambda: Accelerator(strategy="ddp", parallel={"compress": {"gradients": "int8"}}), "compress"),
        (lambda: Accelerator(strategy="fsdp", parallel={"offload": {"params": "disk"}}), "a disk takes part"),
        (lambda: Accelerator(log_with="tensorboard").init_trackers("x"), "TensorBoard needs a folder"),
        (lambda: Accelerator().save({"a": torch.ones(1)}, tmp_path / "model.bin"), "the name of a pickle"),
        (lambda: Accelerator().save(object(), tmp_path / "x.json"), "cannot be written"),
        (lambda: Accelerator().save_model(small()[0], tmp_path), "was not prepared"),
        (lambda: Accelerator().register_for_checkpointing(3), "has no state_dict"),
        (lambda: Accelerator().save_state(), "no folder was named"),
        (lambda: Accelerator().prepare_data_loader([1, 2]), "must be a torch DataLoader"),
        (lambda: Accelerator().reduce(torch.ones(1), "median"), "sum, mean and max"),
    ]:
        with pytest.raises(ConfigError, match=message):
            make()


def test_the_launchers_words_count_where_arguments_are_left_out():
    env = {"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}
    assert read_precision(None, True, env)[0] == "bf16" and read_precision("no", True, env)[0] == "fp32"
    assert (read_steps(None, env), read_steps(2, env)) == (4, 2)
    assert read_parallel(None, None, {"ACCELERATE_USE_FSDP": "true"}).strategy == "fsdp"
    zero = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}
    assert read_parallel(None, None, zero).strategy == "zero3"
    precision, note = read_precision("fp16", True, {})
    assert precision in ("bf16", "fp32") and "CPUs do not train in" in note


def test_options_of_ddp_are_said_to_do_nothing_under_another_strategy(capsys):
    from duoka.accelerator.utils import DistributedDataParallelKwargs

    handler = DistributedDataParallelKwargs(find_unused_parameters=True)
    assert not Accelerator(strategy="zero2", kwargs_handlers=[handler]).parallel.find_unused_parameters
    assert "nothing of it counts under zero2" in capsys.readouterr().out
    assert Accelerator(kwargs_handlers=[handler]).parallel.find_unused_parameters and not capsys.readouterr().out
    torch.distributed.destroy_process_group()


def test_things_come_back_in_the_given_order_and_once(tmp_path):
    accelerator = Accelerator()
    model, optimizer = small()
    loader = DataLoader(list(range(4)))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    got = accelerator.prepare(schedule, loader, optimizer, "other", model)
    assert got[4] is model and got[3] == "other" and got[1].dataset == [0, 1, 2, 3]
    again = accelerator.prepare(*got)
    assert all(one is other for one, other in zip(got, again, strict=True))
    assert accelerator.free_memory(model, optimizer) == (None, None) and not accelerator.parts.models


def test_counted_and_plain_losses_do_not_mix():
    accelerator = Accelerator(2)
    model, optimizer = accelerator.prepare(*small())
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 3)).sum(), sum_over=1)
    with accelerator.accumulate(model), pytest.raises(ConfigError, match="count this one too"):
        accelerator.backward(model(torch.ones(1, 3)).mean())
    with pytest.raises(ConfigError, match="not both"):
        accelerator.backward(torch.ones(1), mean_over=1, sum_over=1)
    assert accelerator.clip_grad_norm_(model.parameters(), 1.0) is not None
    optimizer.zero_grad()
    assert model.weight.grad is None


def test_targets_of_a_window_that_has_none_change_nothing():
    accelerator = Accelerator()
    model, optimizer = accelerator.prepare(*small())
    before = model.weight.detach().clone()
    for nothing in (0, torch.tensor(0)):
        logits = model(torch.ones(1, 3)).expand(1, 4)
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor([-100]))
        assert torch.isnan(loss), "the mean over nothing is 0/0"
        accelerator.backward(loss, mean_over=nothing)
    optimizer.step()
    assert torch.equal(model.weight, before)


def test_two_losses_in_one_step_add_up():
    """Outside of `accumulate` as well: windows end where the optimizer steps."""
    accelerator = Accelerator()
    model, optimizer = accelerator.prepare(*small())
    inputs = torch.arange(12.0).reshape(4, 3)
    for part in (inputs[:1], inputs[1:]):
        accelerator.backward(model(part).sum(), sum_over=len(part))
    got = model.weight.grad.clone()
    optimizer.zero_grad()
    model(inputs).mean().backward()
    assert torch.allclose(got, model.weight.grad)


def test_samplers_of_ones_own_give_the_same_again_after_a_resume():
    accelerator = Accelerator()
    weighted = WeightedRandomSampler(torch.arange(1.0, 11.0), 8)
    loader = accelerator.prepare(DataLoader(torch.arange(10), batch_size=2, sampler=weighted))
    first, second = (torch.cat(list(loader)).tolist() for _ in range(2))
    assert first != second and len(first) == 8
    again = accelerator.prepare(DataLoader(torch.arange(10), batch_size=2, sampler=weighted))
    again.load_state_dict({**again.state_dict(), "epoch": 1, "num_seen": 4})
    assert torch.cat(list(again)).tolist() == second[4:]
    rest = accelerator.skip_first_batches(accelerator.prepare(DataLoader(torch.arange(10), batch_size=3)), 2)
    assert len(rest) == 2 and torch.cat(list(rest)).tolist() == [6, 7, 8, 9]


def test_a_loader_left_in_the_middle_begins_again_and_workers_change_nothing():
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(torch.arange(10), batch_size=2, shuffle=True))
    assert torch.equal(next(iter(loader)), next(iter(loader))) and loader.epoch == 0
    with_workers = accelerator.prepare(DataLoader(torch.arange(10), batch_size=2, shuffle=True, num_workers=1))
    before = torch.get_rng_state()
    assert torch.equal(torch.cat(list(with_workers)), torch.cat(list(loader)))
    assert torch.equal(torch.get_rng_state(), before), "making loaders must not draw from dropout's generator"
    assert not accelerator.readings.active


def test_what_people_keep_is_packed_without_pickles(tmp_path):
    import numpy as np

    value = {"a": (1, 2.5, None), 3: {"t": torch.arange(3)}, "n": np.arange(2.0), "s": {"x"}, "l": [True, "text"]}
    tensors = {}
    packed = json.loads(json.dumps(pack(value, tensors, "mine")))
    rooms = room_for(packed)
    assert rooms.keys() == tensors.keys() and all(rooms[n].shape == t.shape for n, t in tensors.items())
    got = unpack(packed, tensors)
    assert got["a"] == value["a"] and torch.equal(got[3]["t"], value[3]["t"]) and got["s"] == {"x"}
    assert got["n"].tolist() == [0.0, 1.0] and got["l"] == [True, "text"]
    alike = {"a": {"b": torch.ones(2)}, "a.b": torch.zeros(2), 0: torch.ones(1), "0": torch.zeros(1)}
    tensors = {}
    got = unpack(pack(alike, tensors, "mine"), tensors)
    assert len(tensors) == 4 and [got["a"]["b"][0], got["a.b"][0], got[0], got["0"]] == [1, 0, 1, 0]
    with pytest.raises(ConfigError, match=r"mine\.x is a object, which cannot be saved"):
        pack({"x": object()}, {}, "mine")


def test_trackers(tmp_path, monkeypatch):
    """Weights & Biases through a stand-in, a tracker of one's own, and all that is installed."""
    runs = []

    class Run:
        def __init__(self, **settings):
            self.settings, self.logged, self.ended = settings, [], False
            runs.append(self)

        def log(self, values, step=None):
            self.logged.append((values, step))

        def finish(self):
            self.ended = True

    stand_in = types.ModuleType("wandb")
    stand_in.init = lambda **settings: Run(**settings)
    stand_in.__spec__ = types.SimpleNamespace(name="wandb")
    with monkeypatch.context() as nothing_installed:
        nothing_installed.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ConfigError, match=r"not installed\n.*duoka.wandb"):
            Accelerator(log_with="wandb")
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    own = Run()
    accelerator = Accelerator(log_with=["all", own], project_dir=tmp_path)
    accelerator.init_trackers("project", {"lr": 0.1})
    accelerator.log({"loss": torch.tensor(1.5), "both": {"a": 1, "b": 2}, "note": "text"}, step=3)
    assert accelerator.get_tracker("tensorboard", unwrap=True).log_dir == str(tmp_path / "project")
    assert runs[1].settings["project"] == "project" and runs[1].settings["config"] == {"lr": 0.1}
    assert accelerator.get_tracker("wandb", unwrap=True) is runs[1]
    assert own.logged[0][1] == 3
    accelerator.end_training()
    assert own.ended and runs[1].ended
    assert runs[1].logged == [({"loss": 1.5, "both": {"a": 1, "b": 2}, "note": "text"}, 3)]
    with pytest.raises(ConfigError, match="there is no tracker"):
        accelerator.get_tracker("tensorboard")


def test_batch_statistics_are_saved_and_come_back(tmp_path):
    accelerator = Accelerator(project_dir=tmp_path)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.Adagrad(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.randn(8, 3)).square().mean())
    optimizer.step()
    saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sums = [state["sum"].clone() for state in optimizer.state.values()]
    assert Path(accelerator.save_state()).name == "step-00000001"
    accelerator.backward(model(torch.randn(8, 3)).square().mean())
    optimizer.step()
    accelerator.load_state()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items())
    assert all(torch.equal(a, b["sum"]) for a, b in zip(sums, optimizer.state.values(), strict=True))
    assert accelerator.step == 1


@pytest.mark.parametrize("kind", ["lists of tensors", "tensors among the settings", "frozen since"])
def test_all_of_an_optimizers_state_comes_back(tmp_path, kind):
    """The step after load_state is the step that would have come without it."""
    accelerator = Accelerator()
    inputs, wanted = torch.randn(8, 3), torch.randn(8, 1)

    def begin():
        accelerator.free_memory()
        model, loose = small()[0], torch.nn.Parameter(torch.zeros(1))
        betas = (torch.tensor(0.7), torch.tensor(0.9))
        make = {
            "lists of tensors": lambda some: torch.optim.LBFGS(some, max_iter=3),
            "tensors among the settings": lambda some: torch.optim.AdamW(some, lr=0.1, betas=betas, foreach=False),
            "frozen since": lambda some: torch.optim.AdamW(some, lr=0.1),
        }
        model, optimizer = accelerator.prepare(model, make[kind]([*model.parameters(), loose]))

        def step():
            def closure():
                optimizer.zero_grad()
                loss = (model(inputs) + loose - wanted).square().mean()
                accelerator.backward(loss)
                return loss

            optimizer.step(closure)
            return [one.tolist() for one in (*model.parameters(), loose)]

        return step, loose

    step, loose = begin()
    step(), step()
    loose.requires_grad_(kind != "frozen since")
    accelerator.save_state(tmp_path / "kept")
    whole = step()
    step, loose = begin()
    loose.requires_grad_(kind != "frozen since")
    accelerator.load_state(tmp_path / "kept")
    assert step() == whole


def test_what_has_a_way_to_a_device_goes_by_it():
    """A packed sequence's lengths stay on the CPU; a graph of another library is moved whole."""

    class Graph:
        def to(self, device):
            self.device = device
            return self

    graph, packed = Graph(), torch.nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)])
    sent = send({"graph": graph, "pair": (packed, torch.ones(1)), "text": "a"}, "meta")
    assert sent["graph"] is graph and graph.device == "meta" and sent["text"] == "a"
    assert sent["pair"][0].data.is_meta and not sent["pair"][0].batch_sizes.is_meta and sent["pair"][1].is_meta


def test_models_are_copied_with_their_precision():
    import copy

    accelerator = Accelerator(mixed_precision="bf16")
    model = accelerator.prepare(torch.nn.Linear(3, 1))
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.weight.zero_()
        copied.bias.zero_()
    ours, theirs = model(torch.ones(1, 3)), copied(torch.ones(1, 3))
    assert ours.dtype == torch.float32 and theirs.item() == 0.0 != ours.item()


def test_profile_writes_a_trace(tmp_path):
    with Accelerator(project_dir=tmp_path).profile() as profiler:
        torch.ones(3).sum()
    assert profiler.key_averages() and json.loads((tmp_path / "profile" / "rank00000.json").read_text())["traceEvents"]


def test_packed_weights_are_refused_beside_frozen_ones():
    """Every rule of the block can be asked of a loop; what only the model can tell is asked when it comes."""
    ours = Accelerator(strategy="zero3", parallel={"compress": {"weights": "int8", "gradients": "int4"}})
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[0].requires_grad_(False)
    with pytest.raises(ConfigError, match="has frozen ones"):
        ours.prepare(model)
    torch.distributed.destroy_process_group()
