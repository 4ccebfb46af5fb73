"""FLOPs, latency and parameters of every module in a forward pass, counted by torch's own counter.

Matrix products, convolutions and attention are counted, as in `torch.utils.flop_counter`, with two operations per
multiply-accumulate (MAC). Elementwise operations, norms and biases, a few per mille of a transformer's FLOPs, are not.
torch's counter finds the operations and adds up their FLOPs; this module has formulas for those that it lacks, and says
which modules run, whichever of them was called. Backward, and what it recomputes, is not counted. Names and arguments
are those of DeepSpeed's profiler.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.hooks import RemovableHandle
from torch.utils.module_tracker import ModuleTracker

from hf_zero.device.registry import clock_of
from hf_zero.device.runtime import HOST, Clock, Event
from hf_zero.log import logger
from hf_zero.profiling.breakdown import Breakdown

# Formatting of numbers, and means without outliers.

GIB = 1024**3
_SIZES = {"T": 1e12, "G": 1e9, "B": 1e9, "M": 1e6, "K": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6}


def trim_mean(data: Sequence[float], trim_percent: float) -> float:
    """The mean without the smallest and largest `trim_percent` (a fraction) of the values each; 0.0 without values."""
    assert 0.0 <= trim_percent <= 1.0
    cut = int(trim_percent * len(data))
    kept = sorted(data)[cut : len(data) - cut] or list(data)
    return fmean(kept) if kept else 0.0


def amount(num_bytes: float) -> str:
    """Format bytes with the largest fitting unit; units are powers of 1024, as in DeepSpeed: 1 MB is 1024 * 1024."""
    for unit in ("B", "KB", "MB", "GB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.2f} {unit}" if unit != "B" else f"{num_bytes:.0f} B"
        num_bytes /= 1024
    return f"{num_bytes:.2f} TB"


def number_to_string(
    num: float, units: str | None = None, precision: int = 2, *, unit: str = "", billions: str = "G"
) -> str:
    """Format a number: 3014656, of the unit "MACs" -> 3.01 MMACs.

    Args:
        units: the prefix T, G, M, K, none, m or u; None: the largest that fits, followed by `unit`.
        billions: the prefix for 1e9.
    """
    if units is not None:
        return f"{round(num / _SIZES.get(units, 1.0), precision):g} {units}".rstrip()
    prefixes = ("T", billions, "M", "K", "", "m", "u")
    prefix = next((each for each in prefixes if abs(num) >= _SIZES[each]), "u") if num else ""
    return f"{round(num / _SIZES[prefix], precision):g} {prefix}{unit}".rstrip()


def flops_to_string(flops: float, units: str | None = None, precision: int = 2) -> str:
    return number_to_string(flops, units, precision, unit="FLOPS")


def macs_to_string(macs: float, units: str | None = None, precision: int = 2) -> str:
    return number_to_string(macs, units, precision, unit="MACs")


def params_to_string(params_num: float, units: str | None = None, precision: int = 2) -> str:
    return number_to_string(params_num, units, precision, billions="B")


def _seconds(latency_s: float) -> str:
    return number_to_string(latency_s, unit="s")


def _rate(flops: float, seconds: float) -> str:
    return flops_to_string(flops / seconds) if seconds else "-"


# FLOPs of kernels that torch's counter lacks, from the shapes of their arguments, by their names in torch.ops.aten.

_Shape = Sequence[int]


def _product(first: _Shape, second: _Shape, *_: Any, **__: Any) -> int:
    return 2 * prod(first) * second[-1]


def _recurrent_layers(inputs: _Shape, weights: Sequence[_Shape], *_: Any, **__: Any) -> int:
    """A matrix for the input and one for the state at every position; biases are among the weights."""
    return 2 * prod(inputs[:-1]) * sum(prod(weight) for weight in weights if len(weight) == 2)


def _multi_head_attention(query: _Shape, key: _Shape, _value: _Shape, width: int, *_: Any, **__: Any) -> int:
    """`nn.MultiheadAttention` in one kernel: four projections, scores and weighted values."""
    batch, length, others = query[0], query[1], key[1]
    return 2 * batch * (2 * (length + others) * width**2 + 2 * length * others * width)


def _encoder_layer(source: _Shape, width: int, *args: Any, **options: Any) -> int:
    """`nn.TransformerEncoderLayer` in one kernel: attention and two linear layers."""
    inner: _Shape = args[12] if len(args) > 12 else options["ffn_weight_1"]
    return _multi_head_attention(source, source, source, width) + 4 * prod(source) * inner[0]


_LACKING: dict[str, Callable[..., int]] = {
    # Scores and weighted values, for all query heads.
    "_scaled_dot_product_flash_attention_for_cpu": lambda query, key, value, *_, **__: (
        2 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
    ),
    "mv": lambda matrix, *_, **__: 2 * prod(matrix),
    "addmv": lambda _added, matrix, *_, **__: 2 * prod(matrix),
    "dot": lambda first, *_, **__: 2 * prod(first),
    "_int_mm": _product,
    # Groups of rows (2-D, 3-D), batches (3-D, 3-D), or sums over groups of columns (2-D, 2-D).
    "_grouped_mm": _product,
    # nn.Bilinear, [..., in_1] and [out, in_1, in_2]: products with the weight, then with the other input.
    "_trilinear": lambda first, weight, *_, **__: 2 * prod(first[:-1]) * weight[0] * (weight[1] + 1) * weight[2],
    "mkldnn_rnn_layer": lambda inputs, *weights, **__: _recurrent_layers(inputs, weights[:2]),
    "_cudnn_rnn": _recurrent_layers,
    "miopen_rnn": _recurrent_layers,
    "_native_multi_head_attention": _multi_head_attention,
    "_transformer_encoder_layer_fwd": _encoder_layer,
}
FORMULAS: dict[Any, Callable[..., int]] = {
    getattr(torch.ops.aten, name): formula for name, formula in _LACKING.items() if hasattr(torch.ops.aten, name)
}


def _path(name: str) -> list[str]:
    """The names of the model, of every module around one, and of that one: "a.b" -> "", "a", "a.b"."""
    parts = name.split(".") if name else []
    return [".".join(parts[:length]) for length in range(len(parts) + 1)]


class CalledModules:
    """Tells torch's counter which modules run, in place of its ModuleTracker, and marks begin and end of every call.

    ModuleTracker names modules from the outermost one that is called, and counts backward for them, too.

    Attributes:
        names: of all modules of the model.
        left_out: names of modules that are excluded, with all in them.
        calls: begin and end of every completed call.
    """

    is_bw: Any = ModuleTracker.is_bw  # whether a backward is running

    def __init__(self, model: nn.Module, clock: Clock, ignored: tuple[type, ...] = ()) -> None:
        self.names = {module: name for name, module in model.named_modules()}
        self.left_out = {name for module, name in self.names.items() if name and isinstance(module, ignored)}
        self.calls: defaultdict[nn.Module, list[tuple[Event, Event]]] = defaultdict(list)
        self._clock = clock
        self._open: list[tuple[nn.Module, Event]] = []  # calls that run, the outermost first
        self._hooks: list[RemovableHandle] = []

    @property
    def parents(self) -> set[str]:
        """Names of the modules that run, and of those that contain the outermost of them; of none in backward."""
        if self.is_bw or not self._open:
            return set()
        names = [self.names[module] for module, _ in self._open]
        running = {*_path(names[0]), *names}
        return set() if running & self.left_out else running

    def __enter__(self) -> None:
        for module in self.names:
            self._hooks.append(module.register_forward_pre_hook(self._begin))
            self._hooks.append(module.register_forward_hook(self._end, always_call=True))

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _begin(self, module: nn.Module, _inputs: Any) -> None:
        if not self.is_bw:  # not what a checkpoint recomputes
            self._open.append((module, self._clock.mark()))

    def _end(self, module: nn.Module, _inputs: Any, _output: Any) -> None:
        if self._open and not self.is_bw:
            _, begin = self._open.pop()
            self.calls[module].append((begin, self._clock.mark()))

    def took_ns(self, module: nn.Module) -> int:
        """Time of all calls; if there are none, of those of its submodules. The marks have passed."""
        if module not in self.calls:
            return sum(self.took_ns(child) for child in module.children())
        return sum(self._clock.elapsed_ns(begin, end) for begin, end in self.calls[module])


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleProfile:
    """The profile of one module, including its submodules."""

    name: str  # qualified name; "" for the model itself
    class_name: str
    params: int
    flops: int
    latency_s: float
    describes: str = ""  # its extra_repr, if it has no submodules

    @property
    def macs(self) -> int:
        return self.flops // 2

    @property
    def depth(self) -> int:
        return len(_path(self.name)) - 1


class FlopsProfiler:
    """Counts FLOPs between `start_profile` and `stop_profile`. Modules are timed by events, without synchronization.

    Attributes:
        flops, macs, params: totals of the last printed profile.
    """

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        """`recompute_fwd_factor`: number of forwards that backward recomputes."""
        self.model = model
        self.ds_engine = ds_engine
        self.recompute_fwd_factor = recompute_fwd_factor
        self.started = self._is_counting = False
        self.flops = self.macs = self.params = 0
        parameter = next(model.parameters(), None)
        self._clock = clock_of(HOST if parameter is None else parameter.device)
        self._prepare()

    def _prepare(self, ignored: Iterable[type] = ()) -> None:
        self._called = CalledModules(self.model, self._clock, tuple(ignored))
        self._counter = FlopCounterMode(display=False, custom_mapping=FORMULAS)
        self._counter.mod_tracker = self._called  # type: ignore[assignment]

    def start_profile(self, ignore_list: Iterable[type] | None = None) -> None:
        """Start counting from zero.

        Args:
            ignore_list: module classes to exclude, with their FLOPs, from the report.
        """
        self._stop()
        self._prepare(ignore_list or ())
        self._counter.__enter__()
        self.started = self._is_counting = True

    def stop_profile(self) -> None:
        """Stop counting and keep the counts; removes all hooks."""
        if self._stop() and num_parameters(self.model) and not self._flops_of(""):
            logger.warning(
                "the flops profiler has counted no operation of %s: none of its modules was called between "
                "start_profile and stop_profile, or their operations are none that torch's counter knows",
                type(self.model).__name__,
            )

    def _stop(self) -> bool:
        """Return whether it was counting."""
        was_counting, self._is_counting = self._is_counting, False
        if was_counting:
            self._counter.__exit__(None, None, None)
        return was_counting

    def reset_profile(self) -> None:
        self._counter.flop_counts.clear()
        self._called.calls.clear()

    def end_profile(self) -> None:
        self.stop_profile()
        self.reset_profile()
        self.started = False

    # Results

    def modules(self) -> list[ModuleProfile]:
        """Profiles of all modules except ignored ones, in the model's order. Waits for the device."""
        self._clock.synchronize()
        return [
            ModuleProfile(
                name=name,
                class_name=type(module).__name__,
                params=num_parameters(module),
                flops=self._flops_of(name),
                latency_s=self._called.took_ns(module) / 1e9,
                describes="" if list(module.children()) else module.extra_repr(),
            )
            for module, name in self._called.names.items()
            if self._called.left_out.isdisjoint(_path(name))
        ]

    def _flops_of(self, name: str) -> int:
        return sum(self._counter.get_flop_counts().get(name, {}).values())

    def get_total_flops(self, as_string: bool = False) -> Any:
        return (flops_to_string if as_string else int)(self._flops_of(""))

    def get_total_macs(self, as_string: bool = False) -> Any:
        return (macs_to_string if as_string else int)(self._flops_of("") // 2)

    def get_total_duration(self, as_string: bool = False) -> Any:
        """Duration of the forwards in seconds."""
        return (_seconds if as_string else float)(self.modules()[0].latency_s)

    def get_total_params(self, as_string: bool = False) -> Any:
        return (params_to_string if as_string else int)(num_parameters(self.model))

    # Reports

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
        times: Breakdown | None = None,
    ) -> None:
        """Write the report to a file or to standard output, if profiling was started.

        Args:
            times: of the profiled update, if the engine measured them.
        """
        if not self.started:
            return
        modules = self.modules()
        self.flops, self.macs, self.params = modules[0].flops, modules[0].macs, modules[0].params
        title = f"{'-' * 25} hf_zero Flops Profiler {'-' * 25}"
        lines = [title, f"Profile Summary at step {profile_step}:", _NOTATION, ""]
        figures = summary(modules[0], self.recompute_fwd_factor, self.ds_engine, times)
        lines += [f"{label:<70}{value}" for label, value in figures]
        lines += ["", *aggregated(modules, module_depth, top_modules)]
        if detailed:
            lines += ["", *_tree(modules)]
        _write([*lines, "-" * len(title)], output_file)

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Print only the table of the top modules."""
        if self.started:
            _write(aggregated(self.modules(), module_depth, top_modules), None)


def num_parameters(module: nn.Module) -> int:
    """The number of elements of a module's full parameters, even if this rank only has shards."""
    return sum(int(getattr(parameter, "ds_numel", parameter.numel())) for parameter in module.parameters())


