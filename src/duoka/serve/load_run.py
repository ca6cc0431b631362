"""What RUN or MODEL on the command line means, and the model and tokenizer behind it.

`eval`, `chat` and `export` call this. A run is read from its final folder, else from its newest whole checkpoint; a
folder may also be a full model or an adapter; anything else is a model as `model:` in a YAML would name it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from duoka.config.adapters import check_counted_once, read_adapter
from duoka.config.load import load_config
from duoka.config.schema import DataConfig, DataSource, LoraConfig, ModelConfig, RunConfig
from duoka.errors import ConfigError, DuokaError, Faults, StorageError, typed
from duoka.hub.base import other_base, read_base, read_identity, refuse_other_base
from duoka.hub.models import find_model, has_tokenizer, model_folder, resolve_tokenizer
from duoka.hub.models import gives_scores as folder_gives_scores
from duoka.hub.other_folders import refuse_no_model
from duoka.plan.find_family import longest_text
from duoka.runs.find import last_of_stages
from duoka.runs.folder import RunFolder, read_json
from duoka.runs.manifest import step_of
from duoka.serve.run_checkpoint import find_checkpoint, removed, still_there

if TYPE_CHECKING:
    import torch

    from duoka.comm.world import World
    from duoka.data.tokens.tokenizer import ChatTokenizer

Say = Callable[[str], None]


@dataclass(frozen=True)
class Trained:
    """A base model, and what training made of it: an adapter, full weights, a checkpoint, or nothing."""

    name: str
    base: Path
    base_name: str  # the base for other machines: its Hub id, or else its folder
    adapter: Path | None = None
    full: Path | None = None
    checkpoint: Path | None = None
    run: RunFolder | None = None
    config: RunConfig | None = None
    config_base: Path = Path()  # what relative paths of the config are relative to
    merged: tuple[str, ...] = ()  # adapters that lie below the one above, as a file of another tool names them
    template: str = "auto"  # of a plain model: its own, or a name; a run knows its own
    trusts_code: bool = False

    @property
    def tokenizer_folder(self) -> Path:
        """The folder whose tokenizer belongs to it: PEFT writes none beside an adapter."""
        if self.adapter is not None and not has_tokenizer(self.adapter):
            return self.base
        if self.checkpoint is not None and self.config is not None:  # which may name another than the base's
            return resolve_tokenizer(self.config.model, self.config_base, self.base)
        return self.adapter or self.full or self.base

    @property
    def is_adapted(self) -> bool:
        """True when base and adapter are apart, so that the base can be asked too, and merging makes sense."""
        return self.adapter is not None or (
            self.checkpoint is not None and self.config is not None and self.config.lora is not None
        )

    @property
    def trust_remote_code(self) -> bool:
        return self.trusts_code if self.config is None else self.config.model.trust_remote_code


def find_run(name: str) -> RunFolder | None:
    """The run of that folder, or of that name under runs/; of several stages, the last; None when there is none."""
    for path in (Path(name).expanduser(), Path("runs") / name):
        run = RunFolder(path)
        if run.exists():
            return run
        if (last := last_of_stages(path)) is not None:
            return last
    return None


def find_trained(name: str, *, step: int | None = None, say: Say) -> Trained:
    """What `name` means; of a run, the checkpoint of `step` when one is asked for."""
    run = find_run(name)
    if run is not None:
        return _find_in_run(name, run, step, say)
    if step is not None:
        raise ConfigError(f"--checkpoint names a step of a run, and {name!r} is no run", fix=_list_runs())
    folder = Path(name).expanduser()
    if (folder / "adapter_config.json").is_file():
        facts = read_json(folder / "adapter_config.json") or {}
        base_name = str(facts.get("base_model_name_or_path") or "")
        base = _base_of_adapter(name, folder, base_name, say)
        refuse_other_base(name, read_base(folder), base)
        return Trained(name, base, base_name, adapter=folder)
    try:
        base = model_folder(ModelConfig(name=name), Path(), say)
    except ConfigError as error:
        fix = error.fix if folder.is_file() else _list_runs()
        raise ConfigError(f"{name!r} is neither a run nor a model: {error.what}", fix=fix) from None
    refuse_no_model(base)
    return Trained(name, base, str(base))


def _base_of_adapter(name: str, folder: Path, base_name: str, say: Say) -> Path:
    """The model that the adapter in `folder` says it belongs to."""
    fix = "write its folder or Hub id into adapter_config.json (base_model_name_or_path)"
    if not base_name:
        raise ConfigError(f"{name!r} is an adapter that does not say which model it was trained on", fix=fix)
    try:
        base = model_folder(ModelConfig(name=base_name), folder, say)
        refuse_no_model(base)
    except ConfigError as error:
        raise ConfigError(
            f"the adapter in {name!r} was trained on {base_name!r}, which is not here", where=error.what, fix=fix
        ) from None
    return base


def agree_on_checkpoint(world: World, trained: Trained) -> Trained:
    """Rank 0's on every rank: a run that goes on may have saved another one between two ranks' looks."""
    own = None if trained.checkpoint is None else trained.checkpoint.name
    name = world.agree(own)
    fault: DuokaError | None = None
    if name != own and trained.run is not None:
        folder = None if name is None else trained.run.checkpoints / name
        try:
            if folder is not None and not folder.is_dir():
                raise removed(folder)
            step = None if folder is None else step_of(folder)
            trained = _find_in_run(trained.name, trained.run, step, lambda text: None)
        except DuokaError as error:  # raised on all: the others would wait for this rank
            fault = error
    for told in world.gather(fault):
        if told is not None:
            raise told
    return trained


def find_trained_on(model: str, adapters: Sequence[str], *, say: Say) -> Trained:
    """A model, or adapters on it, named apart as files of LLaMA-Factory do; all may be runs of duoka."""
    if not adapters:
        return find_trained(model, say=say)
    runs = [find_run(name) for name in adapters]
    adapters = [name if run is None else os.fspath(run.path) for name, run in zip(adapters, runs, strict=True)]
    if len(set(adapters)) < len(adapters):
        raise ConfigError("adapter_name_or_path names an adapter twice: it would count twice", fix="name it once")
    *below, last = adapters
    for name in below:
        read_adapter(name, Path(), "adapter_name_or_path")
    faults = check_counted_once([("adapter_name_or_path", name) for name in adapters], Path()) if below else []
    if faults:
        raise Faults(faults)
    return replace(_find_adapted(model, last, say), merged=tuple(below))


def _find_adapted(model: str, adapter: str, say: Say) -> Trained:
    run = find_run(adapter)
    if run is None and not (Path(adapter) / "adapter_config.json").is_file():
        raise ConfigError(f"there is neither a run nor an adapter in {adapter!r}", fix=_list_runs())
    below = find_trained(model, say=say)
    base = below.full or below.base
    if run is None:
        if differs := other_base(read_base(Path(adapter)), base):
            say(f"{adapter} was trained on another model than {model}, which the file names\n{differs}")
        return Trained(adapter, base, model, adapter=Path(adapter))
    found = find_trained(adapter, say=say)
    if not found.is_adapted:
        raise ConfigError(f"{adapter} was trained in full: it is a model of its own", fix="name it as the model")
    if found.base.resolve() != base.resolve():
        raise ConfigError(
            f"the adapter in {adapter} was trained on {found.base_name}, and the file names {model}",
            fix=f"write:   model_name_or_path: {found.base_name}",
        )
    return found


def _find_in_run(name: str, run: RunFolder, step: int | None, say: Say) -> Trained:
    loaded = load_config(run.config)
    config = loaded.config
    model = config.model
    if model.depth is not None and (run.final / "tokenizer.json").is_file():
        # A result has its tokenizer with it; the folder that training began with may lie elsewhere by now.
        model = model.model_copy(update={"tokenizer": os.fspath(run.final.absolute())})
    base = model_folder(model, loaded.base, say)
    base_name = find_model(config.model, loaded.base).hub_id or str(base)
    of_run: dict[str, Any] = {"run": run, "config": config, "config_base": loaded.base}
    if step is not None:
        return _on_its_base(Trained(name, base, base_name, checkpoint=find_checkpoint(run, step, say), **of_run))
    if (run.final / "adapter_config.json").is_file():
        return _on_its_base(Trained(name, base, base_name, adapter=run.final, **of_run))
    if (run.final / "config.json").is_file():
        return Trained(name, base, base_name, full=run.final, **of_run)
    newest = find_checkpoint(run, None, say)
    say(f"{run.path} is not finished: reading {newest.name}")
    return _on_its_base(Trained(name, base, base_name, checkpoint=newest, **of_run))


def _on_its_base(trained: Trained) -> Trained:
    """Refuse a base that changed since these weights were trained on it."""
    config = trained.config
    if trained.adapter is not None:
        refuse_other_base(trained.name, read_base(trained.adapter), trained.base)
    elif trained.checkpoint is not None and config is not None and (config.lora or config.train_only):
        from duoka.runs.manifest import read_manifest

        with still_there(trained.checkpoint):
            manifest = read_manifest(trained.checkpoint)
        refuse_other_base(trained.name, read_identity(manifest.base), trained.base)
    return trained


def _list_runs() -> str:
    runs = sorted(path.parent.name for path in Path("runs").glob("*/config.yaml"))
    return f"runs here: {', '.join(runs)}" if runs else "`duoka runs` lists runs; there are none in ./runs"


def data_for(trained: Trained, sources: tuple[DataSource, ...]) -> DataConfig:
    """How data is read for a model of no run, which says nothing of it: cut where the model's positions end."""
    data = DataConfig(train=sources)
    most = longest_text(read_json((trained.full or trained.base) / "config.json") or {})
    return data if most is None else data.model_copy(update={"max_length": min(data.max_length, most)})


