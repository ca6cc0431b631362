"""Data of stage rl to prompts: a task's items, or conversations, whose last answer is what rewards may compare with.

Read by every rank at its start, in a second for thousands: nothing of it is kept between runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from duoka.config.schema import RunConfig
from duoka.data.feed.prompts import PromptRows, Question
from duoka.data.read.example import BadRecord, Example, Message, Prompt
from duoka.data.read.record_kinds import read_record
from duoka.data.read.records import find_pieces, read_piece
from duoka.data.read.registry import ResolvedSet, find_sets, max_record_bytes
from duoka.data.report import DataReport, SetReport, count_lengths
from duoka.data.tokens.template import knows_tools, mark_tokens, render_prompt, tool_turn
from duoka.data.tokens.tokenize import Counts
from duoka.data.tokens.tokenizer import ChatTokenizer
from duoka.errors import ConfigError, DataError, Fault, Faults
from duoka.tasks.find import find_tasks, is_task
from duoka.tasks.tool_pool import ToolPool
from duoka.units import parse_seconds

_PIECE_BYTES = 4 << 20


@dataclass(frozen=True)
class _Asked:
    """A question as rewards know it, as the model reads it (calls and tools too), and where it stands."""

    question: Question
    prompt: Prompt
    file: str = ""
    line: int = 0

    def fault(self, error: BadRecord) -> Fault:
        what = error.rule if self.file else f"{self.question.id} cannot be asked: {error.rule}"
        return Fault(what, file=self.file, line=self.line, fix=error.fix)


def prepare_prompts(config: RunConfig, base: Path, tokenizer: ChatTokenizer) -> tuple[PromptRows, DataReport]:
    """Raises Faults (wrong records) and DataError (no prompt is left)."""
    reports: list[SetReport] = []
    questions: list[Question] = []
    ids: list[Sequence[int]] = []
    room = config.data.max_length - config.rl.max_new_tokens
    tools = _tools(config, base, tokenizer)
    for found in find_sets(config, base):
        counts, bad = Counts(), list[Fault]()
        asked = list(_asked(found, base, config, bad))
        encoded = list(_encode(asked, tools, tokenizer, bad))
        if bad and config.data.on_bad == "error":
            raise Faults(bad[:10], title="data error")
        for question, own in encoded:
            if len(own) > room:
                counts.num_dropped_long += 1
                continue
            questions.append(question)
            ids.append(own)
            counts.num_kept += 1
            counts.num_tokens += len(own)
        counts.num_bad, counts.num_records = len(bad), len(encoded) + len(bad)
        files = tuple(map(str, found.files))
        reports.append(SetReport(found.name, found.split, files, found.form.name, counts, False, tuple(bad[:3])))
    if not questions:
        raise _nothing_left(reports, config)
    rows = PromptRows(questions, ids)
    report = DataReport(
        sets=tuple(reports), num_train=len(rows), train_tokens=int(rows.lengths.sum()),
        longest=int(rows.lengths.max()), histogram=count_lengths(rows.lengths), has_prompts=True,
        template="the model's own" if tokenizer.template_name == "model" else tokenizer.template_name,
        notes=tokenizer.notes,
    )  # fmt: skip
    return rows, report


def _tools(config: RunConfig, base: Path, tokenizer: ChatTokenizer) -> str:
    """What prompts tell of rl.tools, as JSON; "" without any."""
    if not config.rl.tools:
        return ""
    pool = ToolPool(config.rl.tools, base, deadline_s=parse_seconds(config.rl.tool_deadline))
    try:
        schemas = pool.schemas
    finally:
        pool.close()
    try:
        if knows_tools(tokenizer, schemas):
            tool_turn(["?"], schemas, tokenizer)
            return json.dumps(schemas, ensure_ascii=False)
        why = f"the chat template ({tokenizer.template_name}) knows no tools, so the model would not hear of them"
    except BadRecord as error:
        why = error.rule
    raise ConfigError(
        f"rl.tools: {why}", fix="take a model whose template does (Qwen2.5, Qwen3, Llama 3.1 and later), or delete them"
    )


def _nothing_left(reports: Sequence[SetReport], config: RunConfig) -> DataError:
    wrong = [fault for report in reports for fault in report.skipped]
    if wrong and not any(report.counts.num_dropped_long for report in reports):
        return DataError(
            f"no prompt is left: data.on_bad is skip, and all {sum(one.counts.num_bad for one in reports)} are wrong",
            where=f"the first: {' '.join(wrong[0].lines())}",
        )
    return DataError(
        f"no prompt is left: none leaves room for rl.max_new_tokens ({config.rl.max_new_tokens}) in "
        f"data.max_length ({config.data.max_length})",
        fix="write a larger data.max_length, or a smaller rl.max_new_tokens",
    )


def _with_tools(prompt: Prompt, tools: str) -> Prompt:
    if not tools:
        return prompt
    if prompt.tools:
        raise BadRecord(
            "the record names tools of its own, which nobody would run beside rl.tools",
            "take the column tools out of the data, or delete rl.tools",
        )
    return replace(prompt, tools=tools)


def _asked(found: ResolvedSet, base: Path, config: RunConfig, bad: list[Fault]) -> Iterator[_Asked]:
    if is_task(found.name):
        items = [(task, item) for task in find_tasks(found.name, base) for item in task.items("train")]
        for task, item in items[: found.max_samples]:
            if item.question:
                turns = tuple(Message(role, said) for role, said in item.question)
                question = Question(found.name, f"{task.name}/{item.id}", item.question, item.answer, dict(item.facts))
                yield _Asked(question, Prompt(turns))
        return
    number, most_bytes = 0, max_record_bytes(config.data.max_length)
    for path in found.files:
        for piece in find_pieces(path, _PIECE_BYTES):
            records = [piece] if isinstance(piece, Fault) else read_piece(piece, most_bytes)
            for record in records:
                if found.max_samples is not None and number >= found.max_samples:
                    return
                number += 1
                if isinstance(record, Fault):
                    bad.append(record)
                    continue
                try:
                    example = read_record(record.value, found.form)
                except BadRecord as error:
                    bad.append(Fault(error.rule, file=record.file, line=record.line, fix=error.fix))
                    continue
                assert isinstance(example, Example | Prompt), "check_data refused other kinds"
                facts = record.value if isinstance(record.value, dict) else {}
                question, prompt = _ask(found.name, f"{path.name}:{record.line or number}", example, facts)
                yield _Asked(question, prompt, record.file, record.line)


def _ask(source: str, name: str, example: Example | Prompt, facts: dict[str, object]) -> tuple[Question, Prompt]:
    messages = example.messages
    answer = messages[-1].content if isinstance(example, Example) else ""
    asked = messages[:-1] if isinstance(example, Example) else messages
    said = tuple((turn.role, turn.content) for turn in asked)
    return Question(source, name, said, answer, facts), Prompt(asked, example.tools)


def _encode(
    asked: Sequence[_Asked], tools: str, tokenizer: ChatTokenizer, bad: list[Fault]
) -> Iterator[tuple[Question, list[int]]]:
    """Those that the template can express, as tokens; the others are noted in `bad`."""
    texts, able = [], []
    for one in asked:
        try:
            texts.append(render_prompt(one.prompt.messages, _with_tools(one.prompt, tools).tools, tokenizer))
            able.append(one)
        except BadRecord as error:
            bad.append(one.fault(error))
    tokens = tokenizer.encode_many([text for text, _ in texts])
    for one, (text, cuts), own in zip(able, texts, tokens, strict=True):
        try:
            yield one.question, mark_tokens(text, [], own, tokenizer, cuts).input_ids.tolist()
        except BadRecord as error:
            bad.append(one.fault(error))
