"""The report page's frame: one HTML file with everything in it, no script, nothing fetched from anywhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

_STYLE = """
:root{--ground:#f6f7f9;--card:#fff;--ink:#1f2430;--soft:#6b7280;--line:#e4e7ec;--main:#2f6bde;--warn:#b45309;
color-scheme:light dark}
@media (prefers-color-scheme:dark){:root{--ground:#12151b;--card:#1a1e26;--ink:#e8eaf0;--soft:#9aa3b2;--line:#2b303b;
--main:#7ba7ff;--warn:#f5b14c}}
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);line-height:1.5;
font:14px/1.5 ui-sans-serif,system-ui,-apple-system,"Segoe UI","Noto Sans","PingFang SC","Microsoft YaHei",sans-serif}
main{max-width:1040px;margin:0 auto;padding:32px 20px 56px}
h1{font-size:26px;line-height:1.2;margin:0;letter-spacing:-.01em}h2{font-size:15px;margin:0 0 12px}
.under{color:var(--soft);margin:6px 0 22px}
.badge{display:inline-block;font-size:12px;font-weight:600;border-radius:99px;padding:2px 10px;margin-left:10px;
vertical-align:5px;border:1px solid var(--line);color:var(--soft)}
.badge.done{color:light-dark(#146c34,#5fd38a)}.badge.failed{color:light-dark(#b91c1c,#ff8a8a)}
.badge.done,.badge.failed{border-color:currentColor}
.grid{display:grid;gap:14px;grid-template-columns:repeat(4,1fr)}
.card{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:16px 18px;overflow:hidden}
.figure b{display:block;font-size:24px;line-height:1.25;letter-spacing:-.01em;font-variant-numeric:tabular-nums}
.figure span{color:var(--soft)}.figure small{display:block;color:var(--soft);font-size:12px;margin-top:2px}
.wide{grid-column:1/-1}.half{grid-column:span 2}.chart{padding:6px 6px 2px}svg{display:block;width:100%;height:auto}
.wide.chart{overflow-x:auto}.wide.chart svg{min-width:620px}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th{color:var(--soft);font-weight:500;text-align:left;border-bottom:1px solid var(--line)}
td,th{padding:5px 12px 5px 0;vertical-align:top}td+td.n,th.n{text-align:right}
tr+tr td{border-top:1px solid var(--line)}td:first-child{color:var(--soft);white-space:nowrap}
.plain td:first-child{color:inherit}
code,pre{font:12.5px/1.55 ui-monospace,SFMono-Regular,Menlo,Consolas,"Noto Sans Mono",monospace}
td code{overflow-wrap:anywhere}pre{overflow:auto;margin:0}
.bar{display:flex;height:22px;border-radius:6px;overflow:hidden;background:var(--line)}.bar i{display:block}
.key{display:flex;flex-wrap:wrap;gap:4px 18px;margin-top:10px;color:var(--soft)}
.key i{display:inline-block;width:10px;height:10px;border-radius:3px;margin-right:6px}
.key b{color:var(--ink);font-weight:500}
.track{position:relative;height:14px;border-radius:5px;background:var(--line);min-width:160px}
.track i{position:absolute;inset:0 auto 0 0;border-radius:5px;background:var(--main)}
.track i.soft{opacity:.28}
.warn{color:var(--warn)}ul{margin:0;padding-left:18px}summary{cursor:pointer;font-weight:600;font-size:15px}
details[open] summary{margin-bottom:10px}footer{color:var(--soft);margin-top:22px;font-size:12px}
@media (max-width:760px){.grid{grid-template-columns:repeat(2,1fr)}.half{grid-column:1/-1}.track{min-width:60px}}
@media print{body{background:#fff}.card{break-inside:avoid}}
"""

# Parts of a step in the order in which they happen; told apart by color and by lightness.
PART_COLOURS = {
    "rollouts": "#be185d",
    "data": "#94a3b8",
    "forward": "#2f6bde",
    "backward": "#1e40af",
    "wait": "#d97706",
    "optimizer": "#0d9488",
    "checkpoint": "#a855f7",
    "other": "#cbd5e1",
}


def page(title: str, body: Iterable[str]) -> str:
    """A whole HTML document."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body><main>\n"
        + "\n".join(body)
        + "\n</main></body></html>\n"
    )


def card(title: str, inner: str, kind: str = "wide") -> str:
    heading = f"<h2>{escape(title)}</h2>" if title else ""
    return f'<section class="card {kind}">{heading}{inner}</section>'


def figure(label: str, value: str, note: str = "") -> str:
    """One large number with its name."""
    small = f"<small>{escape(note)}</small>" if note else ""
    return f'<section class="card figure"><span>{escape(label)}</span><b>{escape(value)}</b>{small}</section>'


def facts_table(rows: Iterable[tuple[str, str]]) -> str:
    """Names and values."""
    cells = "".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in rows)
    return f"<table>{cells}</table>"


def grid_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with a head; all columns but the first are numbers."""
    top = "".join(f"<th{' class=n' if i else ''}>{escape(name)}</th>" for i, name in enumerate(head))
    body = "".join(
        "<tr>" + "".join(f"<td{' class=n' if i else ''}>{escape(cell)}</td>" for i, cell in enumerate(row)) + "</tr>"
        for row in rows
    )
    return f'<table class="plain"><tr>{top}</tr>{body}</table>'


def time_bar(split: dict[str, float]) -> str:
    """Where the time went, as one bar with its key."""
    total = sum(split.values())
    if total <= 0:
        return ""
    bar = "".join(
        f'<i style="width:{100 * seconds / total:.2f}%;background:{PART_COLOURS[name]}" title="{name}"></i>'
        for name, seconds in split.items()
    )
    key = "".join(
        f'<span><i style="background:{PART_COLOURS[name]}"></i>{name} <b>{percent(seconds, total)}</b></span>'
        for name, seconds in split.items()
    )
    return f'<div class="bar">{bar}</div><div class="key">{key}</div>'


def track(share: float, *, soft: bool = False) -> str:
    """A horizontal bar filled to `share` of its width, as HTML."""
    width = 100 * min(max(share, 0.0), 1.0)
    return f'<div class="track"><i{" class=soft" if soft else ""} style="width:{width:.1f}%"></i></div>'


def percent(part: float, total: float) -> str:
    """A whole percent, and never 0% for something that was."""
    share = 100 * part / total if total > 0 else 0.0
    return "<1%" if 0 < share < 0.5 else f"{share:.0f}%"
