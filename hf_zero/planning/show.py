"""A plan as text for a terminal, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hf_zero.config import ConfigError
from hf_zero.log import table_console
from hf_zero.planning.candidates import Candidate, Training, ds_config, for_long_sequences
from hf_zero.planning.choose import RankedPlans
from hf_zero.planning.estimate import Estimate, gigabytes
from hf_zero.planning.event_model import LANES
from hf_zero.planning.machine import Hardware
from hf_zero.planning.model import PlannedModel, TilingChoice

# The reasons for a choice and, if nothing fits, what would make it fit, by the same sums.


@dataclass(frozen=True, slots=True)
class Remedy:
    """A further way to save memory, together with all remedies before it.

    Attributes:
        device: bytes of device memory with it.
    """

    what: str
    device: int


def reasoning(plan: RankedPlans) -> list[str]:
    """Return a line for each candidate, in order of preference: why it is chosen or not; then, if nothing fits, what
    would, and why configs were refused."""
    lines = []
    for each in plan.rows:
        why = f"fits, {_speed(each, plan)}" if each.fits else f"does not fit: {'; '.join(each.lacks)}"
        lines.append(f"{each.candidate.name}: {why}" + "; chosen" * (each is plan.chosen))
    if not plan.fits:
        lines.append(what_else(plan))
    return [*lines, *plan.refused]


def _speed(each: Estimate, plan: RankedPlans) -> str:
    batch = f"with {batch_of(each)} samples per rank, " if plan.training.searches else ""
    size = gigabytes(each.memory.device_total)
    return f"{batch}{size} per device, about {each.tokens_per_s:,.0f} tokens/s, bound by {LANES[each.bound]}"


def batch_of(each: Estimate) -> str:
    """Micro-batch and accumulation."""
    return f"{each.training.micro_batch} x {each.training.accumulation}"


def chosen_batch(plan: RankedPlans) -> str:
    """Return a sentence about a batch that was searched, and how to fix it; empty if it was given."""
    if plan.chosen is None or not plan.training.searches:
        return ""
    training, ranks = plan.chosen.training, plan.training.data_ranks(plan.hardware.ranks)
    samples = training.samples(plan.hardware.ranks)
    text = f"batch: {training.micro_batch} per forward x {training.accumulation} per update x {ranks} data ranks"
    fix = (
        "--micro-batch N fixes it"
        if training.global_batch is not None
        else "--micro-batch N or --global-batch N fixes it"
    )
    return f"{text} = {samples} samples per update, the fastest per token; {fix}"


def what_else(plan: RankedPlans) -> str:
    """Return what would make a candidate fit: remedies up to the first that is enough, the cheapest first."""
    least, limit = nearest(plan), plan.hardware.limit
    plan = replace(plan, training=least.training)
    lacks = [text.replace("; ", ", of which ") for text in least.lacks]
    words = [f"nothing fits. {least.candidate.name} is nearest: it needs {', and '.join(lacks)}"]
    if least.memory.device_total > limit:
        for remedy in remedies(plan, least):
            words.append(f"with {remedy.what}: {gigabytes(remedy.device)} of device memory")
            if remedy.device <= limit:
                words.append("which fits" + " on the device" * (len(lacks) > 1))
                break
        else:
            words.append("use more devices, or larger ones")
        if len(lacks) == 1:
            return "; ".join(words)
    for what, needed in less_on_the_host(plan):
        words.append(f"with {what}: {gigabytes(needed)} of host memory")
        if needed <= plan.hardware.host_limit:
            return "; ".join([*words, "which fits, but changes the training"])
    if plan.training.nvme_path is None:
        words.append("give a drive with --nvme-path, or use more hosts: host memory is not enough")
    else:
        words.append("use more hosts: host memory or the drive is not enough")
    return "; ".join(words)


def nearest(plan: RankedPlans) -> Estimate:
    """Return the candidate that needs the least of a host, if devices have enough for it, else of a device."""
    on_device = [each for each in plan.estimates if each.memory.device_total <= plan.hardware.limit]
    if on_device:
        return min(on_device, key=lambda each: each.memory.host_total + each.memory.disk_total)
    return min(plan.estimates, key=lambda each: each.memory.device_total)


def less_on_the_host(plan: RankedPlans) -> Iterator[tuple[str, float]]:
    """Yield settings with which streaming needs less host memory, each on top of those before, and the bytes per host.
    All of them change the training (docs/offload.md)."""
    fitting = [each for each in plan.estimates if each.candidate.streams]
    fitting = [each for each in fitting if each.memory.device_total <= plan.hardware.limit]
    if not fitting:
        return
    training, least = plan.training, min(fitting, key=lambda each: each.memory.host_total)
    candidate = replace(least.candidate, checkpointing=True)
    keys: dict[str, str] = {}
    for what, changed, optimizer in (
        ('hf_zero.streaming.clipping "last_norm" and bf16.check_grad_overflow false', {"clipping": "last_norm"}, ""),
        ('hf_zero.streaming.states "bf16"', {"states": "bf16"}, ""),
        ("AdamW8bit", {}, "AdamW8bit"),
    ):
        if optimizer and training.optimizer.lower() not in ("adam", "adamw"):
            continue
        keys, training = keys | changed, replace(training, optimizer=optimizer or training.optimizer)
        own = {
            "bf16": {"enabled": True, "check_grad_overflow": False},
            "hf_zero": {"streaming": {"enabled": True, **keys}},
        }
        yield what, float(Estimate.of(plan.model, plan.hardware, training, candidate, least.config | own).host_bytes)


def sums(plan: RankedPlans) -> Iterator[str]:
    """Yield the sums of the chosen candidate's memory, if it uses host memory."""
    if plan.chosen is None or not plan.chosen.memory.host_total:
        return
    memory, hardware = plan.chosen.memory, plan.hardware
    places = (
        ("a device", memory.device, 1, hardware.limit),
        ("a host", memory.host, hardware.per_host, hardware.host_limit),
    )
    for place, kinds, ranks, limit in places:
        parts = " + ".join(f"{gigabytes(size * ranks)} {kind}" for kind, size in kinds.items())
        yield f"{place}: {parts} = {gigabytes(sum(kinds.values()) * ranks)} of {gigabytes(limit)}"


