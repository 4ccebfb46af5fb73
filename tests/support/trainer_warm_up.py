"""Imported by the server that forks ranks: what a rank's first Trainer, or first load of a model, would compute."""

from importlib.util import find_spec

import transformers.trainer  # noqa: F401

# The table of renamed weights: the first model that is loaded or saved compiles its hundreds of regular expressions.
if find_spec("transformers.conversion_mapping") is not None:
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("llama")
