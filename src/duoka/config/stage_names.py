"""Names of a pipeline's stages: those of a sweep's forks, which are folders' too, and those inside of a gate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from duoka.config.yaml_text import yaml_text

_MOST_NAME = 100  # bytes of a fork's name, of which a file system takes 255 for a folder's


def fork_names(stage: str, points: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Each point once, by a name that can be a folder's: a model of the Hub or a path is no folder in a folder."""
    said = {
        ",".join(f"{str(key).rsplit('.', 1)[-1]}={yaml_text(value)}" for key, value in point.items()): point
        for point in points
    }
    names = {text: text.replace("/", "-").encode()[:_MOST_NAME].decode(errors="ignore") for text in said}
    if len(set(names.values())) < len(names):  # a/b and a-b, or long lists that begin alike
        names = {text: f"{place},{name}" for place, (text, name) in enumerate(names.items())}
    return {f"{stage}@{names[text]}": point for text, point in said.items()}


def score_parts(side: str, stages: Iterable[str]) -> tuple[str, str, str]:
    """EVAL, STAGE and TASK of a gate's side; a fork's name may have dots in it (sft@lr=0.0001)."""
    name, _, rest = side.partition(".")
    known = [stage for stage in stages if rest.startswith(f"{stage}.")]
    stage = max(known, key=len, default=rest.partition(".")[0])
    return name, stage, rest[len(stage) + 1 :]
