"""Views of TrainingArguments' flags and of a model's config, without creating either."""

from __future__ import annotations

import difflib
import json
import re
import socket
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from hf_zero.config import ConfigError, Findings, ModelView, Problem, TrainingView, ZeroPolicy
from hf_zero.config.errors import ABSENT
from hf_zero.config.schema.precision import model_dtype
from hf_zero.config.schema.zero import Zero, zero_of
from hf_zero.integration.huggingface.views import training_view
from hf_zero.layout.traffic import ModelSizes, Wiring, across_bytes, traffic_of, with_same_weights, within_bytes
from hf_zero.quantities import count_of

_NUM_IN_NAME = re.compile(r"(?<![\w.])\d+(\.\d+)?[bBmM](?![a-zA-Z0-9])")
_FIX = "give a folder with config.json, a config.json, or a model name of the hub"


def training_view_from_flags(flags: Sequence[str], also: Collection[str] = ()) -> tuple[TrainingView | None, list[str]]:
    """The view (None without flags of TrainingArguments), and all flags that are not of TrainingArguments.

    A real TrainingArguments would initialize devices and process groups.

    Args:
        also: other valid flags, whose misspellings are errors.

    Raises:
        ConfigError: for a word that is not a flag, a misspelled flag, or an invalid value.
    """
    if not flags:
        return None, []
    if not flags[0].startswith("-"):
        raise ConfigError(_unplaced(flags[0]))
    # Imported here because it takes seconds.
    from transformers import HfArgumentParser, TrainingArguments

    class Parser(HfArgumentParser):
        def error(self, message: str) -> None:  # type: ignore[override]  # argparse would end the program
            raise ConfigError(Problem("command line", ABSENT, message, "correct the flag"))

    parser = Parser(TrainingArguments, allow_abbrev=False)  # type: ignore[arg-type]
    known, unknown = parser.parse_known_args(list(flags))
    # Words after unknown flags are their values.
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


# Names that scripts and other trainers use for an argument of TrainingArguments.
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
    """A note on an unknown flag, which is probably the script's own."""
    meant = _MEANT.get(flag.partition("=")[0].replace("_", "-"))
    hint = f"; TrainingArguments call it {meant.replace('-', '_').replace('__', '--', 1)}" if meant else ""
    return f"{flag}: not a flag of TrainingArguments, ignored{hint}"


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
    """The view of a model's config (a folder, a file, or a name on the hub); None without a name."""
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
    """The path of config.json for a folder, a file, or a name on the hub."""
    path = Path(name)
    if path.is_dir():
        return path / "config.json"
    if path.exists() or name.endswith(".json"):
        return path
    # From the cache if possible, else from the hub.
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, "config.json", local_files_only=True))
    except Exception:  # not in the cache, or not a valid name: ask the hub
        pass
    if not _hub_answers():
        rule = "no such file, and the hub cannot be reached"
        raise ConfigError(Problem("--model", name, rule, f"{_FIX}{_as_number(name)}"))
    try:
        return Path(hf_hub_download(name, "config.json"))
    except Exception as error:  # hub errors, network errors and invalid names
        rule = "no such file, and not found on the hub: " + str(error).split("\n")[0]
        raise ConfigError(Problem("--model", name, rule, f"{_FIX}{_as_number(name)}")) from None


def _hub_answers() -> bool:
    """Whether the hub can be reached, because its library retries for half a minute."""
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
    """A hint for names that contain the model's number of parameters."""
    match = _NUM_IN_NAME.search(name)
    return f"; `plan` also takes the number of parameters: {match[0].lower()}" if match else ""


# Traffic of a config per update, within and between hosts, and the traffic with other settings of ZeRO++.


THIS = "this config"
_UNIT_NUMEL = 1 << 30  # for a model of unknown size: all results are proportional


@dataclass(frozen=True, slots=True)
class Links:
    """Bytes per second of one rank in one direction: to ranks of the same host, and to other hosts."""

    within: float = 370e9
    across: float = 40e9


@dataclass(frozen=True, slots=True)
class Sent:
    """The traffic of one rank per update.

    Attributes:
        within, across: bytes, or multiples of the model if the number of parameters is unknown.
        seconds: time on the given links without overlap; None if bytes are unknown.
    """

    name: str
    within: float
    across: float
    seconds: float | None


