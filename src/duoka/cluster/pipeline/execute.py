"""The stages of a pipeline one after the other, each by the command that a user would type, in a process of its own.

What is done is not done again; every stage that runs says why. A crash names its stage, memory is free after each, and
the same command goes on wherever it was interrupted: in a stage as that stage's own command would.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from duoka.cluster.pipeline.manifest import RESULT, Manifest
from duoka.cluster.pipeline.nodes import Node, Nodes, changes
from duoka.config.pipeline import Gate, is_number
from duoka.config.stage_names import score_parts
from duoka.errors import ConfigError, StoppedEarly, WorkerFailed
from duoka.process.exits import STOP_SIGNALS
from duoka.runs.folder import json_lines, write_json_atomic, write_text_atomic
from duoka.runs.heart import ASK_FOR_STACKS
from duoka.units import format_seconds

# The command ends with this process, however that ends: nobody would know of a stage that goes on alone.
CHILD = (
    "import sys; from duoka.process.lifeline import die_with_parent; die_with_parent(int(sys.argv.pop(1))); "
    "from duoka.cli import main; main(sys.argv[1:])"
)
_STOPPED = (StoppedEarly.exit_code, 130)
_ANSWER_TOKENS = 96  # of a chat stage


@dataclass(frozen=True)
class Decision:
    """What is to be done about a stage, and why."""

    node: Node
    runs: bool
    why: str


class Executor:
    """Runs the nodes of a pipeline in its folder. The caller holds the folder's lock."""

    def __init__(
        self, nodes: Nodes, root: Path, manifest: Manifest, num_processes: int, say: Callable[[str], None]
    ) -> None:
        self.nodes, self.root, self.manifest, self.num_processes, self.say = nodes, root, manifest, num_processes, say
        self.skipped: dict[str, str] = {}

    def run(self, chosen: Sequence[str]) -> int:
        """The chosen stages in their order; the exit code of the first that does not end well."""
        for node in self.nodes.all():
            if node.name not in chosen:
                continue
            reason = self._skips(node)
            decision = decide(node, self.manifest)
            if reason:
                self.skipped[node.name] = reason
                self.manifest.note(node, "skipped", why=reason)
                self.say(f"{node.name}: skipped, {reason}")
            elif not decision.runs:
                self.say(f"{node.name}: {decision.why}")
            else:
                missing = [name for name in node.spec.parents if not self.manifest.is_done(self.nodes.by_name[name])]
                if missing:
                    raise ConfigError(
                        f"stage {node.name} needs {', '.join(missing)}, which is not done", fix="leave --only out"
                    )
                self.say(f"{node.name}: {decision.why}")
                code = self._run(node, decision.why)
                if code:
                    return code
        return 0

    def _run(self, node: Node, why: str) -> int:
        started = time.monotonic()
        before = self.manifest.stages.get(node.name, {})
        goes_on = before.get("folder") == node.folder
        spent, cpu = (float(before.get(key, 0.0)) if goes_on else 0.0 for key in ("seconds", "cpu_seconds"))
        cpu -= _children_cpu_s()
        self.manifest.note(node, "running", why=why)
        makers = {
            "train": self._train, "eval": self._eval, "export": self._export, "tokenizer": self._tokenizer,
            "chat": self._chat,
        }  # fmt: skip
        code = makers[node.spec.kind](node)
        took = round(spent + time.monotonic() - started, 1)
        if code == 0 and not self.manifest.is_done(node):
            raise WorkerFailed(f"stage {node.name} ended well and left no result in {self.root / node.folder}")
        state = "done" if code == 0 else "stopped" if code in _STOPPED else "failed"
        cpu = round(cpu + _children_cpu_s(), 1)
        self.manifest.note(node, state, seconds=took, cpu_seconds=cpu, exit_code=code)
        if code:
            word = "was stopped" if state == "stopped" else f"failed with exit code {code}"
            self.say(f"stage {node.name} {word}; the same command goes on with it")
        return code

    def _train(self, node: Node) -> int:
        file = self.root / "stages" / f"{node.folder}.yaml"
        file.parent.mkdir(exist_ok=True)
        write_text_atomic(file, self.nodes.yaml(node.spec, self.root.absolute()))
        return run_command("train", str(file), f"--nproc={self.num_processes}")

    def _tokenizer(self, node: Node) -> int:
        draft = self._draft(node)
        base = self.nodes.pipeline.base
        files = [name if Path(name).exists() or not (base / name).exists() else str(base / name)
                 for name in node.spec.words]  # fmt: skip
        size = f"--vocab-size={node.spec.vocab_size}"
        return self._finish(draft, node, *read_command("data", "tokenizer", *files, f"--out={draft}", size))

    def _export(self, node: Node) -> int:
        draft = self._draft(node)
        return self._finish(draft, node, *read_command("export", self._folder(node.spec.of[0]), "-o", str(draft)))

    def _eval(self, node: Node) -> int:
        found: dict[str, dict[str, Any]] = {}
        tasks = ",".join(_absolute(name, self.nodes.pipeline.base) for name in node.spec.words)
        limit = [f"--limit={node.spec.limit}"] if node.spec.limit else []
        for name in node.spec.of:
            out = self.root / node.folder / name
            words = ["eval", self._folder(name), f"--tasks={tasks}", *limit, f"--out={out}", "--json"]
            code, said = read_command(*words, f"--nproc={self.num_processes}")
            if code:
                return code
            scores = json_lines(said)[-1]["tasks"]
            found[name] = {one["task"]: one for one in scores}
            for one in scores:
                self.say(f"  {name}: {one['task']} {one['score']:.1%} ± {one['se']:.1%} (n {one['n']})")
        write_json_atomic(self.root / node.folder / RESULT, found)
        return 0

    def _chat(self, node: Node) -> int:
        """The same questions to each of the models, each for itself, answered by the likeliest tokens."""
        found: dict[str, dict[str, str]] = {}
        for name in node.spec.of:
            asked = "".join(question.replace("\n", " ") + "\n" for question in node.spec.words)
            code, said = read_command(
                "chat",
                self._folder(name),
                "--temperature=0",
                f"--max-new-tokens={_ANSWER_TOKENS}",
                "--json",
                told=asked,
            )
            if code:
                return code
            lines = json_lines(said)
            found[name] = {one["prompt"]: one["answer"] for one in lines}
            for one in lines:
                self.say(f"  {name}: {one['prompt']} -> {one['answer']}")
        folder = self.root / node.folder
        folder.mkdir(exist_ok=True)
        write_json_atomic(folder / RESULT, found)
        return 0

    def _folder(self, name: str) -> str:
        return str(self.root / self.nodes.by_name[name].folder)

    def _draft(self, node: Node) -> Path:
        """What is half written has another name, and counts for nothing."""
        draft = self.root / f".{node.folder}.draft"
        shutil.rmtree(draft, ignore_errors=True)
        return draft

    def _finish(self, draft: Path, node: Node, code: int, said: str) -> int:
        """The draft under its own name, by which what the command said names it too."""
        if said.strip():
            self.say(said.rstrip().replace(str(draft), str(self.root / node.folder)))
        if code == 0:
            os.replace(draft, self.root / node.folder)
        return code

    def _skips(self, node: Node) -> str:
        """Why the stage does not run at all: its own gate, or a stage that it needs was skipped."""
        needed = next((name for name in node.spec.parents if name in self.skipped), None)
        if needed:
            return f"as {needed} is"
        gate = node.spec.when
        return "" if gate is None or not all(self._scored(side) for side in gate.scores) else self._closed(gate)

    def _scored(self, side: str) -> bool:
        return self.manifest.is_done(self.nodes.by_name[side.partition(".")[0]])

    def _closed(self, gate: Gate) -> str:
        """ "" when the gate is open; else what was found, with how sure it is."""
        left, right = (self._value(side) for side in (gate.left, gate.right))
        compare: dict[str, Callable[[float, float], bool]] = {
            ">": lambda a, b: a > b, ">=": lambda a, b: a >= b, "<": lambda a, b: a < b, "<=": lambda a, b: a <= b
        }  # fmt: skip
        is_open = compare[gate.sign](left[0], right[0])
        said = (
            f"{gate.left} {left[1]} {gate.sign} {gate.right if is_number(gate.right) else f'{gate.right} {right[1]}'}"
        )
        self.say(f"gate: {said}: {'yes' if is_open else 'no'}")
        return "" if is_open else f"for {said} does not hold"

    def _value(self, side: str) -> tuple[float, str]:
        if is_number(side):
            return float(side), side
        found = self.manifest.result(self.nodes.by_name[side.partition(".")[0]])
        name, stage, task = score_parts(side, found)
        scores = found[stage]
        own = [one for key, one in scores.items() if key == task.partition(":")[0]]
        if not own:
            raise ConfigError(f"{name} has no score of {task} for {stage}", fix=f"it has: {', '.join(scores)}")
        return own[0]["score"], f"({own[0]['score']:.3f} ± {own[0]['se']:.3f}, n {own[0]['n']})"


