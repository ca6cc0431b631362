"""`duoka export-checkpoint RUN -o DIR`: weights and moments of a run, as a checkpoint that DeepSpeed goes on from."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("export-checkpoint")
@click.argument("run", metavar="RUN")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="A new folder to write to.")
@click.option("--checkpoint", type=int, metavar="STEP", help="That of this step; default: the newest.")
def command(run: str, output: Path, checkpoint: int | None) -> None:
    """Write a checkpoint of a run as DeepSpeed's universal one, for its stages 1 to 3 and any number of ranks.

    DeepSpeed need not be installed here. What trains on takes the weights (fp32), AdamW's moments and the step from it;
    learning rate, decay and data are its own.
    """
    from duoka.cli.chat import say
    from duoka.errors import ConfigError
    from duoka.model.export import check_target
    from duoka.serve.load_run import find_run
    from duoka.serve.run_checkpoint import find_checkpoint
    from duoka.store.deepspeed_export import export_universal

    check_target(output)
    found = find_run(run)
    if found is None:
        raise ConfigError(f"{run!r} is no run", fix="`duoka runs` lists runs")
    place = find_checkpoint(found, checkpoint, say)
    done = export_universal(place, output, say)
    click.echo(f"wrote {place} into {output}: step {done.step}, {done.num_tensors} parameters with their moments")
    click.echo('  in DeepSpeed\'s JSON:   "checkpoint": {"load_universal": true}')
    click.echo(f"  in its script:         engine.load_checkpoint({str(output)!r})")
