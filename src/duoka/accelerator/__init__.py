"""The verbs: duoka's engine for people who keep their own loop. `from duoka import Accelerator`.

The same parts as `duoka train` (parallel, optim, checkpoint, the exact data), nothing implemented twice. The names
beside it that loops know (plugins, states, functions) are found here and in `utils`, `state`, `logging`, `tracking` and
`local_sgd` when they are asked for.
"""

from typing import Any

from duoka.accelerator.core import Accelerator

__all__ = ["Accelerator"]


def __getattr__(name: str) -> Any:
    from duoka.accelerator.names.offered import find

    return find(name, __name__)
