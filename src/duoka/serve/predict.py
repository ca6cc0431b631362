"""Predictions: a model's answers to the questions of a data set, beside the reference answers, with BLEU and ROUGE.

Called by `duoka eval FILE` for files of LLaMA-Factory with predict_with_generate. Each conversation's last answer is
generated from the messages before it, shared among the processes. The loss over the same data is evaluate.py's.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from duoka.data.read.example import BadRecord, Example, Prompt
from duoka.data.read.record_kinds import read_record
from duoka.data.read.records import find_pieces, read_piece
from duoka.data.read.registry import find_sets, max_record_bytes
from duoka.data.tokens.template import encode_prompt, render_prompt
from duoka.errors import ConfigError, Fault
from duoka.runs.folder import write_json_atomic, write_text_atomic

if TYPE_CHECKING:
    import torch

    from duoka.comm.world import World
    from duoka.config.schema import RunConfig
    from duoka.data.tokens.tokenizer import ChatTokenizer
    from duoka.model.sampling import Sampling

ANSWERS, SCORES = "generated_predictions.jsonl", "predict_results.json"
_PIECE_BYTES = 16 * 2**20
AT_ONCE = 8
# One CJK character, or a run of other letters and digits: what ROUGE counts as a word.
_WORD = re.compile("[\u2e80-\u9fff\uac00-\ud7a3]|[^\\W\u2e80-\u9fff\uac00-\ud7a3]+")
_BLEU_ORDER = 4


@dataclass(frozen=True)
class Prediction:
    """The question as the model saw it, what it answered, and the answer that stands in the data."""

    prompt: str
    predict: str
    label: str


def predict(
    lm: torch.nn.Module,
    tokenizer: ChatTokenizer,
    config: RunConfig,
    base: Path,
    sampling: Sampling,
    world: World,
    say: Callable[[str], None] = lambda text: None,
) -> list[Prediction]:
    """An answer to every conversation of the config's data, each by one rank; all in the order of the files.

    Every answer is drawn from the same seed, so that it does not depend on which rank generates it.
    """
    done: list[Prediction] = []
    num_refused = num_cut = 0
    examples = _read_examples(config, base)
    # Ranks synchronize after a few answers each: a wait for a slower one stays far below the collective timeout.
    while taken := list(itertools.islice(examples, AT_ONCE * world.size)):
        own = [_answer(lm, tokenizer, example, sampling) for example in taken[world.rank :: world.size]]
        parts = world.gather(own)
        told = [parts[place % world.size][place // world.size] for place in range(len(taken))]
        done += [one.said for one in told if one.said is not None]
        num_refused += sum(one.said is None for one in told)
        num_cut += sum(one.is_cut for one in told)
        say(f"{len(done)} answers")
    if num_refused:
        say(f"note: {num_refused:,} conversations have no answer: the chat template refuses them")
    if num_cut:
        say(f"note: of {num_cut:,} prompts the beginning was cut, for they fill the model's window")
    if not done:
        raise ConfigError("the data holds no conversation to answer", fix="name another eval_dataset")
    return done


@dataclass(frozen=True)
class _Told:
    """What came of a conversation; `said` None: the chat template does not take it."""

    said: Prediction | None
    is_cut: bool = False


def _answer(lm: torch.nn.Module, tokenizer: ChatTokenizer, example: Example | Prompt, sampling: Sampling) -> _Told:
    from duoka.model.answer import window_of
    from duoka.serve.generate import stream_answer

    *before, last = example.messages
    if isinstance(example, Prompt):
        before, label = list(example.messages), ""
    else:
        label = last.content
    try:
        prompt, cuts = render_prompt(tuple(before), example.tools, tokenizer)
    except BadRecord:
        return _Told(None)
    ids, window = encode_prompt(prompt, cuts, tokenizer), window_of(lm)
    if is_cut := window is not None and len(ids) >= window:
        ids = ids[-(window - min(sampling.max_new_tokens, window // 2)) :]
    return _Told(Prediction(prompt, "".join(stream_answer(lm, tokenizer, ids, sampling)), label), is_cut)


def _read_examples(config: RunConfig, base: Path) -> Iterator[Example | Prompt]:
    most = max_record_bytes(config.data.max_length)
    for found in find_sets(config, base):
        pieces = (piece for path in found.files for piece in find_pieces(path, _PIECE_BYTES))
        records = ([piece] if isinstance(piece, Fault) else read_piece(piece, most) for piece in pieces)
        for record in itertools.islice(itertools.chain.from_iterable(records), found.max_samples):
            if isinstance(record, Fault):
                continue  # measured and reported when the same data were tokenized
            try:
                example = read_record(record.value, found.form, source=record.file, line=record.line)
            except BadRecord:
                continue
            if isinstance(example, (Example, Prompt)):
                yield example


def write_predictions(predictions: Sequence[Prediction], scores: dict[str, float], folder: Path) -> None:
    """Both files, each in one step; those of an earlier prediction are replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(asdict(one), ensure_ascii=False) for one in predictions]
    write_text_atomic(folder / ANSWERS, "\n".join(lines) + "\n")
    write_json_atomic(folder / SCORES, scores)


