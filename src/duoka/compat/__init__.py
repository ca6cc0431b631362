"""The Python surface that DDP guides for LLaMA-Factory's nested YAML show, for real, on top of the verbs.

    from duoka.compat.config import Config                        from duoka.compat.data import load_dataset
    from duoka.compat.model import load_model, save_model         from duoka.compat.trainer import load_optimizer, ...

or all of them from here. A guide's script runs with `llama_factory` replaced by `duoka.compat`.
"""

from duoka.compat.config import Config
from duoka.compat.data import load_dataset
from duoka.compat.model import load_model, save_model
from duoka.compat.trainer import load_optimizer, load_scheduler

__all__ = ["Config", "load_dataset", "load_model", "load_optimizer", "load_scheduler", "save_model"]
