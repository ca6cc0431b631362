"""The data report as one HTML page: counts, token histogram, and samples with what is learned in color.

`duoka data inspect --html` writes it. Nothing in it is fetched from anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from duoka.data.report import DataReport

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
pre { white-space: pre-wrap; background: #f6f6f4; padding: 1rem; border-radius: 6px; overflow-wrap: anywhere }
mark { background: #bfe8c4; color: inherit } .bar { background: #5b8; height: .8rem; min-width: 1px }
td, th { padding: 0 .6rem; text-align: right; font-weight: normal } td.bars { width: 24rem }
@media (prefers-color-scheme: dark) { body { background: #1b1b1b; color: #ddd } pre { background: #262626 }
  mark { background: #24592d } }
"""


@dataclass(frozen=True)
class ShownSample:
    """A sample as runs of text that are all learned, or all not; a row of text may hold several documents."""

    place: int
    num_tokens: int
    num_targets: int
    parts: Sequence[tuple[bool, str]]
    num_documents: int = 1
    is_pair: bool = False

    def title(self) -> str:
        rows = f" in {self.num_documents} parts of documents" if self.num_documents > 1 else ""
        rows = " of a pair, the better answer first" if self.is_pair else rows
        return f"sample {self.place}: {self.num_tokens:,} tokens{rows}, {self.num_targets:,} targets"


def build_page(report: DataReport, samples: Sequence[ShownSample], title: str) -> str:
    most = max((count for _, count in report.histogram), default=1)
    bars = "".join(
        f"<tr><td>up to {top:,}</td><td>{count:,}</td>"
        f'<td class=bars><div class=bar style="width:{100 * count / most:.1f}%"></div></td></tr>'
        for top, count in report.histogram
    )
    what = "documents" if report.row_tokens else "samples"
    table = f"<h2>Lengths</h2><table><tr><th>tokens<th>{what}<th></tr>{bars}</table>" if bars else ""
    lines = "".join(f"<li>{escape(line)}</li>" for line in report.lines(histogram=False))
    shown = "".join(_show(sample) for sample in samples)
    return (
        f'<!doctype html><meta charset=utf-8><meta name=viewport content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style>"
        f"<h1>{escape(title)}</h1><ul>{lines}</ul>{table}"
        f"<h2>Samples</h2><p>Target text is <mark>marked</mark>.</p>{shown}\n"
    )


def _show(sample: ShownSample) -> str:
    text = "".join(f"<mark>{escape(part)}</mark>" if learned else escape(part) for learned, part in sample.parts)
    return f"<h3>{escape(sample.title().capitalize())}</h3><pre>{text}</pre>"
