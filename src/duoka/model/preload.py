"""What every rank makes for itself before its first step, made once where ranks are forked from: by importing this.

Transformers makes a table of the renamed weights of all its models when it loads the first one, and rank 0 imports
what draws its line of progress.
"""

import rich.progress  # noqa: F401
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

get_checkpoint_conversion_mapping("")
