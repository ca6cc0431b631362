"""Files of other tools that do not train: what to export, to talk to, or to measure, by the names written there.

`duoka export`, `chat` and `eval` read such files as they are. The keys of training that stand in them are passed over
and named; what would change the answer, and cannot be done, is refused with its reason, as everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from duoka.config.dialects.all import recognize, refuse_unread_form
from duoka.config.dialects.engine import Leaf, agreeing_leaves, refusal_of, unknown_key, with_overrides
from duoka.config.dialects.json_text import without_comments
from duoka.config.dialects.rows import Refusal, asks_for_nothing, comma_list, is_none, is_true, number, whole
from duoka.config.overlays import Layers, expand_env, read_layers, read_overrides, read_text, shown_path
from duoka.config.paths import is_folder, is_there
from duoka.config.yaml_lines import SourcePlace, parse_yaml
from duoka.config.yaml_text import yaml_text
from duoka.errors import ConfigError, Fault, Faults, typed

T = TypeVar("T")
Purpose = Literal["export", "chat", "eval"]
_MODEL = (
    "model_name_or_path", "adapter_name_or_path", "finetuning_type", "template", "trust_remote_code",
    "model_revision", "infer_dtype", "infer_backend",
)  # fmt: skip
_ANSWERS = ("do_sample", "temperature", "top_p", "max_new_tokens", "seed", "default_system")
_DATA = ("dataset", "eval_dataset", "dataset_dir", "cutoff_len", "max_samples", "output_dir")
USED: dict[Purpose, tuple[str, ...]] = {
    "export": (*_MODEL, "export_dir", "export_size", "export_device", "export_legacy_format"),
    "chat": (*_MODEL, *_ANSWERS),
    "eval": (
        *_MODEL,
        *_ANSWERS,
        *_DATA,
        "do_predict",
        "do_eval",
        "predict_with_generate",
        "per_device_eval_batch_size",
    ),
}
_AS_IT_CAME = "a run remembers how its base was packed (name the run); other models are read as they came"
# Values of keys that mean something here, and that duoka cannot do: name -> (what asks for nothing, the reason).
_CANNOT: dict[Purpose, dict[str, tuple[tuple[Any, ...], str]]] = {
    "export": {
        "quantization_bit": ((), _AS_IT_CAME),
        "export_legacy_format": ((), "pickles can run code when they are opened; safetensors are written"),
        "export_hub_model_id": ((), "nothing is sent to a hub: push the folder yourself"),
    },
    "chat": {
        "quantization_bit": ((), _AS_IT_CAME),
        "infer_backend": (("huggingface", "hf", "auto"), "answers are computed by transformers' own model code"),
        "top_k": ((0, -1), "tokens are drawn by temperature and top_p"),
        "num_beams": ((1,), "one answer is written, token by token"),
        "repetition_penalty": ((1, 1.0), "tokens are drawn as the model has learned them"),
    },
    "eval": {},
}
_CANNOT["eval"] = {
    name: _CANNOT["chat"][name] for name in ("top_k", "num_beams", "repetition_penalty", "quantization_bit")
}


@dataclass(frozen=True)
class AskedFile:
    """What a file says, by its own names."""

    path: Path
    title: str
    values: dict[str, Any]
    notes: tuple[str, ...]
    places: dict[str, SourcePlace] = field(default_factory=dict)

    def get(self, name: str, default: Any = None) -> Any:
        value = self.values.get(name)
        return default if is_none(value) else value

    def is_on(self, name: str) -> bool:
        return is_true(self.values.get(name))

    def names(self, name: str) -> list[str]:
        return self._checked(comma_list, name, self.get(name, []))

    def whole(self, name: str) -> int | None:
        value = self.get(name)
        return None if value is None else self._checked(whole, name, value)

    def number(self, name: str) -> float | None:
        value = self.get(name)
        return None if value is None else self._checked(number, name, value)

    def _checked(self, check: Callable[[Any, str], T], name: str, value: Any) -> T:
        try:
            return check(value, name)
        except Refusal as error:
            place = self.places.get(name, SourcePlace(str(self.path), 0, ""))
            raise Faults([place.fault(error.what, key=name, fix=error.fix)]) from None

    @property
    def model(self) -> str:
        found = self.get("model_name_or_path")
        if found is None:
            raise ConfigError(f"{self.path} names no model", fix="write:   model_name_or_path: FOLDER")
        return str(found)

    @property
    def adapters(self) -> list[str]:
        """The trained adapters on the model, one above the other; the bare word lora of guides means none yet."""
        found = self.names("adapter_name_or_path")
        return [] if found == ["lora"] and not is_folder(Path("lora")) else found

    @property
    def template(self) -> str:
        return "chatml" if self.get("template") == "chatml" else "auto"

    def temperature(self) -> float | None:
        """0 when the file switches drawing off; None when it says nothing."""
        if "do_sample" in self.values and not self.is_on("do_sample"):
            return 0.0
        return self.number("temperature")


def is_config_file(target: str) -> bool:
    """True for the path of a YAML or JSON file; anything else names a run or a model."""
    return target.lower().endswith((".yaml", ".yml", ".json")) and not is_folder(Path(target))


def task_of_file(path: str | Path, overrides: Sequence[str] = ()) -> str:
    """What the file's own tool would do with it: train, predict, prepare, export, chat. Faults are not looked at."""
    layers = Layers()
    layers.overrides = read_overrides(overrides, layers)
    read_layers(Path(path), layers)
    return layers.task


