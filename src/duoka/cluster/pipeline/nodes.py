"""The stages of a pipeline with their configs, and the fingerprint of all that decides each one's result.

A stage's folder is named by its fingerprint, and that has its parents' in it: a change is a new folder, the change
taken back finds the old one again, and nothing is ever overwritten or deleted. No time and no place of a file counts.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from duoka.config.load import load_config, resolved_yaml
from duoka.config.loaded import Loaded
from duoka.config.pipeline import Pipeline, StageName, StageSpec, stage_yaml
from duoka.config.write import result_leaves
from duoka.config.yaml_text import yaml_text
from duoka.data.read.dataset_info import files_of
from duoka.data.read.registry import find_sets, set_with_name
from duoka.data.set_key import file_digest
from duoka.errors import ConfigError, Fault, Faults
from duoka.hub.base import model_fingerprint
from duoka.hub.models import find_model, local_tokenizer
from duoka.runs.cache import cache_folder, make_folder
from duoka.tasks.check import reward_files, tool_files, tools_digest
from duoka.tasks.find import find_scored

RESULTS_VERSION = 1  # raise it when the same config would give other results: all stages run again then


@dataclass(frozen=True)
class Node:
    """A stage ready to run. `facts` are what its result depends on, by name, as text; `folder` is a name."""

    spec: StageSpec
    facts: Mapping[str, str]
    generation: int
    loaded: Loaded | None = None  # of a stage that trains; other stages' folders in it are the draft's

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def fingerprint(self) -> str:
        text = json.dumps([RESULTS_VERSION, self.generation, dict(self.facts)], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()

    @property
    def folder(self) -> str:
        return f"{self.name}-{self.fingerprint}"


class Nodes:
    """All nodes of a pipeline, made in a draft folder that is thrown away: their configs name folders of the draft."""

    def __init__(self, pipeline: Pipeline, draft: Path, generations: Mapping[str, int]) -> None:
        self.pipeline, self.draft, self.generations = pipeline, draft, generations
        self.by_name: dict[str, Node] = {}
        self.faults: list[Fault] = []
        for spec in pipeline.stages:
            if all(name in self.by_name for name in spec.parents):
                self._add(spec)

    def all(self) -> list[Node]:
        return list(self.by_name.values())

    def _add(self, spec: StageSpec) -> None:
        try:
            makers = {
                "train": self._train, "eval": self._eval, "export": self._export, "tokenizer": self._tokenizer,
                "chat": self._chat,
            }  # fmt: skip
            node = makers[spec.kind](spec)
        except Faults as error:
            self.faults += [self._at_its_line(fault, spec) for fault in error.faults]
        except ConfigError as error:
            self.faults.append(self._at_its_line(Fault(error.what, fix=error.fix or ""), spec))
        else:
            self.by_name[spec.name] = node
            if node.loaded is not None:
                # What a stage takes over from the run before, it reads there.
                folder = self.draft / node.folder
                folder.mkdir(parents=True, exist_ok=True)
                (folder / "config.yaml").write_text(resolved_yaml(node.loaded), encoding="utf-8")

    def _at_its_line(self, fault: Fault, spec: StageSpec) -> Fault:
        """At its line of the pipeline's file; lines of the stage's own file, which is thrown away, are left out."""
        lines = rf" \([^()]*in line \d+ of \S*{re.escape(spec.name)}\.yaml[^()]*\)"
        return self.pipeline.place(replace(fault, what=re.sub(lines, "", fault.what)), spec)

    def _train(self, spec: StageSpec) -> Node:
        file = self.draft / f"{spec.name}.yaml"
        file.write_text(self.yaml(spec, self.draft), encoding="utf-8")
        loaded = load_config(file)
        if spec.source in self.by_name:
            self._check_template(spec, loaded)
        facts = {key: self._shown(value) for key, value in result_leaves(loaded.config).items()}
        digests = [file_digest(path, _memory()) for one in find_sets(loaded.config, loaded.base) for path in one.files]
        facts["contents of the data"] = _digest(digests)
        if rewards := [file for file in reward_files(loaded.config, loaded.base).values() if file is not None]:
            facts["contents of the rewards"] = _digest([file.read_text(encoding="utf-8") for file in rewards])
        if any(tool_files(loaded.config, loaded.base).values()):
            facts["contents of the tools"] = tools_digest(loaded.config, loaded.base)
        facts |= self._outside(spec, loaded)
        return self._node(spec, facts, loaded)

    def _outside(self, spec: StageSpec, loaded: Loaded) -> dict[str, str]:
        """Of models and tokenizers that no stage made: what lies in their folders."""
        model, out = loaded.config.model, dict[str, str]()
        if spec.source is None and model.depth is None:
            folder = find_model(model, loaded.base).folder
            out |= {"contents of the model": model_fingerprint(folder)} if folder is not None else {}
        if model.tokenizer and ("model", "tokenizer") not in spec.references:
            place = local_tokenizer(model, loaded.base)
            file = None if place is None else place / "tokenizer.json"
            out |= {"contents of the tokenizer": file_digest(file, _memory())} if file and file.is_file() else {}
        return out

    def _check_template(self, spec: StageSpec, loaded: Loaded) -> None:
        """One way to write conversations in all stages: a model that learned two answers in neither."""
        before = self.by_name[str(spec.source)].loaded
        own = loaded.config.model.template
        if before is not None and before.config.model.template not in (own, "auto") and own != "auto":
            what = f"it writes conversations by {own}, and {spec.source} by {before.config.model.template}"
            raise ConfigError(what, fix="write one template for all:   model: {template: NAME}   above pipeline:")

    def _eval(self, spec: StageSpec) -> Node:
        facts = {"limit": str(spec.limit), "of": self._folders(spec)}
        for name in spec.words:
            for task in find_scored(name, self.pipeline.base):
                if task.runs_code:
                    fix = f"score it by hand:   duoka eval RUN --tasks {name} --run-code"
                    raise ConfigError(f"task {name} runs programs that the model wrote", fix=fix)
                items = [[item.id, item.question, item.answer, str(item.options)] for item in task.items("test")]
                if not items:
                    raise ConfigError(f"task {task.name} has no test items")
                facts[f"items of {task.name}"] = _digest(items)
        return self._node(spec, facts)

    def _export(self, spec: StageSpec) -> Node:
        return self._node(spec, {"export": " ".join(spec.words), "of": self._folders(spec)})

    def _chat(self, spec: StageSpec) -> Node:
        return self._node(spec, {"questions": _digest(spec.words), "of": self._folders(spec)})

    def _tokenizer(self, spec: StageSpec) -> Node:
        starts = (Path(), self.pipeline.base)
        found = [[set_with_name(name, self.pipeline.base), *(start / name for start in starts)] for name in spec.words]
        places = [next((place for place in some if place is not None and place.exists()), None) for some in found]
        if None in places:
            missing = spec.words[places.index(None)]
            raise ConfigError(
                f"there is no file or folder {missing!r} to make a tokenizer from",
                fix="name text files, or sets such as task:stories",
            )
        files = [file for place in places if place is not None for file in files_of(place)]
        digests = [file_digest(file.resolve(), _memory()) for file in files]
        return self._node(spec, {"contents of the text": _digest(digests), "vocab_size": str(spec.vocab_size)})

    def _node(self, spec: StageSpec, facts: dict[str, str], loaded: Loaded | None = None) -> Node:
        if spec.when is not None:
            facts["when"] = spec.when.text
        return Node(spec, facts, self.generations.get(spec.name, 0), loaded)

    def _folders(self, spec: StageSpec) -> str:
        return ", ".join(self.by_name[name].folder for name in spec.of)

    def _shown(self, value: Any) -> str:
        """A value with the names of other stages' folders, wherever the draft lies."""
        return yaml_text(value).replace(f"{self.draft}/", "")

    def yaml(self, spec: StageSpec, root: Path) -> str:
        """The stage's own file, with other stages' folders under `root`."""
        body = {key: self._placed(value, root) for key, value in spec.body.items()}
        parent = self.by_name.get(spec.source or "")
        if parent is not None and parent.loaded is not None and parent.loaded.config.lora is not None:
            body = self._above_adapters(spec, parent, body, root)
        title = f"Stage {spec.name} of {self.pipeline.path.name}, as duoka run starts it; it also runs alone."
        node = self.by_name.get(spec.name)
        return stage_yaml(body, title, self.pipeline.base, root / (node.folder if node else spec.name))

    def _above_adapters(self, spec: StageSpec, parent: Node, body: dict[str, Any], root: Path) -> dict[str, Any]:
        """What learns after a LoRA stage begins from that one's model with its adapters laid into it."""
        if not isinstance(body.get("lora"), dict):
            raise ConfigError(
                f"it trains all weights, and begins from {parent.name}, whose result is an adapter",
                fix=f"export it first:   merged: {{export: model, of: {parent.name}}}   and   from: merged"
                "   (or give this stage a lora block)",
            )
        below = self._placed(parent.spec.body, root)
        if parent.spec.source in self.by_name:
            grand = self.by_name[parent.spec.source]
            if grand.loaded is not None and grand.loaded.config.lora is not None:
                below = self._above_adapters(parent.spec, grand, below, root)
        merged = [*((below.get("lora") or {}).get("merge") or []), str(root / parent.folder)]
        model, own = below.get("model"), body.get("model") or {}
        base = {"name": model} if isinstance(model, str) else dict(model or {})
        kept = {key: value for key, value in own.items() if key != "name"}
        return {**body, "model": {**base, **kept}, "lora": {**body["lora"], "merge": merged}}

    def _placed(self, value: Any, root: Path) -> Any:
        if isinstance(value, StageName):
            return str(root / self.by_name[value.name].folder)
        if isinstance(value, dict):
            return {key: self._placed(one, root) for key, one in value.items()}
        return value


def _memory() -> Path:
    return make_folder(cache_folder() / "tokens")


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, ensure_ascii=False).encode(), digest_size=8).hexdigest()


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """What differs, as `optim.lr 0.0002 -> 0.0001`."""
    keys = [key for key in dict.fromkeys([*before, *after]) if before.get(key) != after.get(key)]
    return [f"{key} {before.get(key, 'none')} -> {after.get(key, 'none')}" for key in keys]
