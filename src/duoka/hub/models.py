"""Where a model comes from: a local folder, a Hub id, or the demo model in a wheel. Finds and checks; knows no torch.

`config` checks call `check_model` before anything starts; `model_folder` gives everyone one local folder to read.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from duoka.config.adapters import check_adapters
from duoka.config.paths import given_path, is_folder, is_there
from duoka.config.schema import ModelConfig, RunConfig
from duoka.errors import ConfigError, Fault
from duoka.hub.adapter_files import check_fit
from duoka.hub.demo_model import INSTALL, convert_demo_model, missing_packages
from duoka.hub.new_model import MORE_TEMPLATES, TOKENIZER_FILES, new_model_folder, scratch_folder
from duoka.hub.other_folders import WRITE, find_other, find_other_file, has_config
from duoka.hub.weight_files import find_damage
from duoka.plan.shape import PACKERS
from duoka.runs.cache import cache_folder
from duoka.runs.folder import read_json

DEMO = "demo"
SCORES_ANSWERS = "ForSequenceClassification"  # how transformers calls architectures of reward models
_HUB_ID = re.compile(r"^[\w.-]+(/[\w.-]+)?$")
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")


@dataclass(frozen=True)
class ModelSource:
    """Exactly one of the four is set."""

    folder: Path | None = None
    hub_id: str | None = None
    is_demo: bool = False
    is_new: bool = False  # from nothing, as deep as the config says


def find_model(model: ModelConfig, base: Path) -> ModelSource:
    """What `model.name` means: `demo`, an existing folder (from here, then from the YAML's folder), or a Hub id.

    With `model.depth` in its place, a model from nothing.
    """
    if model.depth is not None:
        return ModelSource(is_new=True)
    name = model.name
    if name == DEMO and not is_folder(Path(name)):
        return ModelSource(is_demo=True)
    given = given_path(name)
    for folder in (given, base / given):
        if is_folder(folder):
            result = folder / "final"  # of a run: what it made
            is_run = not (folder / "config.json").is_file() and (result / "config.json").is_file()
            return ModelSource(folder=(result if is_run else folder).resolve())
    file = next((one for one in (given, base / given) if is_there(one)), None)
    if file is not None and (other := find_other_file(file)) is not None:
        raise ConfigError(f"model.name is {name!r}, {other[0]}", fix=other[1])
    if not _is_hub_id(name) or is_there(given):
        raise ConfigError(f"model.name is {name!r}, and there is no such folder", fix=WRITE)
    return ModelSource(hub_id=name)


_MAKE_TOKENIZER = "make one from your text:   duoka data tokenizer FILES --out tok"


def check_model(config: RunConfig, base: Path) -> list[Fault]:
    """Faults of the model's place and files that can be seen without loading it."""
    try:
        source = find_model(config.model, base)
    except ConfigError as error:
        return [Fault(error.what, key="model.name", fix=error.fix or "")]
    if source.is_new:
        return _check_new(config.model, base)
    if source.is_demo:
        return _check_demo("model.name") or check_fit(config.lora, base, None)
    if source.hub_id is not None:
        cached = _cached_hub_folder(source.hub_id, config.model.revision, partial(_is_whole, config.model))
        if cached is not None:
            return _check_local(config, base, cached)
        return _check_hub("model.name", source.hub_id, WRITE) or check_adapters(config, base)
    if source.folder is None:
        return []
    return _check_folder(source.folder, config.model) or _check_local(config, base, source.folder)


def _check_local(config: RunConfig, base: Path, folder: Path) -> list[Fault]:
    faults = _check_packed(config, folder) or _check_says_words(config, folder)
    return faults or check_fit(config.lora, base, folder)


def gives_scores(folder: Path) -> bool:
    """Whether a model, or an adapter, gives an answer one number, as reward models do, and says no words."""
    facts = [read_json(folder / name) or {} for name in ("adapter_config.json", "config.json")]
    names = facts[1].get("architectures") or ()
    return facts[0].get("task_type") == "SEQ_CLS" or any(str(name).endswith(SCORES_ANSWERS) for name in names)


def _check_says_words(config: RunConfig, folder: Path) -> list[Fault]:
    """transformers would read such a folder, and draw a new head at random."""
    stage = config.stage
    if stage.kind.scores or not gives_scores(folder):
        return []
    what = f"model.name is {str(folder)!r}, a reward model: it gives an answer a score, and has no head for words"
    fix = "name the model that the reward model was made from, or write   stage: reward   to train it further"
    return [Fault(f"{what}; stage {stage.name} needs one that says words", key="model.name", fix=fix)]


def _check_demo(key: str) -> list[Fault]:
    missing = [] if _demo_target().is_dir() else missing_packages()
    if not missing:
        return []
    what = f"{key}: demo needs what is not installed: {', '.join(missing)}"
    return [Fault(what, key=key, fix=f"install it:   {INSTALL}")]


def _check_new(model: ModelConfig, base: Path) -> list[Fault]:
    """A new model has nothing of its own but sizes: the tokenizer must be there."""
    if not model.tokenizer:
        return []  # a rule's matter
    folder = local_tokenizer(model, base)
    if folder is None and model.tokenizer == DEMO:
        return _check_demo("model.tokenizer")
    if folder is None and _is_hub_id(model.tokenizer):
        return _check_hub("model.tokenizer", model.tokenizer, _MAKE_TOKENIZER)
    if folder is None:
        what = f"model.tokenizer is {model.tokenizer!r}, and there is no such folder"
    elif (folder / "tokenizer.json").is_file():
        return []
    else:
        what = f"model.tokenizer is {model.tokenizer!r}, which has no tokenizer.json"
    return [Fault(what, key="model.tokenizer", fix=_MAKE_TOKENIZER)]


def local_tokenizer(model: ModelConfig, base: Path) -> Path | None:
    """The folder that `model.tokenizer` names, as far as it is on this machine; of a run, what it made."""
    given = given_path(model.tokenizer or "")
    folder = next((place for place in (given, base / given) if model.tokenizer and is_folder(place)), None)
    if folder is not None:
        is_run = not _has_tokenizer(folder) and _has_tokenizer(folder / "final")
        return folder / "final" if is_run else folder
    return _cached_hub_folder(model.tokenizer or "", None, _has_tokenizer)


def _has_tokenizer(folder: Path) -> bool:
    return (folder / "tokenizer.json").is_file()


def _check_packed(config: RunConfig, folder: Path) -> list[Fault]:
    """What weights that came with few bits do not survive: DataParallel, which copies them to each GPU anew, and being
    trained or packed once more."""
    how = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("quantization_config")
    if how is None or config.model.from_scratch:
        return []
    method = how.get("quant_method", "low-bit") if isinstance(how, dict) else "low-bit"
    name, lora = str(folder), config.lora
    if config.parallel.strategy == "dp":
        what = f"parallel.strategy is dp, and {name!r} is quantized ({method}): its weights cannot be copied by dp"
        return [Fault(what, key="parallel.strategy", fix="write:   strategy: ddp   (one process per GPU)")]
    if method not in PACKERS:
        return []
    came = f"the weights of {name!r} came packed ({method})"
    if isinstance(how, dict) and how.get("load_in_8bit") and config.parallel.strategy in ("zero3", "fsdp", "hsdp"):
        what = f"parallel.strategy is {config.parallel.strategy}, and {came} in 8 bits, whose scales it cannot cut"
        return [Fault(what, key="parallel.strategy", fix="write:   strategy: zero2   or   strategy: ddp")]
    if lora is None:
        what = f"{came}: they cannot be trained, and there is no lora block"
        fix = "write for example:   lora: {rank: 8}   or name the model that was packed"
        return [Fault(what, key="model.name", fix=fix)]
    if config.model.quantization != "none":
        what = f"model.quantization is {config.model.quantization}, and {came} already"
        return [Fault(what, key="model.quantization", fix="delete quantization, or name the model that was packed")]
    if lora.init != "random":
        what = f"lora.init {lora.init} takes parts out of the weights below, and {came}"
        return [Fault(what, key="lora.init", fix="write:   init: random   or name the model that was packed")]
    return []


def _is_hub_id(name: str | None) -> bool:
    """`runs/NAME` is a run that is not there, a wrong letter or another folder: nobody is asked for it by that name."""
    is_path = name is None or name.startswith((".", "/", "~", "runs/"))
    return bool(name and not is_path and name.count("/") <= 1 and _HUB_ID.match(name))


def _check_hub(key: str, hub_id: str | None, fix: str) -> list[Fault]:
    """Whether what is not on this machine could be fetched."""
    if _is_offline():
        reason = "the Hub is switched off by HF_HUB_OFFLINE"
    elif not hub_has_an_address():
        reason = "the Hub's address is not known here: no network"
    else:
        return []
    return [Fault(f"{key} is {hub_id!r}: no folder of that name, and {reason}", key=key, fix=fix)]


def _check_folder(folder: Path, model: ModelConfig) -> list[Fault]:
    def fault(what: str, fix: str) -> list[Fault]:
        return [Fault(f"model.name is {str(folder)!r}, {what}", key="model.name", fix=fix)]

    if (other := find_other(folder)) is not None and not (model.from_scratch and has_config(folder)):
        return fault(*other)
    try:
        facts = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return fault(f"whose config.json cannot be read ({error})", "copy the model again")
    if not isinstance(facts, dict) or "model_type" not in facts:
        return fault("whose config.json names no model_type", "write the folder of a transformers model")
    has_weights = any(any(folder.glob(pattern)) for pattern in _WEIGHTS)
    if not has_weights and not model.from_scratch:
        if any(folder.glob("*.bin")) or any(folder.glob("*.pt")):
            return fault(
                "which has its weights as pickles only (*.bin); duoka never opens pickles",
                "convert it once: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...) writes safetensors",
            )
        return fault(
            "which has no weights (*.safetensors)",
            "copy the model again, with its weights; or let them be drawn:   from_scratch: true",
        )
    if not model.from_scratch and (damage := find_damage(folder)) is not None:
        return fault(*damage)
    if model.from_scratch and model.tokenizer:
        return []
    if not has_tokenizer(folder):
        return fault("which has no tokenizer", "copy tokenizer.json and tokenizer_config.json beside the weights")
    return []


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model"))


def model_folder(model: ModelConfig, base: Path, say: Callable[[str], None] = lambda text: None) -> Path:
    """A local folder with the model's config, weights and tokenizer; made or fetched once, then reused."""
    source = find_model(model, base)
    if source.is_new:
        return new_model_folder(model, _named_tokenizer(model, base, say), say)
    folder = _named_model(source, model, say)
    if not model.from_scratch:
        return folder
    return scratch_folder(folder, None if model.tokenizer is None else _named_tokenizer(model, base, say), say)


def known_folder(model: ModelConfig, base: Path) -> Path | None:
    """The named model's folder, where it is here already: nothing is made, fetched or refused."""
    try:
        source = find_model(model, base)
    except ConfigError:
        return None
    if source.is_demo:
        return _demo_target()
    if source.hub_id is not None:
        return _cached_hub_folder(source.hub_id, model.revision, partial(_is_whole, model))
    return source.folder


def _named_model(source: ModelSource, model: ModelConfig, say: Callable[[str], None]) -> Path:
    if source.folder is not None:
        return source.folder
    if source.is_demo:
        return _demo_folder(say)
    assert source.hub_id is not None
    cached = _cached_hub_folder(source.hub_id, model.revision, partial(_is_whole, model))
    return cached or _fetch_hub_folder("model.name", source.hub_id, model, say)


def resolve_tokenizer(
    model: ModelConfig, base: Path, model_folder: Path, say: Callable[[str], None] = lambda text: None
) -> Path:
    """The local folder of a run's tokenizer: its model's, unless the config names another; fetched once."""
    if model.tokenizer is None or model.is_new:
        return model_folder  # a new model's folder begins with its tokenizer
    return _named_tokenizer(model, base, say)


def _named_tokenizer(model: ModelConfig, base: Path, say: Callable[[str], None]) -> Path:
    """A local folder with the tokenizer that `model.tokenizer` names; made or fetched once, then reused."""
    folder = local_tokenizer(model, base)
    if folder is None and model.tokenizer == DEMO:
        return _demo_folder(say)
    if folder is None and model.tokenizer is not None and _is_hub_id(model.tokenizer):
        return _fetch_hub_folder("model.tokenizer", model.tokenizer, model, say)
    if folder is None:
        raise ConfigError(f"model.tokenizer is {model.tokenizer!r}, and there is no such folder", fix=_MAKE_TOKENIZER)
    return folder


def _demo_target() -> Path:
    return cache_folder() / "models" / "smollm2-135m-instruct-2"  # the second way to convert it


def _demo_folder(say: Callable[[str], None]) -> Path:
    target = _demo_target()
    if not (target / "config.json").is_file():
        say(f"converting SmolLM2-135M-Instruct to {target} (once, some ten seconds)")
        convert_demo_model(target)
    return target


def _is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on")


def hub_has_an_address() -> bool:
    """Without a network the Hub's client tries again for half a minute; a name look-up tells at once."""
    if getproxies():
        return True  # the proxy looks names up, not this machine
    host = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).hostname
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return False
    return True