def describe_task(path: str | Path, overrides: Sequence[str] = ()) -> str | None:
    """What a file of another tool does that does not train, as YAML with the command for it; None for all others."""
    commands: dict[str, Purpose] = {"predict": "eval", "export": "export", "chat": "chat"}
    task = task_of_file(path, overrides)
    if task not in commands:
        return None
    purpose = commands[task]
    asked = read_asked(path, purpose, overrides)
    assert asked is not None
    lines = [f"# {shown_path(Path(path))} is for:   duoka {purpose} {typed(shown_path(Path(path)))}"]
    lines += [f"{name}: {yaml_text(value)}" for name, value in asked.values.items() if name in USED[purpose]]
    lines += [f"# {note}" for note in asked.notes]
    return "\n".join(lines)


def read_asked(path: str | Path, purpose: Purpose, overrides: Sequence[str] = ()) -> AskedFile | None:
    """The file, when it is in LLaMA-Factory's words; None for duoka's own. Raises Faults with all that is wrong."""
    path = Path(path)
    if not is_there(path):
        raise ConfigError(
            f"there is no file {shown_path(path)} that duoka {purpose} could read",
            fix="name a run (duoka runs lists them), a model's folder, or a YAML with model_name_or_path",
        )
    layers = Layers()
    words = read_overrides(overrides, layers)
    text = read_text(path, layers.faults, None)
    name = shown_path(path)
    source = without_comments(text) if text and path.suffix.lower() == ".json" else text
    tree = parse_yaml(source, name, layers.faults, equal_twice=[]) if source else None
    dialect = None if tree is None else recognize(tree)
    unread = refuse_unread_form(tree) if tree is not None and isinstance(tree.value, dict) else None
    layers.faults += [unread] if unread is not None else []
    if layers.faults:
        raise Faults(layers.faults)
    if dialect is None or not dialect.is_whole or tree is None:
        return None
    tree, left = with_overrides(dialect, tree, words)
    layers.faults += [
        word.place.fault(f"this is in duoka's own words, and {name} is not", fix="use the file's own words")
        for word in left
    ]
    values: dict[str, Any] = {}
    places: dict[str, SourcePlace] = {}
    passed: list[str] = []
    for leaf in agreeing_leaves(dialect, expand_env(tree, layers), layers.faults):
        row = dialect.rows.get(leaf.name)
        if row is None:
            layers.faults.append(unknown_key(dialect, leaf))
            continue
        values[leaf.name], places[leaf.name] = leaf.value, leaf.tree.place
        fault = _cannot(purpose, leaf)
        if fault is None and row.state == "refused" and leaf.name not in USED[purpose]:
            fault = refusal_of(row, leaf)
        layers.faults += [fault] if fault else []
        if leaf.name not in USED[purpose] and not is_none(leaf.value) and not fault:
            passed.append(leaf.shown)
    if layers.faults:
        raise Faults(layers.faults)
    notes = [f"{name} is read as {dialect.title}"]
    notes += [f"of no use here: {', '.join(passed)}"] if passed else []
    return AskedFile(path, dialect.title, values, tuple(notes), places)


def _cannot(purpose: Purpose, leaf: Leaf) -> Fault | None:
    off, reason = _CANNOT[purpose].get(leaf.name, (None, ""))
    if off is None or asks_for_nothing(leaf.value, off):
        return None
    place: SourcePlace = leaf.tree.place
    return place.fault(f"{leaf.shown} {leaf.value} is refused: {reason}", key=leaf.shown, fix=f"delete {leaf.shown}")
