"""The flops profiler's report: a summary, the top modules of every depth, the tree of all modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hf_zero.profiling.numbers import scaled

_LABEL, _VALUE = 70, 8
_NOTATION = """Notation:
params: number of parameters
macs: multiply-accumulates; flops: floating-point operations, 2 per MAC (matrix products, convolutions, attention)
fwd, bwd: forward, backward; latency: seconds from begin to end of a module's forward
FLOPS: flops per second"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleProfile:
    """One module with everything in it."""

    name: str  # in the model; "" for the model itself
    class_name: str
    depth: int
    params: int
    flops: int
    macs: int
    latency_s: float
    describes: str = ""  # its own arguments, where nothing is in it


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTimes:
    """Of the update whose forward was profiled, all its micro-batches together.

    Attributes:
        samples: of the update, over all ranks.
    """

    world: int
    micro_batch_size: int
    accumulation_steps: int
    samples: int
    forward_s: float
    backward_s: float
    step_s: float
    total_s: float


def report(
    modules: Sequence[ModuleProfile],
    step: int,
    times: EngineTimes | None,
    recomputed: float,
    *,
    depth: int,
    top: int,
    detailed: bool,
) -> str:
    """All of it, as text. `modules`: the model first, then each module before what is in it."""
    title = f"{'-' * 25} hf_zero Flops Profiler {'-' * 25}"
    lines = [title, f"Profile Summary at step {step}:", _NOTATION, ""]
    summary = _summary(modules[0], times, recomputed)
    lines += [f"{label:<{_LABEL}}{value:<{_VALUE}}".rstrip() for label, value in summary]
    lines += ["", *aggregated(modules, depth, top)]
    if detailed:
        lines += ["", *_tree(modules)]
    return "\n".join([*lines, "-" * len(title)])


def _summary(model: ModuleProfile, times: EngineTimes | None, recomputed: float) -> Iterator[tuple[str, str]]:
    if times is not None:
        yield "world size:", str(times.world)
        yield "data parallel size:", str(times.world)
        yield "model parallel size:", "1"
        yield "batch size per GPU:", str(times.micro_batch_size)
        yield "gradient accumulation steps:", str(times.accumulation_steps)
    yield "params of model:", scaled(model.params, "", billions="B")
    yield "fwd MACs per GPU:", scaled(model.macs, "MACs")
    yield "fwd flops per GPU:", scaled(model.flops, "")
    yield "fwd latency:", scaled(model.latency_s, "s")
    yield "fwd FLOPS per GPU = fwd flops per GPU / fwd latency:", _rate(model.flops, model.latency_s)
    if times is None:
        return
    forward, backward = model.flops * times.accumulation_steps, model.flops * times.accumulation_steps
    backward_flops, all_flops = (2 + recomputed) * backward, (3 + recomputed) * forward
    yield "bwd latency, all micro-batches:", scaled(times.backward_s, "s")
    label = f"bwd FLOPS per GPU = {2 + recomputed:g} * fwd flops / bwd latency:"
    yield label, _rate(backward_flops, times.backward_s)
    yield "fwd+bwd FLOPS per GPU:", _rate(all_flops, times.forward_s + times.backward_s)
    yield "step latency:", scaled(times.step_s, "s")
    yield "iter latency, from update to update:", scaled(times.total_s, "s")
    yield f"FLOPS per GPU = {3 + recomputed:g} * fwd flops / iter latency:", _rate(all_flops, times.total_s)
    yield "samples/second, all ranks:", f"{times.samples / times.total_s:.2f}" if times.total_s else "-"


def _rate(flops: float, seconds: float) -> str:
    return scaled(flops / seconds, "FLOPS") if seconds else "-"


def aggregated(modules: Sequence[ModuleProfile], depth: int, top: int) -> list[str]:
    """Per depth, down to `depth` (-1: all), the classes with most params, MACs and latency."""
    deepest = max(module.depth for module in modules)
    last = deepest if depth < 0 else min(depth, deepest)
    quantities: dict[str, tuple[Callable[[ModuleProfile], float], Callable[[float], str]]] = {
        "params": (lambda module: module.params, lambda value: scaled(value, "", billions="B")),
        "MACs": (lambda module: module.macs, lambda value: scaled(value, "MACs")),
        "fwd latency": (lambda module: module.latency_s, lambda value: scaled(value, "s")),
    }
    lines = [f"{'-' * 20} Aggregated Profile per GPU {'-' * 20}", f"Top {top} modules in params, MACs and fwd latency:"]
    for level in range(last + 1):
        lines.append(f"depth {level}:")
        for label, (quantity, shown) in quantities.items():
            sums: dict[str, float] = {}
            for module in modules:
                if module.depth == level:
                    sums[module.class_name] = sums.get(module.class_name, 0) + quantity(module)
            ranked = sorted(sums.items(), key=lambda entry: -entry[1])[:top]
            lines.append(f"    {label:<12}- {{{', '.join(f'{name!r}: {shown(value)!r}' for name, value in ranked)}}}")
    return lines


def _tree(modules: Sequence[ModuleProfile]) -> list[str]:
    """Every module with its numbers and their share of the model's."""
    whole = modules[0]
    lines = [f"{'-' * 22} Detailed Profile per GPU {'-' * 22}"]
    for module in modules:
        numbers = [
            f"{scaled(module.params, '', billions='B')} = {_share(module.params, whole.params)} Params",
            f"{scaled(module.macs, 'MACs')} = {_share(module.macs, whole.macs)} MACs",
            f"{scaled(module.latency_s, 's')} = {_share(module.latency_s, whole.latency_s)} latency",
            _rate(module.flops, module.latency_s),
        ]
        label = module.name.rpartition(".")[2]
        own = f"({label}): {module.class_name}" if label else module.class_name
        lines.append(f"{'  ' * module.depth}{own}({', '.join([*numbers, module.describes]).rstrip(', ')})")
    return lines


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.2%}" if whole else "0%"
