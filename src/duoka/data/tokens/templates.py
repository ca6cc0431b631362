"""Chat templates as text: the sandbox that renders them, and the named ones for models that ship none.

A template comes from a model's repository and is not trusted: it sees plain values only, in jinja2's sandbox, with
the few functions that templates in the field expect.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Template

_CHATML = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
_LLAMA3 = """\
{{- bos_token -}}
{%- for message in messages -%}
{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif -%}
"""
_PLAIN = """\
{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}
{{ 'assistant:\\n' + message['content'] + (eos_token or '') + '\\n' }}
{%- else -%}
{{ message['role'] + ':\\n' + message['content'] + '\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'assistant:\\n' }}{%- endif -%}
"""
NAMED_TEMPLATES = {"chatml": _CHATML, "qwen": _CHATML, "llama3": _LLAMA3, "plain": _PLAIN}

# Templates that print today's date would give the same data other tokens tomorrow. Most ask whether the clock is
# there and fall back to a date of their own: they are told that it is not. The others get this one.
_FIXED_DATE = "2024-07-26"


@lru_cache(maxsize=16)
def compile_template(text: str) -> Template:
    """A template ready to render. Raises jinja2.TemplateError when its syntax is wrong."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks the assistant's text for others; here it is only what stands in it."""

        tags = {"generation"}  # noqa: RUF012  jinja2's own way to name a tag

        def parse(self, parser: Any) -> nodes.Node | list[nodes.Node]:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, **kw: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, **kw)

    def strftime_now(form: str) -> str:
        from datetime import datetime

        return datetime.fromisoformat(_FIXED_DATE).strftime(form)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    if "strftime_now is defined" not in text:
        environment.globals["strftime_now"] = strftime_now
    return environment.from_string(text)