def remedies(plan: RankedPlans, least: Estimate) -> Iterator[Remedy]:
    """Yield remedies, each on top of those before, in order of cost: accumulation (free), recomputation, smaller
    kernels, PCIe traffic, other ranks."""
    training, hardware, candidate = plan.training, plan.hardware, least.candidate
    tiling = kept_tiling = TilingChoice()
    on_host = False

    def then(what: str) -> Remedy:
        return Remedy(what, _device_bytes(plan, candidate, tiling, on_host))

    if training.micro_batch > 1:
        accumulation = training.accumulation * training.micro_batch
        training = replace(training, micro_batch=1, accumulation=accumulation)
        plan = replace(plan, training=training)
        yield then(f"a micro-batch of 1, accumulated {accumulation} times")
    if not candidate.checkpointing:
        candidate = replace(candidate, checkpointing=True)
        yield then("gradient checkpointing")
    whole, fits = then(""), TilingChoice.that_fits(plan.model.module)
    for tiling, key in ((TilingChoice(loss=fits.loss), "tiled_loss"), (fits, "tiled_mlp")):
        tiled = then(f"hf_zero.{key}")
        if tiled.device < whole.device:  # a tile's own buffers may need more than it saves
            whole, kept_tiling = tiled, tiling
            yield tiled
        tiling = kept_tiling
    if hardware.separate:
        on_host = True
        yield then("activation_checkpointing.cpu_checkpointing")
    if candidate.copy_per_host or candidate.second_shard > 1:
        candidate = replace(candidate, copy_per_host=False, second_shard=1)  # tensor parallelism may not allow them
    yield from _other_ranks(plan, candidate, tiling, on_host)


def _other_ranks(plan: RankedPlans, candidate: Candidate, tiling: TilingChoice, on_host: bool) -> Iterator[Remedy]:
    """Yield sequence parallelism with as few ranks as are enough; if there are none, tensor parallelism instead."""
    training, hardware, best = plan.training, plan.hardware, None
    if training.tensor_parallel == 1:
        for size in sequence_sizes(plan.model, hardware):
            if size > training.sequence_parallel and (best is None or best.device > hardware.limit):
                shared = replace(plan, training=replace(training, sequence_parallel=size))
                best = Remedy(f"sequence_parallel_size {size}", _device_bytes(shared, candidate, tiling, on_host))
    if best is not None:
        yield best
    if training.sequence_parallel > 1 or training.expert_parallel > 1:
        return
    for size in range(training.tensor_parallel + 1, hardware.per_host + 1):
        if hardware.per_host % size:
            continue
        try:
            model = _cut(plan.model, size)
        except ConfigError:
            return  # a model without a plan
        cut = replace(plan, model=model, training=replace(training, tensor_parallel=size))
        device = _device_bytes(cut, candidate, tiling, on_host)
        if device <= hardware.limit:
            instead = f", instead of {best.what}" if best is not None else ""
            yield Remedy(f"tensor_parallel.autotp_size {size}{instead}", device)
            return


@lru_cache(maxsize=4)
def _cut(model: PlannedModel, size: int) -> PlannedModel:
    return model.cut(size)


