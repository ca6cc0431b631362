"""Which checkpoint of a run is read, while the run may go on: it saves newer ones, and removes those that it keeps not.

For load_run.py, which reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from duoka.errors import ConfigError, typed
from duoka.runs.folder import RunFolder

_LOOKS = 10  # for the newest, of a run that removes them meanwhile


def find_checkpoint(run: RunFolder, step: int | None, say: Callable[[str], None]) -> Path:
    """That of a step, or the newest that is whole."""
    if step is None:
        return _newest_checkpoint(run, say)
    from duoka.comm.world import World
    from duoka.runs.manifest import folder_name, list_checkpoints
    from duoka.store.resume import find_damage

    folder = run.checkpoints / folder_name(step)
    if not folder.is_dir():
        steps = ", ".join(str(int(path.name.split("-")[1])) for path in reversed(list_checkpoints(run.checkpoints)))
        raise ConfigError(f"{run.path} has no checkpoint of step {step}", fix=f"it has: {steps or 'none'}")
    damage = find_damage(folder, World())
    if damage and not folder.is_dir():
        raise removed(folder)
    if damage:
        raise ConfigError(f"the checkpoint {folder} is damaged: {damage}", fix="choose another step")
    return folder


def _newest_checkpoint(run: RunFolder, say: Callable[[str], None]) -> Path:
    from duoka.comm.world import World
    from duoka.runs.manifest import list_checkpoints
    from duoka.store.resume import find_damage

    for _ in range(_LOOKS):
        has_lost = False
        for folder in list_checkpoints(run.checkpoints):
            damage = find_damage(folder, World())
            if not damage:
                return folder
            if not folder.is_dir():  # the run has removed it meanwhile, and saved a newer one before
                has_lost = True
                break
            say(f"passing over the damaged checkpoint {folder.name}: {damage}")
        if not has_lost:
            break
    raise ConfigError(
        f"{run.path} has neither a result nor a checkpoint yet", fix=f"go on with it: duoka train {typed(run.config)}"
    )


@contextmanager
def still_there(checkpoint: Path) -> Iterator[None]:
    """While it is read: a checkpoint that its run removes meanwhile is no damaged one, and no bug."""
    try:
        yield
    except Exception as error:  # whatever a reader makes of files that are gone; of files that are there it is raised
        if checkpoint.is_dir():
            raise
        raise removed(checkpoint) from error


def removed(checkpoint: Path) -> ConfigError:
    """What a run that goes on did with the checkpoint that was chosen."""
    return ConfigError(
        f"{checkpoint} was removed while it was read: its run goes on, and keeps the newest ones",
        fix="type the command again, or keep more of them: checkpoint.keep, checkpoint.keep_every",
    )