def gives_scores(trained: Trained) -> bool:
    """Whether it is a reward model: one number for an answer, and no words."""
    if trained.config is not None:
        return trained.config.stage.kind.scores
    return folder_gives_scores(trained.adapter or trained.full or trained.base)


def _wrong_kind(trained: Trained, scores: bool) -> ConfigError:
    if scores:
        return ConfigError(
            f"{trained.name} says words, and gives no scores", fix="name a run of   stage: reward   or such a model"
        )
    return ConfigError(
        f"{trained.name} is a reward model: it gives an answer a score, and says no words",
        where="its folder `final` is read by transformers (AutoModelForSequenceClassification) and PEFT as it is",
        fix=f"duoka score {typed(trained.name)} DATA",
    )


def load_trained(
    trained: Trained,
    *,
    dtype: torch.dtype,
    attention: str = "sdpa",
    base_only: bool = False,
    unpacked: bool = False,
    scores: bool = False,
) -> torch.nn.Module:
    """The model, in eval mode, adapters apart from the base; `base_only`: as it was before training.

    A base that was packed in training is packed here, or with `unpacked` has the same values in plain matrices.
    `scores`: a reward model, which is refused everywhere else.
    """
    from duoka.model.adapters import Earlier
    from duoka.model.build import load_adapter, load_model
    from duoka.model.own_lengths import use_own_lengths
    from duoka.model.quantize import Quantization
    from duoka.model.request import ModelRequest

    if gives_scores(trained) != scores and not base_only:
        raise _wrong_kind(trained, scores)
    options: dict[str, Any] = {"attention": attention, "trust_remote_code": trained.trust_remote_code, "scores": scores}
    packing = Quantization.in_files(trained.full or trained.base, unpacked=unpacked)
    if packing is None and trained.config is not None and trained.full is None:
        packing = Quantization.of(trained.config.model, unpacked=unpacked)
    options["packing"] = packing
    if base_only:
        seed = 0 if trained.config is None else trained.config.train.seed  # a new model's base is drawn from it
        lm = load_model(ModelRequest(trained.base, dtype=dtype, seed=seed, **options))
    elif trained.adapter is not None:
        below = Earlier.of(LoraConfig(merge=trained.merged), Path())
        base = load_model(ModelRequest(trained.base, dtype=dtype, earlier=below, **options))
        lm = load_adapter(base, trained.adapter, below)
    elif trained.checkpoint is not None:
        assert trained.config is not None
        options["earlier"] = Earlier.of(trained.config.lora, trained.config_base, merged_only=True)
        lm = _load_checkpoint(trained.base, trained.checkpoint, trained.config, dtype, options)
    else:
        lm = load_model(ModelRequest(trained.full or trained.base, dtype=dtype, **options))
    use_own_lengths(lm)
    return lm.eval()


