"""Options that several commands have."""

import click

precision = click.option(
    "--precision",
    type=click.Choice(["auto", "fp32", "bf16", "fp16"]),
    default="auto",
    show_default=True,
    help="The number type that computes; auto: what this machine is fast in.",
)