def get_model_profile(
    model: nn.Module,
    input_shape: Sequence[int] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Iterable[type] | None = None,
    mode: str = "forward",
) -> tuple[Any, Any, Any]:
    """(flops, macs, params) of one forward of `model`, which is left in eval mode.

    Args:
        input_shape: shape of a single input tensor, instead of `args`.
        warm_up: number of forwards before the profiled one.
        mode: "forward", or "generate" for model.generate.

    Raises:
        AssertionError: without input_shape, args and kwargs, or for another mode.
    """
    assert mode in ("forward", "generate"), f"mode must be forward or generate, not {mode!r}"
    assert input_shape is not None or args or kwargs, "give the model's input: input_shape, args or kwargs"
    if input_shape is not None:
        example = next(model.parameters())
        args = [torch.ones(tuple(input_shape), dtype=example.dtype, device=example.device)]
    model.eval()
    run: Any = model if mode == "forward" else model.generate
    profiler = FlopsProfiler(model)
    with torch.no_grad():
        for _ in range(warm_up):
            run(*args, **(kwargs or {}))
        profiler.start_profile(ignore_modules)
        try:
            run(*args, **(kwargs or {}))
        finally:
            profiler.stop_profile()
    if print_profile:
        profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
    totals = (profiler.get_total_flops, profiler.get_total_macs, profiler.get_total_params)
    flops, macs, params = (total(as_string) for total in totals)
    profiler.end_profile()
    return flops, macs, params