def number_of(text: str, flag: str) -> float:
    """Parse a number such as 7b, 350M, 40G or 1.5e9."""
    number = count_of(text)
    if number is None:
        raise ConfigError(Problem(flag, text, "must be a number, like 7b, 350M or 1.5e9", "correct it"))
    return number


def traffic_rows(findings: Findings, per_host: int | None, parameters: float | None, links: Links) -> tuple[Sent, ...]:
    """The traffic of this config, and of variants that only differ in groups and messages; empty for one rank.

    Raises:
        ConfigError: if the number of ranks is not a multiple of `per_host`.
    """
    ranks = findings.world_size
    if ranks == 1:
        return ()
    per_host = per_host or ranks
    if per_host < 1 or ranks % per_host:
        rule = f"{ranks} ranks do not fill hosts of {per_host}"
        raise ConfigError(Problem("--gpus-per-node", per_host, rule, "give a divisor of --world-size"))
    sizes = _sizes(findings, parameters)
    unit = 1.0 if parameters is not None else 1 / (_UNIT_NUMEL * sizes.weight_bytes)
    steps = findings.batch.accumulation_steps if findings.batch is not None else 1
    wiring = wiring_of(zero_of(findings.config, None), ranks, per_host, findings.tensor_size, steps)
    return tuple(_sent(name, sizes, each, unit, links) for name, each in _variants(wiring))


def _sizes(findings: Findings, parameters: float | None) -> ModelSizes:
    zero = findings.config.section(Zero)
    num = int(parameters) if parameters is not None else _UNIT_NUMEL
    num_bytes = 4 if model_dtype(findings.config) == "fp32" else 2
    # Settings in elements cannot be scaled to a model of unknown size.
    kept = min(num, zero.stage3_max_live_parameters, zero.stage3_max_reuse_distance // 2) if parameters else 0
    communication = findings.config.communication_data_type
    sent = num_bytes if communication is None else 4 if communication == "fp32" else 2
    num //= findings.tensor_size  # a rank's part of the matrices; parameters that are not cut are small
    return ModelSizes(gathered=num, trained=num, kept=kept, weight_bytes=num_bytes, gradient_bytes=sent)


def wiring_of(zero: ZeroPolicy, ranks: int, per_host: int, tensor_size: int, accumulation: int) -> Wiring:
    """The groups of ranks that share states and gather, and the encoding of their messages.

    Args:
        tensor_size: number of consecutive ranks that share each matrix.
        accumulation: micro-batches per update.
    """
    ranks, per_host = with_same_weights(ranks, per_host, tensor_size)
    shard = per_host if zero.shard_size == "host" else zero.shard_size
    second = per_host if zero.gather_size == "host" else zero.gather_size
    return Wiring(
        ranks=ranks,
        per_host=per_host,
        stage=zero.stage,
        shard=shard,
        second_shard=1 if second is None else min(second, shard or ranks),
        quantized_weights=zero.keys.zero_quantized_weights and zero.stage == 3,
        gradient_bits=zero.gradient_bits,
        accumulation=accumulation,
        hops=2 if zero.hops == 2 else 1,
    )


def _variants(this: Wiring) -> Iterator[tuple[str, Wiring]]:
    yield THIS, this
    plain = replace(this, shard=None, second_shard=1, quantized_weights=False, gradient_bits=None)
    local = this.per_host if 1 < this.per_host < this.ranks else 0
    if this != plain:
        yield f"plain stage {this.stage}", plain
    if this.stage >= 1 and local:
        yield f"hybrid, shards over {local} ranks", replace(plain, shard=local)
    if this.stage != 3:
        return
    if local:
        yield f"zero_hpz_partition_size {local}", replace(plain, second_shard=local)
    yield "zero_quantized_weights", replace(plain, quantized_weights=True)
    yield "zero_quantized_gradients", replace(plain, gradient_bits=this.gradient_bits or 4)
    everything = replace(plain, second_shard=local or 1, quantized_weights=True, gradient_bits=this.gradient_bits or 4)
    yield "all of ZeRO++", everything


def _sent(name: str, sizes: ModelSizes, wiring: Wiring, unit: float, links: Links) -> Sent:
    transfers = traffic_of(sizes, wiring)
    within, across = within_bytes(transfers), across_bytes(transfers)
    seconds = within / links.within + across / links.across if unit == 1.0 else None
    return Sent(name, within * unit, across * unit, seconds)
