"""A run or model for lm-evaluation-harness: its tasks, with the numbers that `duoka eval` computes.

    import lm_eval, duoka.evals
    lm_eval.simple_evaluate(model=duoka.evals.lm_eval_model("runs/sft"), tasks=["my_task"], apply_chat_template=True)

Answers and log-probabilities come from the functions behind `duoka eval --tasks` (parallel/task_score.py): rows that
are answered together have one length and no padding, so that a row's result hangs on nothing beside it. One process,
which sees all requests. Needs `duoka[lm-eval]`.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from duoka.config.schema import ModelConfig
from duoka.errors import ConfigError
from duoka.serve.load_run import choose_dtype, find_trained, load_chat_tokenizer, load_trained

if TYPE_CHECKING:
    from duoka.data.tokens.tokenizer import ChatTokenizer
    from duoka.model.build import LossModel
    from duoka.parallel.task_rows import Row

__all__ = ["lm_eval_model"]
_USUAL_LENGTH = 2048  # of a model that does not say how much it reads
_USUAL_ANSWER = 256  # tokens, as the harness has it where a task says nothing
# What a task may ask of an answer; what else the harness sends changes nothing about the likeliest tokens.
_DRAWING = ("temperature", "top_p", "top_k")


def lm_eval_model(
    run: str,
    *,
    step: int | None = None,
    precision: str = "fp32",
    batch: int = 16,
    say: Callable[[str], None] = lambda text: None,
) -> Any:
    """An `lm_eval.api.model.LM` of a run's result, of its checkpoint `step`, or of any model that duoka reads.

    `precision` fp32 gives the same numbers whatever `batch` is, as in `duoka eval`. Raises ConfigError.
    """
    try:
        api = importlib.import_module("lm_eval.api.model")
    except ImportError as error:
        raise ConfigError(
            f"lm-evaluation-harness cannot be imported ({error})", fix='install it:   pip install "duoka[lm-eval]"'
        ) from None
    from duoka.comm.world import pick_device
    from duoka.model.answer import stop_tokens, window_of
    from duoka.parallel.task_score import build_judge

    trained = find_trained(run, step=step, say=say)
    tokenizer = load_chat_tokenizer(trained)
    asked = ModelConfig(name=trained.name, trust_remote_code=trained.trust_remote_code)
    lm = load_trained(trained, dtype=choose_dtype(precision))
    model = build_judge(lm, asked, trained.base, pick_device(0), precision)
    stops = stop_tokens(model.core, tokenizer)
    judge = Answers(trained.name, model, tokenizer, stops, window_of(model.core) or _USUAL_LENGTH, precision, batch)
    return _as_harness_model(api.LM, judge)


@dataclass
class Answers:
    """Requests of the harness, as rows of tokens and back."""

    name: str
    model: LossModel
    tokenizer: ChatTokenizer
    stop_ids: frozenset[int]
    window: int
    precision: str
    batch: int
    chats: dict[str, tuple[int, ...]] = field(default_factory=dict)  # prompts that the template wrote, with their ids

    # --- text to tokens ---

    def write_chat(self, history: Sequence[dict[str, str]], add_generation_prompt: bool) -> str:
        """The conversation as the model's template has it; an unfinished last answer stays open."""
        from duoka.data.read.example import Message
        from duoka.data.tokens.template import encode_prompt, render_prompt

        turns = [dict(turn) for turn in history]
        if add_generation_prompt:
            text, cuts = render_prompt(
                tuple(Message(turn["role"], turn["content"]) for turn in turns), None, self.tokenizer
            )
            self.chats[text] = tuple(encode_prompt(text, cuts, self.tokenizer))
            return text
        text = self.tokenizer.render(turns)
        said = turns[-1]["content"]
        bare = said.strip()  # some templates strip
        return text[: text.rindex(bare) + len(bare)] + said[len(said.rstrip()) :] if bare else text

    def read(self, text: str) -> tuple[int, ...]:
        """The ids of a prompt: of the template's as `duoka eval` has them, else of plain text with its beginning."""
        return self.chats[text] if text in self.chats else self.tokenizer.encode_plain(text)

    @property
    def begin(self) -> int:
        """What stands before a text without a beginning."""
        found = self.tokenizer.bos_id
        return found if found is not None else next(iter(sorted(self.stop_ids)), 0)

    def pair(self, context: str, continuation: str) -> Row:
        """Behind a chat's prompt the answer is tokenized by itself; in plain text, together with what is before."""
        from duoka.parallel.task_rows import Row

        if context in self.chats:
            asked = self.chats[context]
            return self._fitted(Row(0, 0, (*asked, *self.tokenizer.encode(continuation)[0]), len(asked)))
        if not context:
            ids = self.tokenizer.encode(continuation)[0]
            return self._fitted(Row(0, 0, (self.begin, *ids) if ids[:1] != [self.begin] else tuple(ids), 1))
        kept = context.rstrip()  # a blank belongs to the word behind it
        if not kept:
            return self._fitted(Row(0, 0, (self.begin, *self.tokenizer.encode(context + continuation)[0]), 1))
        before = self.read(kept)
        whole = self.read(kept + context[len(kept) :] + continuation)
        return self._fitted(Row(0, 0, whole, min(len(before), len(whole) - 1)))

    def _fitted(self, row: Row, room: int = 0) -> Row:
        from duoka.parallel.task_rows import fit_row

        return fit_row(row, self.window, room)

    # --- tokens to numbers ---

    def score(self, rows: Sequence[Row]) -> list[tuple[float, bool]]:
        """Of each row, the log-probability of its wanted tokens and whether each of them is the likeliest."""
        from duoka.parallel.precision import compute_in
        from duoka.parallel.task_rows import group_rows
        from duoka.parallel.task_score import judge_rows

        device = next(self.model.parameters()).device
        found: dict[int, tuple[float, bool]] = {}
        for places in group_rows(rows, self.batch, shared=not self.model.no_sharing):
            with compute_in(self.precision, device):
                judged = judge_rows(self.model, [rows[place] for place in places], device)
            found |= dict(zip(places, judged, strict=True))
        return [found[place] for place in range(len(rows))]

    def score_text(self, text: str) -> float:
        """The log-probability of a whole text; of a longer one than the model reads, window by window."""
        from duoka.parallel.task_rows import Row

        ids = self.tokenizer.encode(text)[0]
        ids = ids[1:] if ids[:1] == [self.begin] else ids
        rows, room = list[Row](), self.window - 1
        for at in range(0, len(ids), room):
            wanted = ids[at : at + room]
            before = [self.begin, *ids[:at]][-(self.window - len(wanted)) :]  # as much context as there is room for
            rows.append(Row(0, 0, (*before, *wanted), len(before)))
        return sum(logp for logp, _ in self.score(rows))

    def answer(self, asked: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
        """The likeliest tokens after each prompt, up to the first of its `until`."""
        from duoka.model.together import likeliest_answers
        from duoka.parallel.precision import compute_in
        from duoka.parallel.task_rows import Row

        rows: list[tuple[Sequence[int], int]] = []
        for context, wishes in asked:
            most, ids = self._room_of(wishes), self.read(context)
            rows.append((self._fitted(Row(0, 0, ids, len(ids)), most).prompt, most))
        with compute_in(self.precision, next(self.model.parameters()).device):
            said = likeliest_answers(self.model, rows, self.stop_ids, self.batch)
        texts = [self.tokenizer.backend.decode(one.ids, skip_special_tokens=True) for one in said]
        return [_until(text, wishes.get("until") or ()) for text, (_, wishes) in zip(texts, asked, strict=True)]

    def _room_of(self, wishes: dict[str, Any]) -> int:
        draws = [name for name in _DRAWING if wishes.get("do_sample") and wishes.get(name)]
        if draws:
            raise ConfigError(
                f"a task asks for drawn answers ({', '.join(draws)}), and these are the likeliest tokens",
                fix="write   do_sample: false   under generation_kwargs: of the task",
            )
        most = int(wishes.get("max_gen_toks") or wishes.get("max_new_tokens") or _USUAL_ANSWER)
        return min(most, max(1, self.window // 2)) if most >= self.window else most


def _until(text: str, ends: str | Iterable[str]) -> str:
    found = [text.find(end) for end in ([ends] if isinstance(ends, str) else ends) if end and end in text]
    return text[: min(found)] if found else text


def _as_harness_model(base: type, judge: Answers) -> Any:
    """An object of a class that the harness knows as a model: it can only be made where the package is installed."""

    def told(model: Any, method: str, requests: Sequence[Any], results: list[Any]) -> list[Any]:
        for request, result in zip(requests, results, strict=True):
            model.cache_hook.add_partial(method, request.args, result)
        return results

    def loglikelihood(self: Any, requests: Sequence[Any], **_: Any) -> list[Any]:
        return told(self, "loglikelihood", requests, judge.score([judge.pair(*one.args) for one in requests]))

    def loglikelihood_rolling(self: Any, requests: Sequence[Any], **_: Any) -> list[Any]:
        found = [judge.score_text(one.args[0]) for one in requests]
        return told(self, "loglikelihood_rolling", requests, found)

    def generate_until(self: Any, requests: Sequence[Any], **_: Any) -> list[Any]:
        return told(self, "generate_until", requests, judge.answer([one.args for one in requests]))

    def apply_chat_template(self: Any, chat_history: Any, add_generation_prompt: bool = True) -> str:
        return judge.write_chat(chat_history, add_generation_prompt)

    members = {
        "__doc__": f"{judge.name}, computed by duoka.",
        "answers": judge,
        "loglikelihood": loglikelihood,
        "loglikelihood_rolling": loglikelihood_rolling,
        "generate_until": generate_until,
        "apply_chat_template": apply_chat_template,
        "chat_template": lambda self, chat_template=False: judge.tokenizer.template,
        "tokenizer_name": property(lambda self: f"{judge.name}-{judge.tokenizer.fingerprint[:16]}"),
        "max_length": property(lambda self: judge.window),
        "max_gen_toks": property(lambda self: _USUAL_ANSWER),
    }
    made = types.new_class("DuokaModel", (base,), exec_body=lambda namespace: namespace.update(members))
    return made()
