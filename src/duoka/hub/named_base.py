"""What an adapter of another tool says of its base, by name alone, held against a model that is here.

`duoka serve` asks it of adapters that come while it runs. Nothing is fetched.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from duoka.config.schema import ModelConfig
from duoka.hub.base import BaseIdentity, other_base, read_base
from duoka.hub.models import known_folder
from duoka.hub.other_folders import has_config
from duoka.runs.folder import read_json


def note_named_base(adapter: Path, base: Path, names: Iterable[str]) -> str:
    """A note where the adapter names another base than the model in `base`, which `names` are of too; "" where it is
    the same, where it says nothing, and where it has a fingerprint (hub/base.py compares those)."""
    said = (read_json(adapter / "adapter_config.json") or {}).get("base_model_name_or_path")
    if not isinstance(said, str) or not said.strip() or read_base(adapter) is not None:
        return ""
    begin = f"{adapter} says that it was trained on {said}"
    found = known_folder(ModelConfig(name=said), adapter)
    if found is not None and has_config(found):
        differs = other_base(BaseIdentity.of(found), base)
        return f"{begin}, which is not the model here: its answers may be others\n{differs}" if differs else ""
    if _last_part(said) in {_last_part(one) for one in (*names, str(base))}:
        return ""
    return f"{begin}, which is not on this machine; it lies on {base} now, whose matrices have the same sizes"


def _last_part(name: str) -> str:
    """Of a folder or a Hub id, as people copy models: to another machine, under their own name."""
    path = Path(name)
    if path.parent.name == "snapshots":  # of the Hub's cache
        return path.parent.parent.name.rsplit("--", 1)[-1].lower()
    return path.name.lower()