def sequence_sizes(model: PlannedModel, hardware: Hardware) -> list[int]:
    """Return the numbers of ranks of one host that can share the model's sequences, from 1 up."""
    sizes = [1]
    for size in range(2, hardware.per_host + 1):
        try:
            model.check_shares(size)
        except ConfigError:
            continue
        sizes += [size] if hardware.per_host % size == 0 else []
    return sizes


def _device_bytes(plan: RankedPlans, candidate: Candidate, tiling: TilingChoice, on_host: bool) -> int:
    config = for_long_sequences(ds_config(candidate, plan.training), tiling, on_host=on_host)
    return Estimate.of(plan.model, plan.hardware, plan.training, candidate, config).memory.device_total


def show(plan: RankedPlans, *, everything: bool = False, console: Console | None = None) -> None:
    """Print the table, the reasons, the chosen config and how to start it.

    Args:
        everything: also show candidates that do not fit.
    """
    console = console or table_console()
    if not plan.fits:
        console.print(escape(what_else(plan)), soft_wrap=True)
    hidden = [each for each in plan.estimates if not everything and not each.fits]
    if len(hidden) < len(plan.estimates) or plan.yours:
        console.print(_table(plan, everything))
    if hidden:
        sizes = [f"{each.candidate.name} ({gigabytes(each.memory.device_total)})" for each in hidden]
        more, limit = "more " * (len(hidden) < len(plan.estimates)), gigabytes(plan.hardware.limit)
        text = f"{len(hidden)} {more}do not fit into {limit} per device and the host's memory (--all shows why): "
        console.print(f"[dim]{text}{escape(', '.join(sizes))}[/]", soft_wrap=True)
    for line in _reasons(plan, everything):
        console.print(escape(line), soft_wrap=True)
    for text in sums(plan):
        console.print(escape(text), soft_wrap=True)
    for note in plan.notes:
        console.print(f"[dim]note: {escape(note)}[/]", soft_wrap=True)
    if plan.chosen is not None:
        candidate = plan.chosen.candidate
        show_choice(console, candidate.name, plan.chosen.config, plan.chosen.training, candidate, plan.hardware)
        console.print(escape(chosen_batch(plan)), soft_wrap=True, end="\n" * plan.training.searches)


def show_choice(
    console: Console, name: str, config: dict[str, Any], training: Training, candidate: Candidate, hardware: Hardware
) -> None:
    console.print(f"\n[bold]{name}[/], ds.json:")
    console.print(escape(config_text(config)), soft_wrap=True)
    console.print(f"start the script with {escape(training.flags(candidate))}", soft_wrap=True)
    for words in training.more_words(hardware.ranks):
        console.print(escape(words), soft_wrap=True)


def _reasons(plan: RankedPlans, everything: bool) -> list[str]:
    """Return the lines of all candidates, or those of the user's config and of what fits, up to the chosen one."""
    lines, rows = reasoning(plan)[: len(plan.rows)], plan.rows
    if everything:
        return [*lines, *plan.refused]
    last = len(plan.yours) if plan.chosen is None else rows.index(plan.chosen) + 1
    return [line for each, line in zip(rows[:last], lines) if each.fits or each.candidate.is_given]


def config_text(config: dict[str, Any]) -> str:
    return json.dumps(config, indent=4)


def title(plan: RankedPlans) -> str:
    model, training = plan.model, plan.training
    total, num_trained = model.whole
    trained = "" if num_trained == total else f" ({num_trained / 1e6:,.1f}M trained)"
    parts = f" in {model.tensor_size} parts" if model.tensor_size > 1 else ""
    parts += f", experts over {model.expert_size} ranks" if model.expert_size > 1 else ""
    shared = {"tensor group": training.tensor_parallel, "sequence group": training.sequence_parallel}
    per = next((f"{kind} of {size} ranks" for kind, size in shared.items() if size > 1), "rank")
    batch = f"{training.micro_batch} x {training.accumulation} samples of {training.length} tokens per {per}"
    if training.searches:
        total_batch = "" if training.global_batch is None else f", {training.global_batch} per update"
        batch = f"samples of {training.length} tokens{total_batch}, the best batch per {per}"
    return (
        f"{model.name}: {total / 1e6:,.0f}M parameters{trained}{parts}, {training.precision}, {batch}, "
        f"{training.optimizer}, on {plan.hardware.name}"
    )


def new_table(title: str, *numbers: str) -> Table:
    """Return an empty table of candidates, with these columns of numbers."""
    table = Table(title=escape(title), title_justify="left")
    table.add_column("candidate")  # in a narrow terminal names wrap, numbers do not
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("bound by", no_wrap=True)
    return table


