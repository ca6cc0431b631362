"""Requests of OpenAI's API as the scheduler takes them: prompts as tokens, how to draw, what to send back."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError

from duoka.data.read.example import BadRecord, Message
from duoka.data.read.messages import read_names
from duoka.data.tokens.reasoning import KEYS
from duoka.data.tokens.template import encode_prompt, knows_tools, render_prompt
from duoka.data.tokens.tokenizer import ChatTokenizer
from duoka.model.sampling import Sampling
from duoka.serve.api.fields import BadRequest, Fields, several
from duoka.serve.batching.scheduler import Job, Mailbox

MOST_ANSWERS = 128
MOST_TOP = 20
MOST_STOPS = 16
_LEAST_SHARE = 1e-9  # which the likeliest token alone makes up; so does 0, in OpenAI's words
USUAL_NEW = 1024  # tokens of an answer to a chat request that names no number; completions have 16, as OpenAI's
_UNSERVED_OF_MESSAGES = {"function_call": "write tool_calls", "audio": "models here read text"}
_SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "description": "d"}}, "required": ["a"]}
_WHOLE_TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": _SCHEMA}}
_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


@dataclass(frozen=True)
class Facts:
    """What requests are held against."""

    tokenizer: ChatTokenizer
    vocabulary: int
    window: int
    stop_ids: frozenset[int]
    models: Mapping[str, str | None]  # the names that clients may ask for, and the adapter behind each


@dataclass(frozen=True)
class Asked:
    """One request. `prompts` are of one chat, or of each of several completions; `num` answers to each."""

    is_chat: bool
    model: str
    adapter: str | None
    prompts: list[tuple[int, ...]]
    num: int
    sampling: Sampling
    stops: tuple[str, ...]
    stop_ids: frozenset[int]
    num_top: int | None
    is_stream: bool
    has_usage: bool
    echoes: bool = False
    tools: tuple[str, ...] = ()  # by name
    texts: list[str] = field(default_factory=list)  # the prompts as text, where they are echoed

    def jobs(self, mailbox: Callable[[int], Mailbox]) -> list[Job]:
        """A job for each choice of the answer, in their order; `mailbox` makes a choice's."""
        return [
            Job(
                prompt, self.sampling, self.stop_ids, sample, self.adapter, self.num_top,
                scores_prompt=self.echoes and self.num_top is not None, events=mailbox(place * self.num + sample),
            )
            for place, prompt in enumerate(self.prompts)
            for sample in range(self.num)
        ]  # fmt: skip


def read_chat(raw: object, facts: Facts) -> Asked:
    fields = Fields(raw)
    model, adapter = _model(fields, facts)
    tools, names = _tools(fields, facts.tokenizer)
    prompt = _chat_prompt(fields.take("messages"), tools, facts.tokenizer)
    newer = fields.whole("max_completion_tokens", None, 1)
    older = fields.whole("max_tokens", newer, 1)
    wants, num_top = fields.flag("logprobs"), fields.whole("top_logprobs", None, 0, MOST_TOP)
    if num_top and not wants:
        raise BadRequest("top_logprobs needs logprobs: true", "top_logprobs")
    return _asked(
        fields, facts, True, model, adapter, [prompt], newer or older or USUAL_NEW, (num_top or 0) if wants else None,
        tools=names,
    )  # fmt: skip


def read_completion(raw: object, facts: Facts) -> Asked:
    fields = Fields(raw)
    model, adapter = _model(fields, facts)
    prompts = several(fields.take("prompt"), "prompt", facts.tokenizer.encode_plain, facts.vocabulary)
    echoes = fields.flag("echo")
    new = fields.whole("max_tokens", 16, 0)
    num_top = fields.take("logprobs")
    if num_top is False:
        num_top = None
    num_top = None if num_top is None else fields.whole("logprobs", 0, 0, MOST_TOP)
    if new == 0 and not echoes:
        raise BadRequest("max_tokens is 0, which only echo: true can answer", "max_tokens")
    best = fields.whole("best_of", None, 1)
    if best is not None and best != (fields.take("n") or 1):
        raise BadRequest("best_of is served when it equals n", "best_of")
    texts = [facts.tokenizer.backend.decode(list(one), skip_special_tokens=False) for one in prompts] if echoes else []
    return _asked(fields, facts, False, model, adapter, prompts, new or 0, num_top, echoes=echoes, texts=texts)


