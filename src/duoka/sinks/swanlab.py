"""SwanLab: a run there for a run here. SWANLAB_MODE, _PROJ_NAME, _RUN_ID and _API_KEY mean their own.

Its files lie in the run folder. Without a key or a mode it stays offline; `swanlab sync` brings up what it kept.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from duoka.sinks.sink import RunFacts, Sink, StepNumbers, eval_scalars, step_scalars

_ID_FILE = "duoka-run-id"


class SwanLabSink(Sink):
    name = "swanlab"
    trouble = "SwanLab does not get all numbers"
    is_remote = True

    def open(self, facts: RunFacts, say: Callable[[str], None]) -> None:
        import swanlab  # type: ignore[import-not-found, import-untyped, unused-ignore]

        self._swanlab = swanlab
        self._state, self._cause = "crashed", "the process ended"  # until the run says how it ended
        folder = facts.folder / "swanlab"
        folder.mkdir(exist_ok=True)
        # Asked online without a key, it would wait for somebody to type one.
        mode = os.environ.get("SWANLAB_MODE") or ("online" if os.environ.get("SWANLAB_API_KEY") else "offline")
        options: dict[str, Any] = {
            "mode": mode, "log_dir": str(folder), "config": dict(facts.config),
            "project": os.environ.get("SWANLAB_PROJ_NAME") or facts.project,
        }  # fmt: skip
        if facts.goes_on:
            # It would send what is printed here, and print lines of its own between ours.
            quiet = swanlab.Settings(
                interactive=False, terminal={"proxy_type": "none"}, probe={"monitor": False, "git": False}
            )
            options |= {"name": facts.name, "id": self._read_id(facts), "resume": "allow", "settings": quiet}
        self._run = swanlab.init(**{**options, **facts.options})
        if facts.goes_on:
            say(f"SwanLab: {mode}, kept in {folder}")

    def _read_id(self, facts: RunFacts) -> str:
        """The same at every start in this folder: curves go on."""
        path = facts.folder / "swanlab" / _ID_FILE
        if not path.is_file():
            path.write_text(secrets.token_hex(8), encoding="utf-8")
        return os.environ.get("SWANLAB_RUN_ID") or path.read_text(encoding="utf-8").strip()

    def step(self, now: StepNumbers) -> None:
        self._run.log(step_scalars(now), step=now.step)

    def evaluated(self, step: int, values: Mapping[str, Any]) -> None:
        self._run.log(eval_scalars(values), step=step)

    def samples(self, step: int, pairs: Sequence[tuple[str, str]]) -> None:
        text = "\n\n".join(f"{one}|{text}" for one, text in pairs)
        self._run.log({"samples": self._swanlab.Text(text)}, step=step)

    def scalars(self, values: Mapping[str, Any], step: int | None, options: Mapping[str, Any]) -> None:
        self._run.log(dict(values), step=step, **options)

    def ended(self, step: int, reason: str, exit_code: int, cause: str) -> None:
        self._state = "success"  # a run that was stopped has not failed

    def close(self) -> None:
        self._swanlab.finish(self._state, *([self._cause] if self._state == "crashed" else []))

    @property
    def handle(self) -> Any:
        return self._run