def score(predictions: Sequence[Prediction]) -> dict[str, float]:
    """Means over the answers, in percent: how many are right to the letter, BLEU-4 of characters, ROUGE F of words."""
    sums = dict.fromkeys(("exact", "bleu-4", "rouge-1", "rouge-2", "rouge-l"), 0.0)
    for one in predictions:
        said, wanted = _WORD.findall(one.predict.lower()), _WORD.findall(one.label.lower())
        sums["exact"] += one.predict.strip() == one.label.strip()
        sums["bleu-4"] += bleu(one.predict, one.label)
        sums["rouge-1"] += rouge_n(said, wanted, 1)
        sums["rouge-2"] += rouge_n(said, wanted, 2)
        sums["rouge-l"] += rouge_l(said, wanted)
    return {name: 100 * value / max(1, len(predictions)) for name, value in sums.items()}


def bleu(said: str, wanted: str) -> float:
    """Geometric mean of the n-gram precisions up to 4, times the brevity penalty.

    Where no n-gram is shared, half, a quarter, ... of one counts, so that short answers are not all zero.
    """
    if not said or not wanted:
        return 0.0
    logs, halves = 0.0, 1
    for order in range(1, _BLEU_ORDER + 1):
        ours, theirs = _grams(said, order), _grams(wanted, order)
        shared, total = sum((ours & theirs).values()), max(1, sum(ours.values()))
        if order == 1 and not shared:
            return 0.0
        if not shared:
            halves *= 2
        logs += math.log(shared / total if shared else 1 / (halves * total))
    brevity = min(0.0, 1 - len(wanted) / len(said))
    return math.exp(brevity + logs / _BLEU_ORDER)


def rouge_n(said: Sequence[str], wanted: Sequence[str], order: int) -> float:
    ours, theirs = _grams(said, order), _grams(wanted, order)
    return _f_score(sum((ours & theirs).values()), sum(ours.values()), sum(theirs.values()))


def rouge_l(said: Sequence[str], wanted: Sequence[str]) -> float:
    """F of the longest common subsequence."""
    row = [0] * (len(wanted) + 1)
    for word in said:
        diagonal = 0
        for place, other in enumerate(wanted, start=1):
            diagonal, row[place] = row[place], diagonal + 1 if word == other else max(row[place], row[place - 1])
    return _f_score(row[-1], len(said), len(wanted))


def _grams(words: Sequence[str], order: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[place : place + order]) for place in range(len(words) - order + 1))


def _f_score(shared: int, num_said: int, num_wanted: int) -> float:
    return 2 * shared / (num_said + num_wanted) if shared else 0.0
