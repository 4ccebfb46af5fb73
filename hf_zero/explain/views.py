"""What flags of TrainingArguments and the name of a model say, without making either."""

from __future__ import annotations

import difflib
import json
import re
import socket
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from hf_zero.config import ConfigError, ModelView, Problem, TrainingView
from hf_zero.config.errors import ABSENT
from hf_zero.integration.huggingface.views import training_view

_NUM_IN_NAME = re.compile(r"(?<![\w.])\d+(\.\d+)?[bBmM](?![a-zA-Z0-9])")
_FIX = "give a folder with config.json, a config.json, or a model name of the hub"


def training_view_from_flags(flags: Sequence[str], also: Collection[str] = ()) -> tuple[TrainingView | None, list[str]]:
    """The view, and the flags that are not of TrainingArguments. None without flags: then the trainer is unknown.

    A real TrainingArguments would look for devices and start groups.

    Args:
        also: other flags that were possible: what resembles them is a mistake.

    Raises:
        ConfigError: a word that is no flag, a flag that resembles one, a value that a flag does not take.
    """
    if not flags:
        return None, []
    if not flags[0].startswith("-"):
        raise ConfigError(_unplaced(flags[0]))
    # Seconds of imports, hence only here.
    from transformers import HfArgumentParser, TrainingArguments

    class Parser(HfArgumentParser):
        def error(self, message: str) -> None:  # type: ignore[override]  # argparse would end the program
            raise ConfigError(Problem("command line", ABSENT, message, "correct the flag"))

    parser = Parser(TrainingArguments, allow_abbrev=False)  # type: ignore[arg-type]
    known, unknown = parser.parse_known_args(list(flags))
    # What follows a flag of the script's own is its value.
    if unknown and not unknown[0].startswith("-"):
        raise ConfigError(_unplaced(unknown[0]))
    foreign = [word for word in unknown if word.startswith("--")]
    problems = [*_misspelt(foreign, [*also, *parser._option_string_actions])]
    if problems:
        raise ConfigError(problems)
    if len(unknown) == len(flags):
        return None, foreign
    known.max_steps = int(known.max_steps)
    return training_view(known, words=list(flags)), foreign


# What scripts and other trainers call an argument of TrainingArguments.
_MEANT = {
    "--lr": "--learning-rate",
    "--batch-size": "--per-device-train-batch-size",
    "--train-batch-size": "--per-device-train-batch-size",
    "--micro-batch-size": "--per-device-train-batch-size",
    "--epochs": "--num-train-epochs",
    "--grad-accum": "--gradient-accumulation-steps",
    "--accumulation": "--gradient-accumulation-steps",
    "--gradient-clipping": "--max-grad-norm",
    "--warmup": "--warmup-steps",
    "--scheduler": "--lr-scheduler-type",
    "--optimizer": "--optim",
}


def left_aside(flag: str) -> str:
    """What to say of a flag that is the script's own, as far as can be told."""
    meant = _MEANT.get(flag.partition("=")[0].replace("_", "-"))
    hint = f"; TrainingArguments call it {meant.replace('-', '_').replace('__', '--', 1)}" if meant else ""
    return f"{flag}: not a flag of TrainingArguments, left aside{hint}"


def _unplaced(word: str) -> Problem:
    return Problem("command line", word, "neither a flag nor the value of one", "remove it, or name the flag before it")


def _misspelt(foreign: Sequence[str], flags: Sequence[str]) -> Iterator[Problem]:
    shown = {flag.replace("_", "-"): flag for flag in reversed(flags)}  # TrainingArguments has both spellings
    for flag in foreign:
        name = flag.partition("=")[0]
        alike = difflib.get_close_matches(name.replace("_", "-"), shown, n=1, cutoff=0.86)
        if alike:
            yield Problem("command line", name, "no such flag", f"did you mean {shown[alike[0]]}?")


def model_view_by_name(name: str | None) -> ModelView | None:
    """The view of a model's configuration (a folder, a file, or a name on the hub), or None when no model was named."""
    if name is None:
        return None
    path = config_file(name)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(Problem("--model", name, f"its configuration cannot be read: {error}", _FIX)) from None
    if not isinstance(values, dict):
        raise ConfigError(Problem("--model", name, "a model's configuration is one JSON object", _FIX))
    return ModelView(config=values)


def config_file(name: str) -> Path:
    """The config.json of a folder, a file, or a name on the hub."""
    path = Path(name)
    if path.is_dir():
        return path / "config.json"
    if path.exists() or name.endswith(".json"):
        return path
    # From the cache if it is there, else from the hub.
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, "config.json", local_files_only=True))
    except Exception:  # not there, or not a name: the hub knows more
        pass
    if not _hub_answers():
        rule = "no such file, and the hub cannot be reached"
        raise ConfigError(Problem("--model", name, rule, f"{_FIX}{_as_number(name)}"))
    try:
        return Path(hf_hub_download(name, "config.json"))
    except Exception as error:  # its own errors, those of the network, and names it does not allow
        rule = "no such file, and not found on the hub: " + str(error).split("\n")[0]
        raise ConfigError(Problem("--model", name, rule, f"{_FIX}{_as_number(name)}")) from None


def _hub_answers() -> bool:
    """Whether anybody listens there: the hub's own library tries for half a minute."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or getproxies():
        return not constants.HF_HUB_OFFLINE
    place = urlsplit(constants.ENDPOINT)
    try:
        socket.create_connection((place.hostname, place.port or 443), timeout=3).close()
    except OSError:
        return False
    return True


def _as_number(name: str) -> str:
    """How else to say it, where a name says how many parameters its model has."""
    found = _NUM_IN_NAME.search(name)
    return f"; `plan` also takes the number of parameters: {found[0].lower()}" if found else ""
