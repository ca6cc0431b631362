"""Names and arguments of Hugging Face Accelerate: each works here, or is refused by name with what to write instead.

The corpus are the calls of its public examples and guides (names and arguments, in our own words), and the installed
library itself, by introspection.
"""

import importlib
import inspect
import json
import logging
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import duoka
from duoka import Accelerator
from duoka.accelerator import logging as their_logging
from duoka.accelerator import utils
from duoka.accelerator.names.arguments import add_launchers
from duoka.accelerator.names.offered import NotOffered, find
from duoka.errors import ConfigError

# What their class has and ours has not: asked for, it says what to write.
NOT_THERE = {
    "deepspeed_ulysses_dl_adapter",
    "fp8_backend",
    "lomo_backward",
    "maybe_context_parallel",
    "torch_device_mesh",
}
# Their defaults that ask for what we do not do, and ours in their place.
OUR_DEFAULTS = {
    ("no_sync", "model"), ("on_process", "process_index"), ("on_local_process", "local_process_index"),
    ("save", "safe_serialization"), ("save_model", "max_shard_size"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def world_of_one():
    """Ours makes one where DDP is asked for, for the life of a script; here other tests follow."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def test_every_name_of_theirs_is_here_or_refused_by_name():
    for place in ("accelerate", "accelerate.utils"):
        module = importlib.import_module(place)
        for name in dir(module):
            if name.startswith("_") or inspect.ismodule(getattr(module, name)):
                continue
            try:
                assert find(name, place) is not None
            except NotOffered as refusal:
                assert name in str(refusal) and "\n" in str(refusal), "it says what to do"
    with pytest.raises(AttributeError, match="nobody_has_this"):
        utils.nobody_has_this  # noqa: B018
    with pytest.raises(ImportError, match="into stages yet"):
        from duoka import prepare_pippy  # noqa: F401


def test_every_member_and_argument_of_their_class_is_here():
    theirs = importlib.import_module("accelerate").Accelerator
    ours = Accelerator()
    for name in dir(theirs):
        if name.startswith("_"):
            continue
        if name in NOT_THERE:
            with pytest.raises(AttributeError, match=rf"has no '{name}' in duoka: \S"):
                getattr(ours, name)
            continue
        there, here = getattr(theirs, name), getattr(ours, name)
        if not callable(there):
            continue
        wanted, got = inspect.signature(there).parameters, inspect.signature(here).parameters
        takes_more = {p.kind for p in got.values()} & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
        for key, parameter in wanted.items():
            if key == "self" or parameter.kind in (2, 4):
                continue
            assert key in got or takes_more, f"{name} lacks {key}"
            if key in got and (name, key) not in OUR_DEFAULTS:
                assert got[key].default == parameter.default, f"{name}({key}) has another default"


# A call of a public example or guide -> nothing (it works), or what the refusal says.
CALLS = {
    "Accelerator()": "",
    "Accelerator(cpu=False, mixed_precision=None)": "",
    "Accelerator(cpu=None, mixed_precision='no', gradient_accumulation_steps=2)": "",
    "Accelerator(cpu=False, mixed_precision='bf16', log_with='all', project_dir='x')": "",
    "Accelerator(device_placement=True, split_batches=False, rng_types=None, kwargs_handlers=[])": "",
    "Accelerator(dynamo_backend=None)": "",
    "Accelerator(project_config=None, deepspeed_plugin=None, fsdp_plugin=None)": "",
    "Accelerator(step_scheduler_with_optimizer=False)": "",
    "Accelerator(even_batches=True)": "",
    "Accelerator(device_placement=False)": "device_placement=False",
    "Accelerator(rng_types=['torch'])": "rng_types",
    "Accelerator(dynamo_backend='inductor')": "model.compile",
    "Accelerator(dataloader_config=u.DataLoaderConfiguration(use_stateful_dataloader=True))": "",
    "Accelerator(dataloader_config=u.DataLoaderConfiguration(use_seedable_sampler=True, data_seed=4))": "",
    "Accelerator(dataloader_config=u.DataLoaderConfiguration(custom_classes=1))": "plain DataLoader",
    "Accelerator(gradient_accumulation_plugin=u.GradientAccumulationPlugin(num_steps=2, adjust_scheduler=False))": "",
    "Accelerator(gradient_accumulation_plugin=u.GradientAccumulationPlugin(sync_each_batch=True))": "zero2",
    "Accelerator(gradient_accumulation_plugin=u.GradientAccumulationPlugin(sync_with_dataloader=False))": "ends with",
    "Accelerator(kwargs_handlers=[u.DistributedDataParallelKwargs(find_unused_parameters=True)])": "",
    "Accelerator(kwargs_handlers=[u.DistributedDataParallelKwargs(comm_hook=u.DDPCommunicationHookType.FP16)])": "",
    "Accelerator(kwargs_handlers=[u.DistributedDataParallelKwargs(comm_hook=u.DDPCommunicationHookType.POWER_SGD,"
    " comm_wrapper=u.DDPCommunicationHookType.BF16)])": "one of them",
    "Accelerator(kwargs_handlers=[u.DistributedDataParallelKwargs(broadcast_buffers=False)])": "broadcast_buffers",
    "Accelerator(kwargs_handlers=[u.DistributedDataParallelKwargs(typo=1)])": "no argument typo",
    "Accelerator(kwargs_handlers=[u.InitProcessGroupKwargs(timeout=timedelta(seconds=3600))])": "",
    "Accelerator(kwargs_handlers=[u.GradScalerKwargs(init_scale=1024.0)])": "",
    "Accelerator(cpu=True, kwargs_handlers=[u.ProfileKwargs(activities=['cpu'], record_shapes=True)])": "",
    "Accelerator(kwargs_handlers=[u.AORecipeKwargs(config=None)])": "AORecipeKwargs is not in duoka",
    "Accelerator(mixed_precision='fp8')": "mixed_precision is 'fp8'",
    "Accelerator(dynamo_plugin=u.TorchDynamoPlugin(backend='inductor', mode='default'))": "model.compile",
    "Accelerator(fsdp_plugin=u.FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False,"
    " auto_wrap_policy='transformer_based_wrap', transformer_cls_names_to_wrap=['Block']))": "",
    "Accelerator(fsdp_plugin=u.FullyShardedDataParallelPlugin(ignored_modules=[1]))": "ignored_modules",
    "Accelerator(deepspeed_plugin=u.DeepSpeedPlugin(zero_stage=2, gradient_accumulation_steps=2))": "",
    "Accelerator(deepspeed_plugin=u.DeepSpeedPlugin(hf_ds_config={'zero_optimization': {'stage': 3}}))": "",
    "Accelerator(deepspeed_plugin=u.DeepSpeedPlugin(hf_ds_config={'optimizer': {}}))": "makes the optimizer",
    "Accelerator(deepspeed_plugin=u.DeepSpeedPlugin(hf_ds_config={'bf16': {'enabled': True}}))": "computes in bf16",
    "Accelerator(deepspeed_plugin=u.DeepSpeedPlugin(hf_ds_config={'curriculum_learning': {}}))": "curriculum_learning",
    "Accelerator(deepspeed_plugin=u.DeepSpeedPlugin(zero_stage=2, gradient_clipping=1.0))": "clip_grad_norm_",
    "Accelerator(deepspeed_plugin=u.DeepSpeedPlugin(hf_ds_config='no/such.json'))": "no/such.json cannot be read",
    "Accelerator(deepspeed_plugin=u.DeepSpeedPlugin(zero_stage=3, offload_param_device='nvme'))": "host memory alone",
    "Accelerator(parallelism_config=u.ParallelismConfig())": "",
    "Accelerator(parallelism_config=u.ParallelismConfig(dp_shard_size=2, tp_size=2))": "are not split yet",
    "Accelerator(parallelism_config=u.ParallelismConfig(sp_backend='deepspeed', sp_size=2))": "are not split yet",
    "Accelerator(megatron_lm_plugin=u.MegatronLMPlugin(return_logits=True))": "MegatronLMPlugin is not in duoka",
    "Accelerator(log_with='wandb', project_config=u.ProjectConfiguration(project_dir='.', logging_dir='logs'))": "",
    "u.DummyScheduler(None, total_num_steps=1, warmup_num_steps=1)": "give `prepare` a scheduler of torch",
    "u.DummyOptim([], lr=1)": "give `prepare` an optimizer of torch",
    "u.MegatronLMDummyScheduler(optimizer=None, total_num_steps=1)": "give `prepare` a scheduler of torch",
    "isinstance(3, (u.DummyOptim, u.DummyScheduler))": "",
    "'optimizer' in u.DeepSpeedPlugin(hf_ds_config={'bf16': {'enabled': 'auto'}}).deepspeed_config": "",
    "u.PartialState()": "",
    "u.set_seed(3)": "",
    "u.set_seed(3, device_specific=True)": "",
    "u.gather_object(['x'])": "",
    "u.tqdm(range(0), desc='x')": "",
    "u.is_xpu_available(), u.is_npu_available(), u.is_schedulefree_available()": "",
    "u.notebook_launcher(print, ('x',), num_processes=1)": "",
    "u.init_empty_weights()": "",
    "u.prepare_pippy(None, split_points='auto', example_args=())": "does not split a model into stages yet",
    "u.PrepareForLaunch(print, distributed_type='TPU')": "duoka launch",
    "Accelerator().torch_device_mesh": "torch_device_mesh",
    "Accelerator().maybe_context_parallel(buffers=[], buffer_seq_dims=[], no_restore_buffers=set())": "sequences yet",
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_of_theirs_works_or_is_refused_by_name(call, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    names = {"Accelerator": Accelerator, "u": utils, "timedelta": timedelta}
    if not CALLS[call]:
        eval(call, names)
        return
    with pytest.raises((ConfigError, AttributeError), match=CALLS[call]):
        eval(call, names)


def test_plugins_say_the_same_as_our_own_arguments():
    def made(**arguments):
        accelerator = Accelerator(**arguments)
        return accelerator.parallel, accelerator.settings, accelerator.window.num_steps

    config = utils.DataLoaderConfiguration(split_batches=True, dispatch_batches=True, data_seed=5)
    assert made(dataloader_config=config) == made(split_batches=True, dispatch_batches=True, seed=5)
    assert made(gradient_accumulation_plugin=utils.GradientAccumulationPlugin(3)) == made(gradient_accumulation_steps=3)
    options = utils.DistributedDataParallelKwargs(bucket_cap_mb=5, static_graph=True, comm_hook="fp16")
    ours = {"bucket_mb": 5, "static_graph": True, "compress": "fp16"}
    assert made(kwargs_handlers=[options]) == made(parallel=ours)
    wait = utils.InitProcessGroupKwargs(timeout=timedelta(minutes=2))
    assert made(kwargs_handlers=[wait]) == made(parallel={"timeout": "120s"})
    for plugin, strategy in {
        "SHARD_GRAD_OP": "zero2", "FULL_SHARD": "fsdp", "NO_SHARD": "ddp", "HYBRID_SHARD": "hsdp",
    }.items():  # fmt: skip
        said = utils.FullyShardedDataParallelPlugin(sharding_strategy=plugin).arguments()
        assert said["strategy"] == strategy
    assert utils.FullyShardedDataParallelPlugin(reshard_after_forward=False).arguments()["strategy"] == "zero2"
    assert utils.DeepSpeedPlugin(zero_stage=3, offload_param_device="cpu").arguments() == {
        "strategy": "zero3", "parallel": {"offload": "params"},
    }  # fmt: skip
    both = utils.ParallelismConfig(dp_replicate_size=2, dp_shard_size=4)
    assert both.arguments() == {"strategy": "hsdp", "parallel": {"shard_ranks": 4}}


def test_what_people_ask_of_prepared_things(tmp_path):
    accelerator = Accelerator(2)
    plain = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer, schedule, loader = accelerator.prepare(
        plain, optimizer, schedule, DataLoader(torch.ones(6, 2), batch_size=4, drop_last=True, num_workers=0)
    )
    assert isinstance(loader, DataLoader) and loader.drop_last and loader.num_workers == 0
    assert len(loader.sampler) == 6 and loader.batch_sampler.batch_size == 4
    assert isinstance(schedule, torch.optim.lr_scheduler.LRScheduler) and schedule.get_last_lr() == [0.1]
    assert schedule.state_dict() == schedule.scheduler.state_dict() and optimizer.optimizer.param_groups
    assert optimizer.step_was_skipped is False
    state = accelerator.gradient_state
    for batch in loader:
        assert (state.end_of_dataloader, state.in_dataloader, state.num_steps) == (True, True, 2)
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).mean(), retain_graph=True)
            assert state.sync_gradients and accelerator.sync_gradients
    assert str(accelerator.distributed_type) == "NO" and accelerator.distributed_type == utils.DistributedType.NO
    assert "Mixed precision: no" in repr(accelerator.state) and utils.AcceleratorState().num_processes == 1
    assert duoka.DistributedType is utils.DistributedType
    frozen = accelerator.prepare_model(torch.nn.Linear(1, 1), evaluation_mode=True)
    assert frozen(torch.ones(1, 1)).shape == (1, 1)


def test_states_with_hooks_automatic_names_and_a_limit(tmp_path):
    project = utils.ProjectConfiguration(project_dir=tmp_path, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(project_config=project)
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    seen = []
    saving = accelerator.register_save_state_pre_hook(lambda models, weights, folder: seen.append(sorted(weights[0])))
    accelerator.register_load_state_pre_hook(lambda models, folder: seen.append(folder))
    with torch.no_grad():
        for value in range(3):
            model.weight.fill_(value)
            accelerator.save_state(safe_serialization=True)
            saving.remove()
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["checkpoint_1", "checkpoint_2"] and accelerator.save_iteration == 3
    model.weight.data.fill_(9)
    accelerator.load_state()
    assert model.weight.tolist() == [[2.0, 2.0]]
    assert seen == [["bias", "weight"], str(tmp_path / "checkpoints" / "checkpoint_2")]
    with pytest.raises(ConfigError, match="asks for a pickle"):
        accelerator.save_state(tmp_path / "x", safe_serialization=False)


def test_trackers_of_ones_own_are_told_the_config(tmp_path):
    from duoka.accelerator.tracking import GeneralTracker, on_main_process

    class Mine(GeneralTracker):
        name = "mine"
        requires_logging_directory = False

        def __init__(self):
            super().__init__()
            self.told = []

        @property
        def tracker(self):
            return self.told

        @on_main_process
        def store_init_configuration(self, values):
            self.told.append(values)

        @on_main_process
        def log(self, values, step=None, **options):
            self.told.append((values, step, options))

    mine = Mine()
    accelerator = Accelerator(log_with=[mine, "tensorboard"], project_config=utils.ProjectConfiguration(tmp_path))
    accelerator.init_trackers("run", config={"lr": 1})
    accelerator.log({"loss": 2}, step=1, log_kwargs={"mine": {"x": 3}})
    accelerator.get_tracker("tensorboard").log_images({"picture": torch.zeros(1, 3, 4, 4)}, step=1)
    assert accelerator.get_tracker("mine", unwrap=True) == [{"lr": 1}, ({"loss": 2}, 1, {"x": 3})]
    accelerator.end_training()


def test_functions_beside_it(caplog):
    tried = []

    @utils.find_executable_batch_size(starting_batch_size=100)
    def train(batch_size, extra):
        tried.append(batch_size)
        if batch_size > 85:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return extra

    assert train("done") == "done" and tried == [100, 90, 81]
    a, b = utils.release_memory(torch.ones(1), torch.ones(1))
    assert a is None and b is None
    with caplog.at_level(logging.INFO):
        their_logging.get_logger("loop", log_level="INFO").info("once", main_process_only=True)
    assert [record.message for record in caplog.records] == ["once"]
    assert utils.gather(torch.ones(2)).tolist() == [1, 1] and utils.reduce(torch.ones(1)).tolist() == [1]
    assert utils.pad_across_processes(torch.ones(1)).tolist() == [1] and utils.broadcast(torch.ones(1)).tolist() == [1]
    utils.synchronize_rng_states(["torch", "python"])
    with pytest.raises(ConfigError, match="needs a prepared loader"):
        utils.skip_first_batches([1], 1)
    assert json.dumps(utils.DistributedType.list())


def test_save_pretrained_takes_what_loops_give_it(tiny_model, tmp_path):
    from transformers import AutoModelForCausalLM

    accelerator = Accelerator()
    model = accelerator.prepare(AutoModelForCausalLM.from_pretrained(tiny_model))
    accelerator.unwrap_model(model).save_pretrained(
        tmp_path / "theirs", is_main_process=accelerator.is_main_process, save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )  # fmt: skip
    accelerator.save_model(model, tmp_path / "ours", max_shard_size="1GB", safe_serialization=True,
                           is_main_process=accelerator.is_main_process, save_function=accelerator.save)  # fmt: skip
    for folder in ("theirs", "ours"):
        again = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        assert all(torch.equal(p, q) for p, q in zip(again.parameters(), model.parameters(), strict=True))


LAUNCHED = {"ACCELERATE_USE_DEEPSPEED": "true"}


def launched(**env: str) -> dict[str, Any]:
    said: dict[str, Any] = {"parallel": {}}
    add_launchers(said, None, {**LAUNCHED, **{f"ACCELERATE_{name}": value for name, value in env.items()}})
    return said


def test_what_the_launcher_was_told_of_deepspeed_counts_as_its_plugin(tmp_path: Path) -> None:
    """`accelerate launch --use_deepspeed` says it in these variables, and of a file its path alone."""
    file = tmp_path / "ds.json"
    zero = {"stage": 3, "offload_param": {"device": "cpu"}}
    file.write_text(json.dumps({"zero_optimization": zero, "gradient_accumulation_steps": 4}), "utf-8")
    said = launched(DEEPSPEED_CONFIG_FILE=str(file))
    assert said["strategy"] == "zero3" and said["gradient_accumulation_steps"] == 4
    assert said["parallel"] == {"offload": "params"} and said["plugins"]["deepspeed_plugin"].zero_stage == 3
    assert launched()["strategy"] == "zero2" and launched(DEEPSPEED_ZERO_STAGE="1")["strategy"] == "zero1"
    assert launched(DEEPSPEED_ZERO_STAGE="3", DEEPSPEED_OFFLOAD_PARAM_DEVICE="cpu")["parallel"] == {"offload": "params"}
    assert launched(USE_FSDP="true")["strategy"] == "fsdp"
    for env, message in (
        ({"GRADIENT_CLIPPING": "1.0"}, "clip_grad_norm_"),
        ({"DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"}, "HostAdamW"),
        ({"DEEPSPEED_CONFIG_FILE": str(tmp_path / "none.json")}, "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=message):
            launched(**env)


def test_the_script_comes_before_the_launchers_deepspeed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3}}', "utf-8")
    for name, value in {**LAUNCHED, "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(tmp_path / "ds.json")}.items():
        monkeypatch.setenv(name, value)
    assert Accelerator(strategy="zero1").parallel.strategy == "zero1"
    assert Accelerator().parallel.strategy == "zero3"