def titles(plan: RankedPlans) -> list[str]:
    """Return the titles of the columns between a candidate's name and what bounds its step."""
    names = ["device", "states", "activations", "host", "disk", "sent within", "across", "step", "tokens/s"]
    return ["batch"] * plan.training.searches + names


def _table(plan: RankedPlans, everything: bool) -> Table:
    table = new_table(title(plan), *titles(plan))
    for each in plan.rows:
        if not (everything or each.fits or each.candidate.is_given):
            continue
        style = "bold green" if each is plan.chosen else "" if each.fits else "dim"
        table.add_row(*cells(each, plan), style=style, end_section=each is plan.yours[-1] if plan.yours else False)
    return table


def cells(each: Estimate, plan: RankedPlans) -> tuple[str, ...]:
    """Return a candidate's name, its figures below `titles`, and what bounds its step."""
    memory = each.memory
    states = memory.device_total - memory.device.get("activations", 0)
    return (
        each.candidate.name,
        *[batch_of(each)] * plan.training.searches,
        gigabytes(memory.device_total),
        gigabytes(states),
        gigabytes(memory.device.get("activations", 0)),
        _or_dash(each.host_bytes),
        _or_dash(each.disk_bytes),
        _or_dash(each.traffic.within),
        _or_dash(each.traffic.across),
        f"{each.seconds:.2f} s" if each.seconds >= 0.1 else f"{each.seconds * 1e3:.1f} ms",
        f"{each.tokens_per_s:,.0f}",
        LANES[each.bound],
    )


def _or_dash(size: float) -> str:
    """Format a size such as 1.2 GB, or a dash for 0."""
    return gigabytes(size) if size >= 1 else "-"


def as_dict(plan: RankedPlans) -> dict[str, Any]:
    hardware, model = plan.hardware, plan.model
    training = plan.training if plan.chosen is None else plan.chosen.training
    return {
        "model": {
            "name": model.name,
            "parameters": model.whole[0],
            "trained": model.whole[1],
            "parameters_of_a_part": model.num_parameters,
            "layers": model.layers,
            "hidden": model.hidden,
        },
        "machine": {
            "name": hardware.name,
            "hosts": hardware.hosts,
            "devices_per_host": hardware.per_host,
            "device_memory": hardware.device_memory,
            "device_limit": hardware.limit,
            "host_memory": hardware.host_memory,
            "disk": hardware.disk,
        },
        "training": {
            "tokens_per_sample": training.length,
            "micro_batch": training.micro_batch,
            "accumulation": training.accumulation,
            "samples_per_update": training.samples(hardware.ranks),
            "batch_was_searched": plan.training.searches,
            "precision": training.precision,
            "optimizer": training.optimizer,
            "tensor_parallel": training.tensor_parallel,
            "sequence_parallel": training.sequence_parallel,
            "expert_parallel": training.expert_parallel,
            "data_ranks": training.data_ranks(hardware.ranks),
        },
        "yours": [_as_dict(each) for each in plan.yours],
        "candidates": [_as_dict(each) for each in plan.estimates],
        "chosen": None if plan.chosen is None else plan.chosen.candidate.name,
        "flags": None if plan.chosen is None else training.flags(plan.chosen.candidate),
        "needs": [] if plan.chosen is None else list(training.more_words(hardware.ranks)),
        "config": None if plan.chosen is None else plan.chosen.config,
        "reasons": reasoning(plan),
        "batch": chosen_batch(plan),
        "sums": list(sums(plan)),
        "notes": list(plan.notes),
    }


def _as_dict(each: Estimate) -> dict[str, Any]:
    candidate, memory = each.candidate, each.memory
    return {
        "name": candidate.name,
        "stage": candidate.stage,
        "offload_optimizer": candidate.optimizer,
        "offload_param": candidate.parameters,
        "streaming": candidate.streams,
        "offload_ratio": candidate.ratio,
        "gradient_checkpointing": candidate.checkpointing,
        "micro_batch": each.training.micro_batch,
        "accumulation": each.training.accumulation,
        "copy_per_host": candidate.copy_per_host,
        "second_shard": candidate.second_shard,
        "device": dict(memory.device),
        "host": dict(memory.host),
        "disk": dict(memory.disk),
        "device_total": memory.device_total,
        "host_total_of_a_host": each.host_bytes,
        "disk_total_of_a_host": each.disk_bytes,
        "traffic": {"within_hosts": each.traffic.within, "across_hosts": each.traffic.across},
        "step_seconds": each.seconds,
        "tokens_per_second": each.tokens_per_s,
        "flops_per_rank_and_step": each.flops,
        "bound_by": each.bound,
        "fits": each.fits,
        "lacks": list(each.lacks),
    }
