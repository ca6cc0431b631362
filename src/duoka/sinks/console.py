"""The screen of a run: a live line on a terminal, else a plain line per logging step; and what is said in between."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from duoka.sinks.sink import RunFacts, Sink, StepNumbers
from duoka.units import format_seconds

if TYPE_CHECKING:
    from rich.console import Console as RichConsole


def open_screen(**options: Any) -> RichConsole:
    """Rich's console. Its own answer to a reader that has left is an exit with 1, which no handler of errors sees."""
    from rich.console import Console as RichConsole

    class Screen(RichConsole):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    return Screen(**options)


class Console(Sink):
    name = "console"
    trouble = "the screen takes no more lines"

    def __init__(self, log_every: int) -> None:
        self._log_every = log_every

    def open(self, facts: RunFacts, say: Callable[[str], None]) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._total_steps = facts.total_steps
        self._console = open_screen(highlight=False)
        self._bar: Progress | None = None
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("training"), BarColumn(bar_width=24), MofNCompleteColumn(),
                TextColumn("{task.fields[text]}"), console=self._console, transient=True,
            )  # fmt: skip
            self._bar.start()
            self._task = self._bar.add_task("training", total=facts.total_steps, completed=facts.kept_steps, text="")

    def step(self, now: StepNumbers) -> None:
        speed, eta = f"{now.recent_tokens_per_s:,.0f} tokens/s", f"ETA {format_seconds(now.eta_s)}"
        if self._bar:
            self._bar.update(self._task, completed=now.step, text=f"loss {now.numbers['loss']:.4f}  {speed}  {eta}")
        if now.step % self._log_every == 0 or now.step in (1, self._total_steps):
            share = "" if now.recent_mfu is None else f"MFU {now.recent_mfu:.1%}  "
            names = [name for name in ("margin", "reward") if name in now.metrics]
            margin = "".join(f"{name} {now.metrics[name]:.3g}  " for name in names)
            self.say(
                f"step {now.step:>5}  epoch {now.numbers['epoch']:.2f}  loss {now.numbers['loss']:.4f}  {margin}"
                f"norm {now.numbers['grad_norm']:.3f}  lr {now.numbers['lr']:.2e}  {speed}  {share}{eta}"
            )

    def evaluated(self, step: int, values: Mapping[str, Any]) -> None:
        if "margin" in values:
            self.say(
                f"eval at step {step}: loss {values['loss']:.4f}, margin {values['margin']:.4g}, "
                f"better answer ahead in {values['accuracy']:.1%} of {values['num_samples']} pairs"
            )
            return
        if {"kl", "reward_chosen"} <= values.keys():
            good, bad = values["reward_chosen"], values["reward_rejected"]
            self.say(
                f"eval at step {step}: loss {values['loss']:.4f}, rewards of good answers {good:.4g}, of bad ones "
                f"{bad:.4g}, z0 {values['kl']:.4g}, {values['accuracy']:.1%} of {values['num_samples']} answers on "
                "their side of it"
            )
            return
        bits = values["bits_per_byte"]
        self.say(
            f"eval at step {step}: loss {values['loss']:.4f}, perplexity {values['perplexity']:.4g}, "
            f"{'' if bits is None else f'{bits:.4f} bits per byte, '}"
            f"token accuracy {values['accuracy']:.1%} over {values['num_samples']} samples"
        )

    def samples(self, step: int, pairs: Sequence[tuple[str, str]]) -> None:
        for prompt, text in pairs:
            self.say(f"  {prompt}|{' '.join(text.split())}")

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def close(self) -> None:
        if self._bar:
            self._bar.stop()
