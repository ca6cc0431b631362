"""Python reads this at its start: GPUs are loaded before torch, and torch.cuda answers for them."""

import ctypes
import importlib.abc
import importlib.metadata
import importlib.util
import os
import sys


class _BesideTorch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        found = importlib.util.find_spec("torch")
        # Before torch's libraries: their dispatcher and hooks take what registers first.
        library = ctypes.CDLL(os.environ["EMULATED_LIBRARY"], mode=ctypes.RTLD_GLOBAL)
        import_torch = found.loader.exec_module

        def import_both(module):
            import_torch(module)
            from emulated.cuda import answer

            answer(library)

        found.loader.exec_module = import_both
        return found


if os.environ.get("EMULATED_LIBRARY"):
    sys.meta_path.insert(0, _BesideTorch())
    # Plans look at the wheel's version, not at torch: a build for CPUs says so.
    _version = importlib.metadata.version
    importlib.metadata.version = lambda name: _version(name).removesuffix("+cpu") if name == "torch" else _version(name)