def _children_cpu_s() -> float:
    """Of all commands that have ended, with the processes that they waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def decide(node: Node, manifest: Manifest) -> Decision:
    """Kept, or run with the reason: new, goes on, what changed, or what it follows from."""
    if manifest.is_done(node):
        return Decision(node, False, f"kept ({node.folder})")
    before = manifest.stages.get(node.name)
    if before is None:
        return Decision(node, True, "runs: it is new")
    if before["folder"] == node.folder:
        return Decision(node, True, f"goes on ({node.folder})")
    parents = [name for name in node.spec.parents if _made_by(name, before["facts"]) != _made_by(name, node.facts)]
    own = [text for text in changes(before["facts"], node.facts) if not any(_named(name, text) for name in parents)]
    if own:
        more = f" and {len(own) - 3} more" if len(own) > 3 else ""
        return Decision(node, True, f"runs: changed: {'; '.join(own[:3])}{more}")
    if parents:
        return Decision(node, True, f"runs: follows from {', '.join(parents)}")
    return Decision(node, True, "runs: asked for by --from")


def _named(name: str, text: str) -> set[str]:
    """Folders of that stage in a text."""
    return set(re.findall(rf"(?<![\w-]){re.escape(name)}-[0-9a-f]{{8}}", text))


def _made_by(name: str, facts: Mapping[str, str]) -> set[str]:
    return {folder for text in facts.values() for folder in _named(name, text)}


def run_command(*words: str) -> int:
    """A command of duoka in a process of its own, on this terminal; its exit code."""
    return _wait(subprocess.Popen(_command(words)))


def read_command(*words: str, told: str | None = None) -> tuple[int, str]:
    """The same, with what it prints; `told` is what it reads."""
    stdin = None if told is None else subprocess.PIPE
    process = subprocess.Popen(_command(words), stdin=stdin, stdout=subprocess.PIPE, text=True, encoding="utf-8")
    assert process.stdout is not None
    if process.stdin is not None and told is not None:
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:  # a few lines: less than a pipe holds
            pipe.write(told)
    with process.stdout as pipe:
        said: list[str] = []
        code = _wait(process, lambda: said.append(pipe.read()))
    return code, "".join(said)


def _command(words: Sequence[str]) -> list[str]:
    safe = ["-P"] if sys.version_info >= (3, 11) else []
    return [sys.executable, *safe, "-c", CHILD, str(os.getpid()), *words]


def _wait(process: subprocess.Popen[Any], read: Callable[[], object] = lambda: None) -> int:
    """Until it ends. A Ctrl-C goes to both; other requests, to stop or for stacks, are passed on; the stage answers.

    One that this process died of (a terminal that is closed, say) would have the stage killed with it, unsaved.
    """
    known = (*STOP_SIGNALS, signal.Signals[ASK_FOR_STACKS])
    asking = [n for n in known if n != signal.SIGINT and signal.getsignal(n) is not signal.SIG_IGN]
    before = {n: signal.signal(n, lambda number, frame: process.send_signal(number)) for n in asking}
    try:
        while True:
            try:
                read()
                code = process.wait()
                return code if code >= 0 else 128 - code
            except KeyboardInterrupt:
                continue
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _absolute(name: str, base: Path) -> str:
    """`gsm8k:FOLDER` with the folder's whole path: `duoka eval` does not know where the YAML lies."""
    word, colon, path = name.partition(":")
    if not colon or Path(path).exists():
        return name
    return f"{word}:{base / path}"


def status_lines(nodes: Nodes, manifest: Manifest) -> list[str]:
    """stage, state, why, cost."""
    rows = []
    for node in nodes.all():
        decision, known = decide(node, manifest), manifest.stages.get(node.name, {})
        own = known if known.get("folder") == node.folder else {}
        state = "done" if not decision.runs else own.get("state", "to do")
        why = own.get("why", "") if state == "skipped" else decision.why
        cost = format_seconds(own["seconds"]) if own.get("seconds") else ""
        rows.append((node.name, state, why, cost))
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return [f"{name:<{widths[0]}}  {state:<{widths[1]}}  {why}  {cost}".rstrip() for name, state, why, cost in rows]