def _is_whole(model: ModelConfig, folder: Path) -> bool:
    return not _check_folder(folder, model)


def _cached_hub_folder(hub_id: str, revision: str | None, is_enough: Callable[[Path], bool]) -> Path | None:
    """The snapshot of that revision that an earlier download left, so that a warm cache needs no network."""
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or Path(caches) / "huggingface"
    root = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")
    repository = root.expanduser() / f"models--{hub_id.replace('/', '--')}"
    name = revision or "main"
    reference = repository / "refs" / name
    try:
        commit = reference.read_text(encoding="utf-8").strip() if reference.is_file() else name
        folder = repository / "snapshots" / commit
        return folder if folder.is_dir() and is_enough(folder) else None
    except PermissionError:  # another user's home: who fetches says so
        return None


def fetch_config(hub_id: str, revision: str | None) -> Path:
    """The folder with the config.json of a Hub id: from the local cache, else that one small file from the Hub."""
    import huggingface_hub

    cached = huggingface_hub.try_to_load_from_cache(hub_id, "config.json", revision=revision)
    if isinstance(cached, str):
        return Path(cached).parent
    reason = "the Hub's address is not known here: no network"
    if hub_has_an_address():
        try:
            return Path(huggingface_hub.hf_hub_download(hub_id, "config.json", revision=revision)).parent
        except (OSError, ValueError) as error:  # huggingface_hub's errors derive from these
            reason = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
    raise ConfigError(
        f"model.name is {hub_id!r}: no folder of that name, and its config.json could not be fetched from the Hub",
        where=reason,
        fix="write a folder with a config.json, a Hub id such as Qwen/Qwen3-0.6B, or demo",
    )


def _fetch_hub_folder(key: str, hub_id: str, model: ModelConfig, say: Callable[[str], None]) -> Path:
    say(f"fetching {hub_id} from the Hub")
    import huggingface_hub

    revision, patterns = None, [*TOKENIZER_FILES, MORE_TEMPLATES]
    if key == "model.name":
        revision, patterns = model.revision, ["*.json", "*.model", "*.jinja", "*.txt"]
        patterns += [] if model.from_scratch else ["*.safetensors"]
    patterns += ["*.py"] if model.trust_remote_code else []
    try:
        return Path(huggingface_hub.snapshot_download(hub_id, revision=revision, allow_patterns=patterns))
    except (OSError, ValueError) as error:  # huggingface_hub's errors derive from these
        print(f"  ({type(error).__name__}: {str(error).splitlines()[0]})", file=sys.stderr)
        raise ConfigError(
            f"{key} is {hub_id!r}: no folder of that name, and it could not be fetched from the Hub",
            fix=WRITE if key == "model.name" else _MAKE_TOKENIZER,
        ) from None