def _write(lines: Iterable[str], output_file: str | None) -> None:
    text = "\n".join(lines) + "\n"
    if output_file:
        path = Path(output_file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)
        sys.stdout.flush()


# The report: a summary, the top modules of every depth, the tree of all modules.

_NOTATION = """Notation:
params: number of parameters
macs: multiply-accumulates; flops: floating-point operations, 2 per MAC (matrix products, convolutions, attention)
fwd, bwd: forward, backward; latency: duration of a module's forward in seconds
FLOPS: flops per second"""
# Title in the table -> (in the tree, attribute of a ModuleProfile, format).
_QUANTITIES: dict[str, tuple[str, str, Callable[[float], str]]] = {
    "params": ("Params", "params", params_to_string),
    "MACs": ("MACs", "macs", macs_to_string),
    "fwd latency": ("latency", "latency_s", _seconds),
}


def summary(
    model: ModuleProfile, recomputed: float, engine: Any = None, times: Breakdown | None = None
) -> Iterator[tuple[str, str]]:
    """Labels and values of the model, and of the update whose forward was profiled, with all its micro-batches.

    Args:
        recomputed: backward takes 2 + this forwards.
        engine: the engine that ran the update, if any.
        times: of the update, if they were measured.
    """
    samples, micro_batch_size, num_forwards = (0, 0, 1) if engine is None else engine.settings.get_batch_info()
    if engine is not None:
        yield "world size:", str(engine.groups.world.size)
        yield "data parallel size:", str(engine.groups.world.size)
        yield "model parallel size:", "1"
        yield "batch size per GPU:", str(micro_batch_size)
        yield "gradient accumulation steps:", str(num_forwards)
    yield "params of model:", params_to_string(model.params)
    yield "fwd MACs per GPU:", macs_to_string(model.macs)
    yield "fwd flops per GPU:", number_to_string(model.flops)
    yield "fwd latency:", _seconds(model.latency_s)
    yield "fwd FLOPS per GPU = fwd flops per GPU / fwd latency:", _rate(model.flops, model.latency_s)
    if times is None:
        return
    forward_s, backward_s, step_s = (times.timers[name] / 1e3 for name in ("fwd", "bwd", "step"))
    total_s, forward, backward = times.total / 1e3, model.flops * num_forwards, 2 + recomputed
    flops = forward * (1 + backward)
    yield "bwd latency, all micro-batches:", _seconds(backward_s)
    yield f"bwd FLOPS per GPU = {backward:g} * fwd flops / bwd latency:", _rate(forward * backward, backward_s)
    yield "fwd+bwd FLOPS per GPU:", _rate(flops, forward_s + backward_s)
    yield "step latency:", _seconds(step_s)
    yield "iter latency, from update to update:", _seconds(total_s)
    yield f"FLOPS per GPU = {1 + backward:g} * fwd flops / iter latency:", _rate(flops, total_s)
    yield "samples/second, all ranks:", f"{samples / total_s:.2f}" if total_s else "-"


