"""One value as one line of YAML that every YAML reader reads back as the same value.

Messages, docs, `duoka init` and the resolved config write values through here. The way back is yaml_lines.py.
"""

from __future__ import annotations

import math
import re
from typing import Any

from duoka.config.yaml_lines import scalar_value

_PLAIN = re.compile(r"[A-Za-z_./~][A-Za-z0-9_./+\-]*")
_UNSAFE = {"yes", "no", "on", "off", "y", "n"}  # booleans to YAML 1.1 readers


class EnvText(str):
    """A text whose ${env:NAME} is to be filled in when read, unlike one that merely looks so."""


def yaml_text(value: Any) -> str:
    """A value on one line of YAML, read back as the same value by any YAML reader."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return _float_text(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{yaml_text(str(key))}: {yaml_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(yaml_text(item) for item in value) + "]"
    return _string_text(value)


def _float_text(value: float) -> str:
    if math.isnan(value):
        return ".nan"
    if math.isinf(value):
        return ".inf" if value > 0 else "-.inf"
    text = repr(value)
    # 2e-05 is text to YAML 1.1 readers; 2.0e-05 is a number to all.
    return text.replace("e", ".0e") if "e" in text and "." not in text else text


def _string_text(value: str) -> str:
    is_env = isinstance(value, EnvText)
    if not is_env and _PLAIN.fullmatch(value) and isinstance(scalar_value(value), str) and value.lower() not in _UNSAFE:
        return value
    out = []
    for char in value if is_env else value.replace("${env:", "$${env:"):
        code = ord(char)
        if char in '"\\':
            out.append("\\" + char)
        elif char.isprintable():
            out.append(char)
        else:
            out.append(f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}")
    return '"' + "".join(out) + '"'
