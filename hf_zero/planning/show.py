"""A plan for people at a terminal, and as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any, Protocol

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hf_zero.planning.choose import Estimate, Plan, gigabytes
from hf_zero.planning.event_model import LANES
from hf_zero.planning.reasons import reasoning

_WIDTH_IN_FILES = 150


def show(plan: Plan, *, everything: bool = False, console: Console | None = None) -> None:
    """The table, the reasons, the chosen config and how to start it.

    Args:
        everything: also candidates that do not fit.
    """
    console = console or Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH_IN_FILES)
    shown = len([each for each in plan.estimates if everything or each.fits])
    if plan.chosen is None:
        console.print(escape(reasoning(plan)[-1 - len(plan.refused)]), soft_wrap=True)
    if shown or plan.yours:
        console.print(_table(plan, everything))
    if shown < len(plan.estimates):
        console.print(f"[dim]{len(plan.estimates) - shown} more do not fit (--all shows them)[/]")
    for line in reasoning(plan) if everything else _short_reasons(plan):
        console.print(escape(line), soft_wrap=True)
    for note in plan.notes:
        console.print(f"[dim]note: {escape(note)}[/]", soft_wrap=True)
    if plan.chosen is not None:
        console.print(f"\n[bold]{plan.chosen.candidate.name}[/], ds.json:")
        console.print(escape(config_text(plan.chosen)), soft_wrap=True)
        console.print(f"start the script with {escape(plan.training.flags(plan.chosen.candidate))}", soft_wrap=True)
        for words in plan.training.more_words(plan.chosen.candidate, plan.hardware.ranks):
            console.print(escape(words), soft_wrap=True)


def _short_reasons(plan: Plan) -> list[str]:
    """The user's own, what came before the chosen one and did not fit, and the chosen one."""
    lines = reasoning(plan)
    if plan.chosen is None:
        return [*lines[: len(plan.yours)], lines[-1]]
    return lines[: plan.rows.index(plan.chosen) + 1]


class _HasConfig(Protocol):
    @property
    def config(self) -> dict[str, Any]: ...


def config_text(estimate: _HasConfig) -> str:
    return json.dumps(estimate.config, indent=4)


def title(plan: Plan) -> str:
    model, training = plan.model, plan.training
    total, num_trained = model.whole
    trained = "" if num_trained == total else f" ({num_trained / 1e6:,.1f}M trained)"
    parts = f" in {model.tensor_size} parts" if model.tensor_size > 1 else ""
    parts += f", experts over {model.expert_size} ranks" if model.expert_size > 1 else ""
    shared = {"tensor group": training.tensor_parallel, "sequence group": training.sequence_parallel}
    per = next((f"{kind} of {size} ranks" for kind, size in shared.items() if size > 1), "rank")
    return (
        f"{model.name}: {total / 1e6:,.0f}M parameters{trained}{parts}, {training.precision}, "
        f"{training.micro_batch} x {training.accumulation} samples of {training.length} tokens per {per}, "
        f"{training.optimizer}, on {plan.hardware.name}"
    )


def _table(plan: Plan, everything: bool) -> Table:
    table = Table(title=escape(title(plan)), title_justify="left")
    table.add_column("candidate")  # where it is narrow names wrap, and numbers are whole
    for name in ("device", "states", "activations", "host", "disk", "sent within", "across", "step", "tokens/s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("bound by", no_wrap=True)
    for each in plan.rows:
        if not (everything or each.fits or each.candidate.is_given):
            continue
        style = "bold green" if each is plan.chosen else "" if each.fits else "dim"
        table.add_row(*_cells(each, plan), style=style, end_section=each is plan.yours[-1] if plan.yours else False)
    return table


def _cells(each: Estimate, plan: Plan) -> tuple[str, ...]:
    memory, per_host = each.memory, plan.hardware.per_host
    states = memory.device_total - memory.device.get("activations", 0)
    return (
        each.candidate.name,
        gigabytes(memory.device_total),
        gigabytes(states),
        gigabytes(memory.device.get("activations", 0)),
        or_none(memory.host_total * per_host),
        or_none(memory.disk_total * per_host),
        or_none(each.traffic.within),
        or_none(each.traffic.across),
        f"{each.seconds:.2f} s" if each.seconds >= 0.1 else f"{each.seconds * 1e3:.1f} ms",
        f"{each.tokens_per_s(plan.training, plan.hardware.ranks):,.0f}",
        LANES[each.bound],
    )


def or_none(size: float) -> str:
    """1.2 GB, and a dash for nothing."""
    return gigabytes(size) if size >= 1 else "-"


def as_dict(plan: Plan) -> dict[str, Any]:
    """For programs: bytes, seconds."""
    hardware, training, model = plan.hardware, plan.training, plan.model
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
            "precision": training.precision,
            "optimizer": training.optimizer,
            "tensor_parallel": training.tensor_parallel,
            "sequence_parallel": training.sequence_parallel,
            "expert_parallel": training.expert_parallel,
            "data_ranks": training.data_ranks(hardware.ranks),
        },
        "yours": [_as_dict(each, plan) for each in plan.yours],
        "candidates": [_as_dict(each, plan) for each in plan.estimates],
        "chosen": None if plan.chosen is None else plan.chosen.candidate.name,
        "flags": None if plan.chosen is None else training.flags(plan.chosen.candidate),
        "needs": [] if plan.chosen is None else list(training.more_words(plan.chosen.candidate, hardware.ranks)),
        "config": None if plan.chosen is None else plan.chosen.config,
        "reasons": reasoning(plan),
        "notes": list(plan.notes),
    }


def _as_dict(each: Estimate, plan: Plan) -> dict[str, Any]:
    candidate, memory = each.candidate, each.memory
    return {
        "name": candidate.name,
        "stage": candidate.stage,
        "offload_optimizer": candidate.optimizer,
        "offload_param": candidate.parameters,
        "gradient_checkpointing": candidate.checkpointing,
        "copy_per_host": candidate.copy_per_host,
        "second_shard": candidate.second_shard,
        "device": dict(memory.device),
        "host": dict(memory.host),
        "disk": dict(memory.disk),
        "device_total": memory.device_total,
        "host_total_of_a_host": memory.host_total * plan.hardware.per_host,
        "disk_total_of_a_host": memory.disk_total * plan.hardware.per_host,
        "traffic": {"within_hosts": each.traffic.within, "across_hosts": each.traffic.across},
        "step_seconds": each.seconds,
        "tokens_per_second": each.tokens_per_s(plan.training, plan.hardware.ranks),
        "flops_per_rank_and_step": each.flops,
        "bound_by": each.bound,
        "fits": each.fits,
        "lacks": list(each.lacks),
    }
