"""What must never be written down: values of the environment that are secret by their names, logins inside URLs.

Used where the environment is recorded (cluster/probe.py) and where other people's errors are repeated (sinks/).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE|AUTH", re.IGNORECASE)
# Not secrets, for all their names.
_HARMLESS = ("TOKENIZERS_PARALLELISM",)
_MASK = "***"
_URL_LOGIN = re.compile(r"(?<=://)[^/@\s]+(?=@)")
# Whoever knows a webhook's address can post there, and an alert's command may hold a password.
_ALERT_WORD = re.compile(r"^(log\.alert(?:\.(?:command|webhook))?=|log=(?=.*alert))(?=.).*", re.DOTALL)
_LEAST_LETTERS = 6  # a shorter value may stand in a text by chance


def mask_secrets(env: Mapping[str, str]) -> dict[str, str]:
    """Values that look secret by name, or hold a login in a URL, replaced; everything else as it is."""
    out = {}
    for name, value in sorted(env.items()):
        is_secret = bool(_SECRET_NAME.search(name)) and name not in _HARMLESS
        out[name] = _MASK if is_secret and value else _URL_LOGIN.sub(_MASK, value)
    return out


def hide_secrets(text: str, env: Mapping[str, str] = os.environ) -> str:
    """A text from elsewhere (a library's error, say) without this environment's secrets in it."""
    for name, value in sorted(env.items(), key=lambda one: -len(one[1])):  # a short one may be a long one's beginning
        if _SECRET_NAME.search(name) and name not in _HARMLESS and len(value) >= _LEAST_LETTERS:
            text = text.replace(value, _MASK)
    return _URL_LOGIN.sub(_MASK, text)


def hide_in_command(words: Sequence[str], env: Mapping[str, str] = os.environ) -> list[str]:
    """A command line as it may be written down: without secrets, and without who is told of alerts."""
    return [_ALERT_WORD.sub(rf"\1{_MASK}", hide_secrets(word, env)) for word in words]
