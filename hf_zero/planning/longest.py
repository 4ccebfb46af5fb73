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
from hf_zero.config.schema.long_sequences import on_host as inputs_on_host
from hf_zero.log import tracked
from hf_zero.planning.candidates import Candidate, Training, candidates, check_sizes, ds_config, resolved
from hf_zero.planning.choose import gigabytes, setting_of, traced
from hf_zero.planning.machine import Hardware
from hf_zero.planning.memory import rank_memory
from hf_zero.planning.model import PlannedModel, TilingChoice
from hf_zero.planning.show import new_console, new_table, sequence_sizes, show_choice
from hf_zero.planning.trace import ModelTrace

_TILES = 16, 32  # lengths that are traced, in units of a tile, so that buffers of one tile matter little
_LEAST_TILE = 1024
_GRAIN = 1024  # lengths are multiples of this
_SUB_GROUP = 100_000_000


@dataclass(frozen=True, slots=True)
class Line:
    """Bytes as a linear function of a rank's tokens."""

    fixed: float
    per_token: float

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
    lengths = tuple(count * tile for count in _TILES)
    on_cpu = not hardware.separate
    traces = [
        traced(model, replace(training, length=length * shared), checkpointing=True, tiling=tiling, on_cpu=on_cpu)
        for length in tracked(lengths, "tracing the model")
    ]
    reaches: list[Reach] = []
    refused: list[ConfigError] = []
    alike = hardware.ranks // training.tensor_parallel
    for candidate in tracked(list(candidates(training, ranks=alike, separate=hardware.separate)), "estimating"):
        for on_host in (False, True) if hardware.separate else (False,):
            config = _config(candidate, training, tiling, on_host)
            try:
                lines = _lines(model, hardware, training, config, lengths, traces)
            except ConfigError as error:
                refused.append(error)
                continue
            length, device, host, bound = _reach(model, hardware, training, lines, on_host)
            if length:
                reaches.append(Reach(candidate, on_host, config, length * shared, shared, device, host, bound))
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
    own = {key: True for key, is_on in (("tiled_mlp", tiling.mlp), ("tiled_loss", tiling.loss)) if is_on}
    config |= {"hf_zero": {**config.get("hf_zero", {}), **own}} if own else {}
    return config | ({"activation_checkpointing": {"cpu_checkpointing": True}} if on_host else {})


def _lines(
    model: PlannedModel,
    hardware: Hardware,
    training: Training,
    config: dict[str, Any],
    lengths: Sequence[int],
    traces: Sequence[ModelTrace],
) -> tuple[Line, Line]:
    """Return the memory of a device, and of one rank on the host, with all inputs of layers on the device."""
    answers = resolved(config, training, model, hardware.ranks)
    setting = setting_of(answers, training, hardware)
    short, long = (rank_memory(model, setting, each) for each in traces)
    per_token = (long.device_total - short.device_total) / (lengths[1] - lengths[0])
    return Line(long.device_total - per_token * lengths[1], per_token), Line(long.host_total, 0.0)


def _reach(
    model: PlannedModel, hardware: Hardware, training: Training, lines: tuple[Line, Line], on_host: bool
) -> tuple[int, Line, Line, str]:
    """Return (longest length, device memory, host memory, limiting memory), with the inputs where they are kept."""
    device, host = lines
    if on_host:
        kept = training.micro_batch * model.hidden * model.dtype.itemsize  # per layer and token
        leaves = inputs_on_host(kept, model.layers)
        device = replace(device, per_token=device.per_token - leaves)
        host = replace(host, per_token=leaves)
    host = Line(host.fixed * hardware.per_host, host.per_token * hardware.per_host)
    by_device = device.tokens(hardware.limit)
    by_host = host.tokens(hardware.host_limit) if hardware.separate else float("inf")
    bound = "host memory" if by_host < by_device else "device memory"
    return int(min(by_device, by_host)) // _GRAIN * _GRAIN, device, host, bound


def sums(reach: Reach, hardware: Hardware) -> Iterator[str]:
    tokens = reach.length // reach.ranks
    parts = [("a device", reach.device, hardware.limit)]
    if reach.host.fixed or reach.host.per_token:
        parts.append(("a host", reach.host, hardware.host_limit))
    for place, line, limit in parts:
        growing = f"{tokens:,} tokens x {line.per_token / 1e3:,.1f} KB"
        yield f"{place}: {gigabytes(line.fixed)} + {growing} = {gigabytes(line.at(tokens))} of {gigabytes(limit)}"


def show_longest(reaches: Sequence[Reach], model: PlannedModel, hardware: Hardware, training: Training) -> None:
    console = new_console()
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