def _asked(
    fields: Fields,
    facts: Facts,
    is_chat: bool,
    model: str,
    adapter: str | None,
    prompts: list[tuple[int, ...]],
    new: int,
    num_top: int | None,
    **more: Any,
) -> Asked:
    num = fields.whole("n", 1, 1, MOST_ANSWERS) or 1
    stops = fields.texts("stop")
    if len(stops) > MOST_STOPS:
        raise BadRequest(f"stop has {len(stops)} texts, at most {MOST_STOPS} are looked for", "stop")
    sampling = _sampling(fields, facts, min(prompts, key=len), new)
    ignores_end = fields.flag("ignore_eos")
    is_stream = fields.flag("stream")
    raw_options = fields.take("stream_options")
    if raw_options is not None and not is_stream:
        raise BadRequest("stream_options needs stream: true", "stream_options")
    raw_options = {} if raw_options is None else raw_options
    if not isinstance(raw_options, dict):
        raise BadRequest(f"stream_options is {raw_options!r}; it must be an object", "stream_options")
    options = Fields(raw_options)
    has_usage = options.flag("include_usage")
    options.take("include_obfuscation")
    options.done()
    fields.done()
    stop_ids = frozenset[int]() if ignores_end else facts.stop_ids
    return Asked(
        is_chat, model, adapter, prompts, num, sampling, stops, stop_ids | _named_tokens(stops, facts.tokenizer),
        num_top, is_stream, has_usage, **more,
    )  # fmt: skip


def _named_tokens(stops: Sequence[str], tokenizer: ChatTokenizer) -> frozenset[int]:
    """Stop texts that are special tokens: an answer's text is without these, so that none would be found in it."""
    named = [one for one in stops if one in tokenizer.special_texts]
    ids = [tokenizer.backend.token_to_id(one) for one in named]
    return frozenset(one for one in ids if one is not None)


def _model(fields: Fields, facts: Facts) -> tuple[str, str | None]:
    name = fields.text("model")
    return name, adapter_of(name, facts)


def adapter_of(name: str, facts: Facts) -> str | None:
    """What a model that is served lies on the base as; None: the base itself."""
    if name not in facts.models:
        known = ", ".join(facts.models)
        raise BadRequest(
            f"there is no model {name!r} here; there is {known}", "model", status=404, code="model_not_found"
        )
    return facts.models[name]


def _sampling(fields: Fields, facts: Facts, shortest: Sequence[int], new: int) -> Sampling:
    seed = fields.take("seed")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise BadRequest(f"seed is {seed!r}; it must be a whole number", "seed")
    return Sampling(
        temperature=fields.number("temperature", 1.0, 0.0, 2.0),
        top_p=max(fields.number("top_p", 1.0, 0.0, 1.0), _LEAST_SHARE),
        max_new_tokens=min(new, max(0, facts.window - len(shortest))),
        seed=secrets.randbits(63) if seed is None else seed,
        top_k=max(0, fields.whole("top_k", 0, -1) or 0),
        min_p=fields.number("min_p", 0.0, 0.0, 1.0),
        presence=fields.number("presence_penalty", 0.0, -2.0, 2.0),
        frequency=fields.number("frequency_penalty", 0.0, -2.0, 2.0),
        bias=_bias(fields.take("logit_bias", {}), facts.vocabulary),
    )


def _bias(raw: Any, vocabulary: int) -> dict[int, float]:
    try:
        found = {int(token): float(bias) for token, bias in raw.items()}
    except (AttributeError, TypeError, ValueError, OverflowError):
        raise BadRequest("logit_bias must be a mapping of token ids to numbers", "logit_bias") from None
    if any(not 0 <= token < vocabulary or not -100 <= bias <= 100 for token, bias in found.items()):
        raise BadRequest(f"logit_bias: ids go from 0 to {vocabulary - 1:,}, biases from -100 to 100", "logit_bias")
    return found


# --- messages ---