def aggregated(modules: Sequence[ModuleProfile], depth: int, top: int) -> list[str]:
    """Format the `top` classes in params, MACs and latency for each depth down to `depth` (-1: all)."""
    lines = [f"{'-' * 20} Aggregated Profile per GPU {'-' * 20}", f"Top {top} modules in params, MACs and fwd latency:"]
    for level in sorted({module.depth for module in modules if depth < 0 or module.depth <= depth}):
        lines.append(f"depth {level}:")
        for label, (_, attribute, shown) in _QUANTITIES.items():
            sums: Counter[str] = Counter()
            for module in modules:
                if module.depth == level:
                    sums[module.class_name] += getattr(module, attribute)
            ranked = ", ".join(f"{name!r}: {shown(value)!r}" for name, value in sums.most_common(top))
            lines.append(f"    {label:<12}- {{{ranked}}}")
    return lines


def _tree(modules: Sequence[ModuleProfile]) -> list[str]:
    """Format the tree of all modules, each with its numbers and their shares of the model's."""
    lines = [f"{'-' * 22} Detailed Profile per GPU {'-' * 22}"]
    for module in modules:
        numbers = []
        for label, attribute, shown in _QUANTITIES.values():
            part, whole = getattr(module, attribute), getattr(modules[0], attribute)
            numbers.append(f"{shown(part)} = {f'{part / whole:.2%}' if whole else '0%'} {label}")
        numbers += [_rate(module.flops, module.latency_s), *([module.describes] if module.describes else [])]
        label = module.name.rpartition(".")[2]
        own = f"({label}): {module.class_name}" if label else module.class_name
        lines.append(f"{'  ' * module.depth}{own}({', '.join(numbers)})")
    return lines
