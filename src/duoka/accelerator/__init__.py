"""The verbs: duoka's engine for people who keep their own loop. `from duoka import Accelerator`.

The same parts as `duoka train` (parallel, optim, checkpoint, the exact data), nothing implemented twice.
"""

from duoka.accelerator.core import Accelerator

__all__ = ["Accelerator"]