def _chat_prompt(raw: Any, tools: str | None, tokenizer: ChatTokenizer) -> tuple[int, ...]:
    if not isinstance(raw, list) or not raw:
        raise BadRequest("messages must be a list of at least one message", "messages")
    key = tokenizer.reasoning_keys[bool(tools)]
    messages = tuple(_message(one, f"messages[{place}]", key is not None) for place, one in enumerate(raw))
    try:
        text, cuts = render_prompt(messages, tools, tokenizer)
    except (BadRecord, TemplateError) as error:
        raise BadRequest(f"the chat template ({tokenizer.template_name}) refuses this: {error}", "messages") from None
    for place, message in enumerate(messages):
        lost = [call["name"] for call in json.loads(message.tool_calls or "[]") if call["name"] not in text]
        if lost:
            what = (
                f"the chat template ({tokenizer.template_name}) writes no calls of tools, and this one, of {lost[0]}, "
            )
            raise BadRequest(f"{what}would be left out", f"messages[{place}].tool_calls")
    ids = tuple(encode_prompt(text, cuts, tokenizer))
    if not ids:  # nothing comes after nothing: the model has no token to read
        raise BadRequest(f"the chat template ({tokenizer.template_name}) writes nothing for these messages", "messages")
    return ids


def _message(raw: Any, param: str, knows_reasoning: bool) -> Message:
    if not isinstance(raw, dict):
        raise BadRequest(f"{param} is no object", param)
    said = raw.get("role")
    role = _ROLES.get(said) if isinstance(said, str) else None
    if role is None:
        raise BadRequest(f"{param}.role is {said!r}; known: {', '.join(_ROLES)}", f"{param}.role")
    for field_name, why in _UNSERVED_OF_MESSAGES.items():
        if raw.get(field_name):
            raise BadRequest(f"{param}.{field_name} is not served: {why}", f"{param}.{field_name}")
    calls = raw.get("tool_calls")
    content = _content(raw.get("content"), f"{param}.content", may_be_none=bool(calls))
    # Of a template that knows no key for it, what was thought earlier is not read: clients send it to any server.
    thoughts = [raw[key] for key in KEYS if role == "assistant" and knows_reasoning and isinstance(raw.get(key), str)]
    reasoning = next((thought for thought in thoughts if thought.strip()), "")
    called = _tool_calls(calls, f"{param}.tool_calls") if calls else None
    return Message(role, content, called, reasoning=reasoning, **read_names(raw, role))


def _content(raw: Any, param: str, *, may_be_none: bool) -> str:
    if isinstance(raw, str):
        return raw
    if raw is None and may_be_none:
        return ""
    if isinstance(raw, list):
        parts = [one.get("text") if isinstance(one, dict) and one.get("type") == "text" else None for one in raw]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) == len(parts):
            return "".join(texts)
        raise BadRequest(f"{param} has a part that is no text; models here read text", param)
    raise BadRequest(f"{param} must be text, or a list of parts of text", param)


def _tool_calls(raw: Any, param: str) -> str:
    try:
        calls = [
            {"name": one["function"]["name"], "arguments": json.loads(one["function"]["arguments"] or "{}")}
            | ({"id": one["id"]} if isinstance(one.get("id"), str) else {})
            for one in raw
        ]
    except (TypeError, KeyError, ValueError, AttributeError):
        calls = [{"name": None}]
    # Templates write arguments one by one, and anything else would break in them.
    if not all(_is_name(call["name"]) and isinstance(call["arguments"], dict) for call in calls):
        raise BadRequest(
            f"{param} must be a list of function calls, each with a name, whose arguments are a JSON object", param
        )
    return json.dumps(calls, ensure_ascii=False)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _tools(fields: Fields, tokenizer: ChatTokenizer) -> tuple[str | None, tuple[str, ...]]:
    """As the chat template takes them, and their names."""
    tools, choice = fields.take("tools"), fields.take("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise BadRequest(
            "tool_choice must be auto or none: which tool is called is the model's own choice", "tool_choice"
        )
    if not tools or choice == "none":
        return None, ()
    try:
        names = tuple(one["function"]["name"] for one in tools)
    except (TypeError, KeyError):
        names = (None,)
    if not all(map(_is_name, names)):
        raise BadRequest("tools must be a list of functions, each with a name", "tools")
    if not knows_tools(tokenizer, tools):
        can = knows_tools(tokenizer, [_WHOLE_TOOL])
        what = (
            "cannot write these: has each a description, and parameters as a JSON schema?" if can else "knows no tools"
        )
        raise BadRequest(f"the chat template ({tokenizer.template_name}) {what}", "tools")
    return json.dumps(tools, ensure_ascii=False), names
