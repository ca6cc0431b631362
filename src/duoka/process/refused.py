"""What the system refused a process, whoever was told of it: files, memory, processes. Nothing of a model or a peer."""

from __future__ import annotations

from duoka.errors import DuokaError
from duoka.process.no_memory import is_no_memory, no_memory
from duoka.process.no_process import is_no_process, no_process
from duoka.process.open_files import is_too_many_files, too_many_files


def refused_by_system(error: BaseException) -> DuokaError | None:
    """The fault that it is, or None for an error of another kind."""
    if is_too_many_files(error):
        return too_many_files()
    if is_no_memory(error):
        return no_memory()
    return no_process() if is_no_process(error) else None
