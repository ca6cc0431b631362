"""`duoka import-checkpoint` in this process."""

from click.testing import CliRunner

from duoka.cli.import_checkpoint import command


def import_from(folder, model, target):
    line = [str(folder), "--model", str(model), "-o", str(target)]
    result = CliRunner().invoke(command, line, standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.output
