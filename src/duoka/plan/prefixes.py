"""Whether a run shares prefixes (computes once what samples of a micro-batch begin with alike), by its config alone.

The model has its say too: model/row_choice.py tries it on a tiny copy.
"""

from __future__ import annotations

from duoka.config.schema import RunConfig
from duoka.plan.layout import Layout


def may_share(config: RunConfig) -> bool:
    """Whether rows hold samples that may begin alike at all: padded ones do not, and texts are cut into rows."""
    return config.data.packs and not config.data.fixed_rows and not config.stage.kind.reads_text


def why_no_sharing(config: RunConfig, layout: Layout) -> str:
    """Why what several samples begin with is computed in each of them; "": it is computed once."""
    return _why_not_asked(config) or why_not_under(layout)


def shares(config: RunConfig) -> bool:
    """Whether samples share prefixes, as far as the config says."""
    return may_share(config) and not _why_not_asked(config)


def _why_not_asked(config: RunConfig) -> str:
    if not config.data.prefix_sharing:
        return "data.prefix_sharing is false"
    return "dropout is drawn for each sample" if config.lora is not None and config.lora.dropout else ""


def why_not_under(layout: Layout) -> str:
    """Why rows and layers of such a layout have no keys that several samples share."""
    if layout.precision == "fp8":  # the sum of gradients is rounded to 2 bits, where each was
        return "in fp8 gradients would depend on how a batch is split"
    if layout.compile:
        return "compiled layers know no keys that several samples share"
    axes = {"pipeline": layout.pp, "sequence": layout.sp}
    cut = next((name for name, size in axes.items() if size > 1), "")
    return f"parallel.{cut} cuts rows or layers" if cut else ""
