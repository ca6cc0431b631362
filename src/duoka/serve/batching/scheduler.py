"""One thread that answers many requests: a chunk of prompts, then a token for everybody, again and again.

Requests join and leave between passes. Nothing here waits for a reader: what a request gets lies in its own queue.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

from duoka.errors import DuokaError
from duoka.model.sampling import Sampling, choose_token
from duoka.model.slots import SequenceCache
from duoka.serve.batching.model import CHUNK, Next, SlotModel

_BREAKS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, OSError, DuokaError)

Reason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class Scored:
    """A token, its log-probability by the model itself, and the likeliest tokens in its place with theirs."""

    token: int
    logprob: float | None  # of a prompt's first token there is none
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Done:
    reason: Reason


@dataclass(frozen=True)
class Failed:
    """`is_unloaded`: its adapter went, which nothing here is to blame for."""

    error: str
    is_unloaded: bool = False


Event = Scored | list[Scored] | Done | Failed  # a list: a prompt's own tokens


class Mailbox(Protocol):
    """Takes what a job comes to; never waits."""

    def put(self, event: Event, /) -> None: ...


@dataclass
class Job:
    """One answer that is wanted. `num_top` None: no log-probabilities."""

    prompt: tuple[int, ...]
    sampling: Sampling
    stop_ids: frozenset[int]
    sample: int = 0  # of several answers to one request
    adapter: str | None = None
    num_top: int | None = None
    scores_prompt: bool = False
    events: Mailbox = field(default_factory=lambda: queue.SimpleQueue[Event]())
    is_cancelled: bool = False

    def cancel(self) -> None:
        """Its row is free before the next token."""
        self.is_cancelled = True


class IsFull(Exception):
    """More requests wait than may."""


class IsClosing(Exception):
    """Nothing more is computed here."""


class TooLarge(Exception):
    """A request that could never be answered here."""


class TooMany(Exception):
    """One request for more answers than may wait: it would be refused however often it came again."""


@dataclass
class _Sequence:
    job: Job
    cache: SequenceCache
    num_read: int = 0  # of the prompt
    answer: list[int] = field(default_factory=list)
    counts: Counter[int] = field(default_factory=Counter)
    scores: list[Scored] = field(default_factory=list)

    @property
    def tokens_to_reuse(self) -> tuple[int, ...]:
        """What a prompt that begins alike need not read: whole chunks, so that all are read in the same pieces."""
        return self.job.prompt[: self.num_read // CHUNK * CHUNK]


@dataclass
class Numbers:
    """Since the start; for /metrics."""

    requests: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    answer_tokens: int = 0
    passes: int = 0


class Scheduler:
    """`max_bytes`: what all sequences' keys and values may take together, read ones that are kept for later too."""

    def __init__(self, model: SlotModel, *, bytes_per_token: int, max_bytes: int, max_waiting: int = 64) -> None:
        self.model, self.numbers = model, Numbers()
        self._per_token, self.max_tokens, self._max_waiting = bytes_per_token, max_bytes // bytes_per_token, max_waiting
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._active: list[_Sequence] = []
        self._kept: deque[_Sequence] = deque()  # the oldest first
        self._calls: deque[tuple[Callable[[], Any], queue.SimpleQueue[Any]]] = deque()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="duoka-serve", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends what is being answered, as cancelled."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join()

    @property
    def num_active(self) -> int:
        return len(self._active)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def submit(self, jobs: list[Job]) -> None:
        """All or none. Raises IsFull or IsClosing, or TooLarge or TooMany with the reason."""
        if len(jobs) > self._max_waiting:
            raise TooMany(f"{len(jobs)} answers are asked for at once, and at most {self._max_waiting} may wait here")
        for job in jobs:
            need, window = len(job.prompt) + job.sampling.max_new_tokens, self.model.window
            if len(job.prompt) >= window:
                raise TooLarge(f"the prompt has {len(job.prompt):,} tokens, and the model's window is {window:,}")
            if min(need, window) > self.max_tokens:
                raise TooLarge(
                    f"prompt and answer of {need:,} tokens do not fit: the cache here holds {self.max_tokens:,}"
                )
        with self._changed:
            self._check_open()
            waiting = sum(not job.is_cancelled for job in self._waiting)  # who has left keeps no place from others
            if waiting + len(jobs) > self._max_waiting:
                self.numbers.refused += 1
                raise IsFull(f"{waiting} requests wait, and at most {self._max_waiting} may")
            self.numbers.requests += 1
            self._waiting.extend(jobs)
            self._changed.notify()

    def call(self, function: Callable[[], Any]) -> Any:
        """Run it between two passes, by the thread that computes; its answer, or its error."""
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        with self._changed:
            self._check_open()
            self._calls.append((function, answer))
            self._changed.notify()
        found = answer.get()
        if isinstance(found, BaseException):
            raise found
        return found

    def _check_open(self) -> None:
        if self._is_closing:
            raise IsClosing("the server is being stopped")

    def remove_adapter(self, name: str) -> None:
        """Between two passes. Answers by it end, since their next token would be another model's, and nothing that was
        computed with it is kept: the name may come again with other weights."""
        self.call(lambda: self._remove_adapter(name))

    # --- the thread ---

    def _run(self) -> None:
        try:
            while self._is_working():
                try:
                    self._drop_cancelled()
                    self._admit()
                    self._read_prompts()
                    self._decode()
                except _BREAKS as error:  # of memory, mostly: answers are lost, the server is not
                    self._fail(f"{type(error).__name__}: {error}")
        finally:  # nobody waits for an answer that will never come
            with self._changed:
                self._is_closing = True
            for sequence in self._active:
                sequence.job.events.put(Done("cancelled"))
            for job in self._waiting:
                job.events.put(Done("cancelled"))
            for _, answer in self._calls:
                answer.put(IsClosing("the server is being stopped"))

    def _is_working(self) -> bool:
        """Wait for work, and do what was called for; False when the scheduler is closed."""
        with self._changed:
            while not (self._waiting or self._active or self._calls or self._is_closing):
                self._changed.wait()
            calls, self._calls = self._calls, deque()
        for function, answer in calls:
            try:
                answer.put(function())
            except _BREAKS as error:
                answer.put(error)
        return not self._is_closing

    def _fail(self, error: str) -> None:
        for sequence in self._active:
            sequence.job.events.put(Failed(error))
        self._active.clear()
        self._kept.clear()

    def _remove_adapter(self, name: str) -> None:
        self.model.adapters.remove(name)
        self._kept = deque(one for one in self._kept if one.job.adapter != name)
        for sequence in [one for one in self._active if one.job.adapter == name]:
            self._active.remove(sequence)
            sequence.job.events.put(_unloaded(name))

    def _drop_cancelled(self) -> None:
        """Also of those that wait: who has left would keep a place that others are refused for."""
        with self._changed:
            gone = [job for job in self._waiting if job.is_cancelled]
            if gone:
                self._waiting = deque(job for job in self._waiting if not job.is_cancelled)
        for job in gone:
            job.events.put(Done("cancelled"))
        for sequence in [one for one in self._active if one.job.is_cancelled]:
            self._finish(sequence, "cancelled")

    def _admit(self) -> None:
        while len(self._active) < self.model.num_rows:
            with self._changed:
                if not self._waiting:
                    return
                job = self._waiting[0]
                is_unloaded = job.adapter is not None and job.adapter not in self.model.adapters.names
                if not job.is_cancelled and not is_unloaded and not self._make_room(job):
                    return
                self._waiting.popleft()
            if job.is_cancelled:
                job.events.put(Done("cancelled"))
            elif job.adapter is not None and is_unloaded:
                job.events.put(_unloaded(job.adapter))
            else:
                sequence = _Sequence(job, SequenceCache(self._need(job)))
                self._active.append(sequence)  # first: if memory ends in the next line, whoever asked hears of it
                self._take_what_is_read(sequence)

    def _need(self, job: Job) -> int:
        return min(len(job.prompt) + job.sampling.max_new_tokens, self.model.window)

    def _make_room(self, job: Job) -> bool:
        def used() -> int:
            return sum(one.cache.capacity for one in (*self._active, *self._kept))

        while self._kept and used() + self._need(job) > self.max_tokens:
            self._kept.popleft()
        return used() + self._need(job) <= self.max_tokens

    def _take_what_is_read(self, sequence: _Sequence) -> None:
        job = sequence.job
        best: _Sequence | None = None
        if not job.scores_prompt:
            for other in (*self._active, *self._kept):
                same = other.job.adapter == job.adapter
                if same and (length := self._shared(other, job)) > sequence.num_read:
                    best, sequence.num_read = other, length
        if best is not None:
            sequence.cache.take_over(best.cache, sequence.num_read)
            self.numbers.reused_tokens += sequence.num_read

    def _shared(self, other: _Sequence, job: Job) -> int:
        """Tokens that need not be read again; never all: the last one's answer is what comes next."""
        length = 0
        theirs = other.tokens_to_reuse
        while length < len(theirs) and theirs[length : length + CHUNK] == job.prompt[length : length + CHUNK]:
            length += CHUNK
        return length if length < len(job.prompt) else length - CHUNK

    def _read_prompts(self) -> None:
        """A chunk's worth of tokens, of one prompt or of several short ones: answers wait no longer for it."""
        left = CHUNK
        for sequence in [one for one in self._active if one.num_read < len(one.job.prompt)]:
            while left > 0 and sequence.num_read < len(sequence.job.prompt):
                left -= self._read_a_chunk(sequence)

    def _read_a_chunk(self, sequence: _Sequence) -> int:
        job, start = sequence.job, sequence.num_read
        tokens = job.prompt[start : start + CHUNK]
        logits = self.model.read(sequence.cache, tokens, start, job.adapter, keep_all=job.scores_prompt)
        sequence.num_read += len(tokens)
        self.numbers.prompt_tokens += len(tokens)
        if job.scores_prompt:
            self._score_prompt(sequence, start, logits)
        if sequence.num_read == len(job.prompt):
            if job.scores_prompt:
                job.events.put(sequence.scores)
            if job.sampling.max_new_tokens == 0:
                self._finish(sequence, "length")
            else:
                self._take(sequence, logits[-1])
        return len(tokens)

    def _score_prompt(self, sequence: _Sequence, start: int, logits: torch.Tensor) -> None:
        prompt, num_top = sequence.job.prompt, sequence.job.num_top or 0
        if start == 0:
            sequence.scores.append(Scored(prompt[0], None))
        for row, token in zip(logits, prompt[start + 1 : start + 1 + len(logits)], strict=False):
            sequence.scores.append(_score(row, token, num_top))

    def _decode(self) -> None:
        ready = [one for one in self._active if one.answer]
        if not ready:
            return
        rows: list[Next | None] = []
        for one in ready:
            position = len(one.job.prompt) + len(one.answer) - 1
            rows.append(Next(one.cache, one.answer[-1], position, one.job.adapter))
        logits = self.model.decode(rows)
        self.numbers.passes += 1
        for sequence, row in zip(ready, logits, strict=False):
            self._take(sequence, row)

    def _take(self, sequence: _Sequence, logits: torch.Tensor) -> None:
        """Choose the next token of an answer, and end the answer where it ends."""
        job, position = sequence.job, len(sequence.answer)
        token = choose_token(logits, job.sampling, position, sample=job.sample, counts=sequence.counts)
        if token in job.stop_ids:
            self._finish(sequence, "stop")
            return
        sequence.answer.append(token)
        sequence.counts[token] += 1
        self.numbers.answer_tokens += 1
        job.events.put(Scored(token, None) if job.num_top is None else _score(logits, token, job.num_top))
        if (
            len(sequence.answer) >= job.sampling.max_new_tokens
            or len(job.prompt) + len(sequence.answer) >= self.model.window
        ):
            self._finish(sequence, "length")

    def _finish(self, sequence: _Sequence, reason: Reason) -> None:
        self._active.remove(sequence)
        if sequence.tokens_to_reuse:
            self._kept.append(sequence)
        sequence.job.events.put(Done(reason))


def _unloaded(name: str) -> Failed:
    return Failed(f"the model {name!r} was unloaded before its answer was whole", is_unloaded=True)


def _score(logits: torch.Tensor, token: int, num_top: int) -> Scored:
    logprobs = logits.log_softmax(dim=-1)
    values, tokens = logprobs.topk(min(num_top, len(logprobs))) if num_top else (None, None)
    top = () if values is None or tokens is None else tuple(zip(tokens.tolist(), values.tolist(), strict=True))
    return Scored(token, float(logprobs[token]), top)
