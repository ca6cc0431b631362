"""The self-test of losses with a reference: at a run's first step the model is the reference."""

from __future__ import annotations

from duoka.errors import ConfigError

# Log-probabilities of a token that are the same but for rounding. Another model, another template or dropout is off by
# more than a hundredth in fp32; in half precision a token's rounding alone is some hundredths. In fp8 both are rounded
# alike, as scales are powers of two.
_SAME = {"fp32": 1e-3, "bf16": 5e-2, "fp16": 5e-2, "fp8": 5e-2}


def check_start(drift: float, precision: str, beside: str) -> None:
    """Raises where log-probabilities are off by `drift` a token; `beside` says what else is."""
    if drift <= _SAME[precision]:
        return
    raise ConfigError(
        f"at its first step the model is not the reference: log-probabilities differ by {drift:.3g} a token, "
        f"{beside} (both must be 0 but for rounding)",
        where="likely: dropout inside the model, code of its own that draws at random, or weights that were "
        "changed in their folder while their old reference was kept",
        fix="set the dropout in the model's config.json to 0; or delete the folder `reference` in duoka's cache",
    )
