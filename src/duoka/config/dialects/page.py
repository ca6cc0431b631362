"""The page docs/llamafactory.md, made from the dialects' rows, so that it cannot fall behind them."""

from __future__ import annotations

from duoka.config.dialects.all import dialects
from duoka.config.dialects.rows import Dialect, Row

_HEAD = """\
# Files of other tools

`duoka train x.yaml` reads LLaMA-Factory's flat YAML, the nested form of DDP guides, and what `deepspeed:` points to, as
they are. This page is made from the tables that do it (`duoka config dialects`); do not edit it.

- `duoka config show x.yaml` prints what a file means, each line with the place it came from; it also shows Accelerate's
  YAML and DeepSpeed's JSON alone. `duoka config convert x.yaml -o ours.yaml` writes it in duoka's own words.
- Files that merge, talk or predict are for `duoka export`, `duoka chat` and `duoka eval` ([guides.md](guides.md)); the
  classes below are those of training.
- *implemented*: it has the effect that it has there. *reported*: harmless here; one line says why. *refused*: it would
  change the result, and duoka cannot do it (yet): exit code 2. A refused key that is switched off is no matter.
- A batch per device becomes a global batch for the number of processes of the start; both are printed.
- Where a file is silent, LLaMA-Factory's own defaults hold for whatever changes the result (`cutoff_len` 2048,
  `learning_rate` 5e-5, a linear schedule without warm-up, fp32, LoRA of rank 8 with alpha twice that and no dropout).
- One file keeps to one dialect. On the command line both may stand: `learning_rate=1e-4` and `optim.lr=1e-4`.
- A key given twice with equal values is fine; with different ones it is refused with both places, in two blocks too.
- A switch is true, yes, on, 1 or false, no, off, 0; another word (`ture`) is refused, and never taken for off.
- A file that `extends:` another in the same words is one file with it; on a base in duoka's own words, LLaMA-Factory's
  defaults stand below what the base says.
- LLaMA-Factory's v1 form (`examples/v1`) is not read, and named as such.
- A row that means what this version lacks (a stage, a strategy) is refused when it is asked for, and works by itself
  once the schema has it.
"""


def dialects_markdown() -> str:
    """The text of docs/llamafactory.md."""
    out = [_HEAD]
    for dialect in dialects().values():
        out += [f"## {dialect.title}", "", *_table(dialect), ""]
    return "\n".join(out).rstrip() + "\n"


def _table(dialect: Dialect) -> list[str]:
    rows = dict(dialect.rows)
    if dialect.rename:
        lines = [f"The blocks {', '.join(dialect.blocks)} hold LLaMA-Factory's keys, and these:", ""]
        shared = dialects()["llamafactory"].rows
        shown = {written: rows[name] for written, name in dialect.rename.items()}
        own = {name: row for name, row in rows.items() if name not in shared and row not in shown.values()}
        return lines + _lines({**shown, **own})
    return _lines(rows)


def _lines(rows: dict[str, Row]) -> list[str]:
    lines = ["| key | class | duoka's key | note |", "|---|---|---|---|"]
    for name, row in rows.items():
        key = f"`{row.key}`" if row.key else ""
        lines.append(f"| `{name}` | {row.state} | {key} | {row.note} |".replace("  |", " |"))
    return lines
