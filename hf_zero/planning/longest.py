"""The longest sequence that fits: activations grow linearly with the number of tokens, all other memory is constant.

This assumes checkpointed layers and tiled MLPs and loss (docs/long_sequences.md). The bytes per token are the slope
between traces of two lengths. Saved inputs of layers are on the device or, with
`activation_checkpointing.cpu_checkpointing`, in host memory, except for those of two layers: the current one, and the
next one, which is being copied back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.markup import escape

from hf_zero.config import ConfigError
from hf_zero.log import table_console, tracked
from hf_zero.planning.candidates import Candidate, Training, candidates, check_sizes, ds_config, for_long_sequences
from hf_zero.planning.estimate import Estimate, gigabytes, traced
from hf_zero.planning.machine import Hardware
from hf_zero.planning.model import PlannedModel, TilingChoice
from hf_zero.planning.show import new_table, sequence_sizes, show_choice

_TILES = 16, 32  # lengths that are traced, in units of a tile, so that buffers of one tile matter little
_LEAST_TILE = 1024
_GRAIN = 1024  # lengths are multiples of this
_SUB_GROUP = 100_000_000


@dataclass(frozen=True, slots=True)
class Line:
    """Bytes as a linear function of a rank's tokens."""

    fixed: float
    per_token: float

    @classmethod
    def through(cls, first: tuple[int, int], second: tuple[int, int]) -> Line:
        """The line through two points (tokens, bytes)."""
        per_token = (second[1] - first[1]) / (second[0] - first[0])
        return cls(second[1] - per_token * second[0], per_token)

    def at(self, tokens: float) -> float:
        return self.fixed + self.per_token * tokens

    def tokens(self, limit: float) -> float:
        """Maximum number of tokens within `limit` bytes."""
        if self.fixed > limit:
            return 0.0
        return (limit - self.fixed) / self.per_token if self.per_token else float("inf")


@dataclass(frozen=True, slots=True)
class Reach:
    """The longest sequence of one candidate.

    Attributes:
        length: tokens of the longest sequence.
        ranks: number of ranks that share a sequence.
        device: memory of one device.
        host: host memory of all ranks of a host.
        bound: the memory that limits the length.
    """

    candidate: Candidate
    inputs_on_host: bool
    config: dict[str, Any]
    length: int
    ranks: int
    device: Line
    host: Line
    bound: str

    @property
    def name(self) -> str:
        return self.candidate.name + (", inputs on host" if self.inputs_on_host else "")


def longest_sequences(model: PlannedModel, hardware: Hardware, training: Training) -> list[Reach]:
    """Return all candidates that fit at any length, the longest first; equal ones in order of preference.

    Raises:
        ConfigError: no candidate has a valid config (the error is that of the first one), or ranks cannot share the
            model's sequences.
    """
    check_sizes(training, hardware.ranks)
    model.check_shares(training.sequence_parallel)
    training, shared = replace(training, checkpointing=True), training.sequence_parallel
    tiling = TilingChoice.that_fits(model.module)
    tile = max(_LEAST_TILE, model.hidden)
    lengths = [replace(training, length=count * tile * shared) for count in _TILES]
    for each in tracked(lengths, "tracing the model"):  # estimates look these traces up
        traced(model, each, checkpointing=True, tiling=tiling, on_cpu=not hardware.separate)
    reaches: list[Reach] = []
    refused: list[ConfigError] = []
    alike = hardware.ranks // training.tensor_parallel
    for candidate in tracked(list(candidates(training, ranks=alike, separate=hardware.separate)), "estimating"):
        for on_host in (False, True) if hardware.separate else (False,):
            config = _config(candidate, training, tiling, on_host)
            try:
                pair = [Estimate.of(model, hardware, each, candidate, config) for each in lengths]
            except ConfigError as error:
                refused.append(error)
                continue
            reach = _reach(pair, on_host=on_host)
            reaches += [reach] if reach.length else []
    if not reaches and refused:
        raise refused[0]
    return sorted(reaches, key=lambda each: -each.length)


def most_sharing(model: PlannedModel, hardware: Hardware, training: Training) -> Training:
    """Return `training` with as many ranks per sequence as one host and the number of heads allow."""
    if training.tensor_parallel > 1:
        return training
    return replace(training, sequence_parallel=sequence_sizes(model, hardware)[-1])


def _config(candidate: Candidate, training: Training, tiling: TilingChoice, on_host: bool) -> dict[str, Any]:
    config = ds_config(candidate, training)
    if candidate.optimizer == "nvme":  # small buffers in host memory, to leave space for the inputs of layers
        config["zero_optimization"]["sub_group_size"] = _SUB_GROUP
    return for_long_sequences(config, tiling, on_host=on_host)


def _reach(pair: Sequence[Estimate], *, on_host: bool) -> Reach:
    """The longest sequence of a candidate, by its memory with two lengths; 0 tokens if it does not fit at any."""
    last, shared = pair[-1], pair[-1].training.sequence_parallel
    device = Line.through(*((each.training.local_length, each.memory.device_total) for each in pair))
    host = Line.through(*((each.training.local_length, each.host_bytes) for each in pair))
    by_device = device.tokens(last.hardware.limit)
    by_host = host.tokens(last.hardware.host_limit) if last.hardware.separate else float("inf")
    length = int(min(by_device, by_host)) // _GRAIN * _GRAIN
    bound = "host memory" if by_host < by_device else "device memory"
    return Reach(last.candidate, on_host, last.config, length * shared, shared, device, host, bound)


def sums(reach: Reach, hardware: Hardware) -> Iterator[str]:
    tokens = reach.length // reach.ranks
    parts = [("a device", reach.device, hardware.limit)]
    if reach.host.fixed or reach.host.per_token:
        parts.append(("a host", reach.host, hardware.host_limit))
    for place, line, limit in parts:
        growing = f"{tokens:,} tokens x {line.per_token / 1e3:,.1f} KB"
        yield f"{place}: {gigabytes(line.fixed)} + {growing} = {gigabytes(line.at(tokens))} of {gigabytes(limit)}"


def show_longest(reaches: Sequence[Reach], model: PlannedModel, hardware: Hardware, training: Training) -> None:
    console = table_console()
    shared = f", {reaches[0].ranks} ranks per sequence" if reaches and reaches[0].ranks > 1 else ""
    title = f"{model.name}: longest sequence on {hardware.name}{shared}, checkpointed layers, tiled MLPs and loss"
    table = new_table(title, "tokens", "device", "per token", "host", "per token")
    for each in reaches:
        cells = [f"{each.length:,}"]
        for line in (each.device, each.host):
            cells += [gigabytes(line.fixed) if line.fixed else "-", f"{line.per_token / 1e3:,.1f} KB"]
        table.add_row(each.name, *cells, each.bound, style="bold green" if each is reaches[0] else "")
    if not reaches:
        console.print("nothing fits at any length: give a drive with --nvme-path, or use more devices")
        return
    console.print(table)
    for text in sums(reaches[0], hardware):
        console.print(escape(text), soft_wrap=True)
    show_choice(console, reaches[0].name, reaches[0].config, training, reaches[0].candidate, hardware)


def reaches_as_dict(reaches: Sequence[Reach]) -> list[dict[str, Any]]:
    return [
        {
            "name": each.name,
            "longest": each.length,
            "sequence_ranks": each.ranks,
            "device_fixed": each.device.fixed,
            "device_per_token": each.device.per_token,
            "host_fixed": each.host.fixed,
            "host_per_token": each.host.per_token,
            "bound_by": each.bound,
            "config": each.config,
        }
        for each in reaches
    ]
