"""Are a model's weight files whole? Told by names, sizes and headers alone, before anything is loaded.

models.py asks as part of its checks, and model/build.py to say why a folder could not be read. Knows no torch.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_AGAIN = "copy the model again, with all its files"
_POINTER = b"version https://git-lfs"
_MOST_HEADER_BYTES = 100_000_000


def find_damage(folder: Path) -> tuple[str, str] | None:
    """(what is wrong with the weights in a model's folder, how to mend it); None: nothing that can be seen so."""
    if (folder / SINGLE).is_file():
        names = {SINGLE}
    elif (folder / INDEX).is_file():
        try:
            names = set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            return f"whose {INDEX} cannot be read ({error})", _AGAIN
    else:
        others = sorted(path.name for path in folder.glob("*.safetensors"))
        what = f"whose weights are in {', '.join(others[:2])}{', ...' if others[2:] else ''}: there is no {SINGLE}"
        fix = f"rename the file to {SINGLE}" if len(others) == 1 else f"copy {INDEX} too: it says what lies where"
        return f"{what} and no {INDEX}", fix
    lost = sorted(name for name in names if not (folder / name).is_file())
    if lost:
        return f"which lacks {len(lost)} of its {len(names)} files of weights ({lost[0]})", _AGAIN
    return next((damage for name in sorted(names) if (damage := _damage_of(folder / name)) is not None), None)


def _damage_of(path: Path) -> tuple[str, str] | None:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            begin = file.read(len(_POINTER))
            if begin == _POINTER:
                return f"whose {path.name} is a pointer of Git LFS, not the weights", "fetch them:   git lfs pull"
            (length,) = struct.unpack("<Q", begin[:8])
            if length > min(_MOST_HEADER_BYTES, size - 8):
                raise ValueError("it is no safetensors file, or the beginning of one")
            file.seek(8)
            header = json.loads(file.read(length))
        ends = [one["data_offsets"][1] for name, one in header.items() if name != "__metadata__"]
        whole = 8 + length + max(ends, default=0)
    except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError, IndexError) as error:
        return f"whose {path.name} cannot be read ({error})", _AGAIN
    if size != whole:
        return f"whose {path.name} has {size:,} bytes, and {whole:,} belong to it", _AGAIN
    return None
