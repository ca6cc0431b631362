"""`duoka import-checkpoint FOLDER --model BASE -o DIR`: what DeepSpeed or FSDP trained, as a folder to go on from."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("import-checkpoint")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--model", "model", required=True, metavar="NAME", help="The model that was trained: its config, tokenizer."
)
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="A new folder to write to.")
def command(folder: Path, model: str, output: Path) -> None:
    """Write the weights of a DeepSpeed checkpoint (ZeRO 0 to 3, or universal) or of FSDP's shards as a model folder.

    In fp32. FSDP's are folders of torch.distributed.checkpoint (SHARDED_STATE_DICT), of any number of ranks.
    DeepSpeed need not be installed, and no code in the files is run. The optimizer's state stays behind: train with
    `model: DIR`, whose optimizer begins anew.
    """
    from duoka.model.export import check_target
    from duoka.store.import_model import import_model

    check_target(output)
    found = import_model(folder, model, output)
    step = f", step {found.step}" if found.step else ""
    click.echo(f"{folder}: {found.kind}{step}, {len(found.weights)} tensors")
    click.echo(f"wrote {output}; chat with it, or train it further:   model: {output}")
