"""Flags of TrainingArguments without making one: that would look for devices and start groups."""

from __future__ import annotations

from collections.abc import Sequence

from hf_zero.config import ConfigError, Problem, TrainingView
from hf_zero.config.errors import ABSENT
from hf_zero.integration.huggingface.views import training_view


def training_view_from_flags(flags: Sequence[str]) -> tuple[TrainingView | None, list[str]]:
    """The view, and the flags that belong to somebody else. None without flags: who trains is not known."""
    if not flags:
        return None, []
    # Seconds of imports, hence only here.
    from transformers import HfArgumentParser, TrainingArguments

    class Parser(HfArgumentParser):
        def error(self, message: str) -> None:  # type: ignore[override]  # argparse would end the program
            raise ConfigError(Problem("command line", ABSENT, message, "correct the flag"))

    parser = Parser(TrainingArguments, allow_abbrev=False)  # type: ignore[arg-type]
    known, unknown = parser.parse_known_args(list(flags))
    known.max_steps = int(known.max_steps)
    return training_view(known, words=list(flags)), [word for word in unknown if word.startswith("-")]
