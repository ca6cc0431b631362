"""The line that people watch: a live one on a terminal, one plain line per logging step otherwise. Rank 0 only."""

from __future__ import annotations

from typing import Any

from duoka.units import format_seconds


class Progress:
    def __init__(self, total_steps: int, step: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as Bar

        self.console = Console(highlight=False)
        self._bar: Bar | None = None
        if self.console.is_terminal:
            self._bar = Bar(
                TextColumn("training"), BarColumn(bar_width=24), MofNCompleteColumn(),
                TextColumn("{task.fields[text]}"), console=self.console, transient=True,
            )  # fmt: skip
            self._bar.start()
            self._task = self._bar.add_task("training", total=total_steps, completed=step, text="")

    def update(self, step: int, numbers: dict[str, Any], tokens_per_s: float, eta_s: float) -> None:
        if self._bar:
            text = f"loss {numbers['loss']:.4f}  {tokens_per_s:,.0f} tokens/s  ETA {format_seconds(eta_s)}"
            self._bar.update(self._task, completed=step, text=text)

    def log_line(
        self, step: int, numbers: dict[str, Any], tokens_per_s: float, eta_s: float, mfu: float | None = None
    ) -> None:
        """The lasting line of a logging step."""
        share = "" if mfu is None else f"MFU {mfu:.1%}  "
        self.say(
            f"step {step:>5}  epoch {numbers['epoch']:.2f}  loss {numbers['loss']:.4f}  "
            f"norm {numbers['grad_norm']:.3f}  lr {numbers['lr']:.2e}  {tokens_per_s:,.0f} tokens/s  "
            f"{share}ETA {format_seconds(eta_s)}"
        )

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)

    def close(self) -> None:
        if self._bar:
            self._bar.stop()
