"""Reading the JSON of a request, field by field: what is asked for is done, or refused with the field's name.

Nothing is ignored in silence. What changes no answer (user, store, metadata ...) is taken as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

# Of OpenAI's API, said by clients, and without a meaning here.
HARMLESS = frozenset({
    "user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
})  # fmt: skip
# What is refused unless it has the value that asks for nothing: field -> that value, and what to say.
UNSERVED: Mapping[str, tuple[Any, str]] = {
    "response_format": ({"type": "text"}, "answers are text; a JSON schema is not enforced here"),
    "parallel_tool_calls": (True, "a model calls as many tools in a turn as it wants"),
    "modalities": (["text"], "answers are text"),
    "audio": (None, "answers are text"),
    "prediction": (None, "predicted outputs are not used here"),
    "web_search_options": (None, "nothing here leaves this machine"),
    "functions": (None, "write tools"),
    "function_call": (None, "write tool_choice"),
    "suffix": ("", "text is completed at its end only"),
    "reasoning_effort": (None, "models here have no such setting"),
    "verbosity": (None, "models here have no such setting"),
    "dimensions": (None, "vectors have as many numbers as the model is wide"),
}


class BadRequest(Exception):
    """What is wrong with a request: an HTTP status, and the field that is to blame."""

    def __init__(self, message: str, param: str | None = None, *, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.message, self.param, self.status, self.code = message, param, status, code

    def to_json(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class Fields:
    """The fields of one request; `done` refuses what nobody read."""

    def __init__(self, raw: object) -> None:
        if not isinstance(raw, dict):
            raise BadRequest("the body is no JSON object")
        self._raw = {name: value for name, value in raw.items() if value is not None}
        self._read: set[str] = set()

    def take(self, name: str, default: Any = None) -> Any:
        self._read.add(name)
        return self._raw.get(name, default)

    def number(self, name: str, default: float, low: float, high: float) -> float:
        value = self.take(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise BadRequest(f"{name} is {value!r}; it must be a number from {low:g} to {high:g}", name)
        return float(value)

    def whole(self, name: str, default: int | None, low: int, high: int = 1 << 62) -> int | None:
        value = self.take(name, default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            top = f" and at most {high:,}" if high < 1 << 62 else ""
            raise BadRequest(f"{name} is {value!r}; it must be a whole number of at least {low}{top}", name)
        return value

    def flag(self, name: str) -> bool:
        value = self.take(name, False)
        if not isinstance(value, bool):
            raise BadRequest(f"{name} is {value!r}; it must be true or false", name)
        return value

    def text(self, name: str) -> str:
        value = self.take(name)
        if not isinstance(value, str) or not value:
            raise BadRequest(f"{name} is missing" if value is None else f"{name} is {value!r}; it must be text", name)
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A text, or a list of them, none empty."""
        value = self.take(name, ())
        found = (value,) if isinstance(value, str) else value
        if not isinstance(found, (list, tuple)) or not all(isinstance(one, str) and one for one in found):
            raise BadRequest(f"{name} must be text, or a list of texts, none of them empty", name)
        return tuple(found)

    def done(self) -> None:
        for name, value in self._raw.items():
            if name in self._read or name in HARMLESS:
                continue
            if name not in UNSERVED:
                raise BadRequest(f"{name} is not known here", name)
            nothing, why = UNSERVED[name]
            if value != nothing:
                raise BadRequest(f"{name} is not served: {why}", name)


def token_ids(value: Sequence[Any], param: str, vocabulary: int) -> tuple[int, ...]:
    """Token ids as a client sent them."""
    if any(isinstance(one, bool) or not isinstance(one, int) or not 0 <= one < vocabulary for one in value):
        raise BadRequest(f"{param} holds what is no token of this model: ids go from 0 to {vocabulary - 1:,}", param)
    return tuple(value)


def several(value: Any, param: str, encode: Callable[[str], Sequence[int]], vocabulary: int) -> list[tuple[int, ...]]:
    """Prompts or inputs in each form that clients send: text, texts, token ids, lists of token ids."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not value:
        raise BadRequest(f"{param} must be text, a list of texts, or token ids", param)
    if all(isinstance(one, int) for one in value):
        value = [value]
    found = []
    for one in value:
        if isinstance(one, str):
            found.append(tuple(encode(one)))
        elif isinstance(one, list):
            found.append(token_ids(one, param, vocabulary))
        else:
            raise BadRequest(f"{param} holds {one!r}, which is neither text nor token ids", param)
        if not found[-1]:
            raise BadRequest(f"{param} is empty", param)
    return found