def _load_checkpoint(
    base: Path, checkpoint: Path, config: RunConfig, dtype: torch.dtype, options: dict[str, Any]
) -> torch.nn.Module:
    """The base model with the trained tensors of a checkpoint over it; adapters in fp32, as in training."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    from duoka.model.build import load_model
    from duoka.model.dtypes import BY_PRECISION, narrow
    from duoka.model.request import ModelRequest
    from duoka.store.reader import opened

    what: dict[str, Any] = {"lora": config.lora, "train_only": config.train_only, "seed": config.train.seed}
    lm = load_model(
        ModelRequest(base, dtype=dtype if config.lora else BY_PRECISION[config.train.weights], **what, **options)
    )
    tensors = {f"model.{name}": p.detach() for name, p in lm.named_parameters() if p.requires_grad}
    with still_there(checkpoint), opened(checkpoint) as (reader, _):
        try:
            dcp.load(tensors, storage_reader=reader, no_dist=True)  # type: ignore[attr-defined]
        except CheckpointException as error:  # no Exception of Python's
            why = (str(error).strip().splitlines() or [""])[-1]
            raise StorageError(f"{checkpoint} cannot be read", where=why, fix="choose another step") from error
    if not config.lora:
        narrow(lm, dtype)
    return lm


def choose_dtype(precision: str = "auto") -> torch.dtype:
    """The type that computes; auto: the one that this machine computes natively."""
    from duoka.model.dtypes import BY_PRECISION
    from duoka.plan.hardware import read_machine

    native = "bf16" if read_machine().has_native_bf16 else "fp32"
    return BY_PRECISION[native if precision == "auto" else precision]


def load_for_chat(trained: Trained, *, base_only: bool = False, device: torch.device | None = None) -> torch.nn.Module:
    """The model on `device`, by default this machine's fastest, in the type that it computes natively."""
    from duoka.comm.world import pick_device
    from duoka.model.decode import answer_fast
    from duoka.model.quantize import decode_fast

    lm = load_trained(trained, dtype=choose_dtype(), base_only=base_only)
    decode_fast(lm)
    answer_fast(lm)
    return lm.to(device or pick_device(0))


def load_chat_tokenizer(trained: Trained) -> ChatTokenizer:
    """The tokenizer, with the chat template that training used."""
    from duoka.data.prepare import read_tokenizer
    from duoka.data.tokens.tokenizer import load_tokenizer

    if trained.config is None:
        return load_tokenizer(trained.tokenizer_folder, trained.template)
    return read_tokenizer(trained.config.model, trained.config_base, trained.base)


def describe(trained: Trained) -> str:
    """The loaded model in one line."""
    if trained.checkpoint is not None:
        return f"{trained.name} ({trained.checkpoint.name} over {trained.base.name})"
    if trained.adapter is not None:
        return f"{trained.name} (adapter over {trained.base.name})"
    return f"{trained.name} ({_model_type(trained.full or trained.base)})"


def _model_type(folder: Path) -> str:
    return str(json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type", "model"))
