"""FLOPs, latency and parameters of every module in a forward pass, counted by torch's own counter.

Matrix products, convolutions and attention are counted, as in `torch.utils.flop_counter`, with two operations per
multiply-accumulate (MAC). Elementwise operations, norms and biases, a few per mille of a transformer's FLOPs, are not.
torch's counter finds the operations; this module has formulas for those that it lacks, and attributes them to the
modules that run, whichever of them was called. Backward, and what it recomputes, is not counted. Names and arguments
are those of DeepSpeed's profiler.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry, shape_wrapper

from hf_zero.device.registry import clock_of
from hf_zero.device.runtime import HOST, Event
from hf_zero.log import logger

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


def number_to_string(num: float, units: str | None = None, precision: int = 2) -> str:
    """Format a number with the unit T, G, M, K, none, m or u: the given one, or the largest that fits."""
    if units is None:
        return scaled(num, "", precision=precision)
    return f"{round(num / _SIZES.get(units, 1.0), precision):g} {units}".rstrip()


def flops_to_string(flops: float, units: str | None = None, precision: int = 2) -> str:
    return scaled(flops, "FLOPS", precision=precision) if units is None else number_to_string(flops, units, precision)


def macs_to_string(macs: float, units: str | None = None, precision: int = 2) -> str:
    return scaled(macs, "MACs", precision=precision) if units is None else number_to_string(macs, units, precision)


def params_to_string(params_num: float, units: str | None = None, precision: int = 2) -> str:
    if units is None:
        return scaled(params_num, "", precision=precision, billions="B")
    return number_to_string(params_num, units, precision)


def scaled(number: float, unit: str, *, precision: int = 2, billions: str = "G") -> str:
    """Format a number with a unit: 3014656, "MACs" -> 3.01 MMACs. `billions` is the prefix for 1e9."""
    if not number:
        return f"0 {unit}".rstrip()
    letter = next((each for each in ("T", billions, "M", "K", "", "m") if abs(number) >= _SIZES[each]), "u")
    return f"{round(number / _SIZES[letter], precision):g} {letter}{unit}".rstrip()


def _attention_on_cpu(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], *_args: Any, **_options: Any
) -> int:
    """FLOPs of an attention kernel that torch's counter lacks: Q K^T and the product with V, for all query heads."""
    batch, heads, length, dim = query
    return 2 * batch * heads * length * key[-2] * (dim + value[-1])


def _matrix_vector(matrix: Sequence[int], *_args: Any, **_options: Any) -> int:
    return 2 * prod(matrix)


def _added_matrix_vector(_added: Sequence[int], matrix: Sequence[int], *_args: Any, **_options: Any) -> int:
    return 2 * prod(matrix)


def _dot(first: Sequence[int], *_args: Any, **_options: Any) -> int:
    return 2 * prod(first)


def _int_product(first: Sequence[int], second: Sequence[int], *_args: Any, **_options: Any) -> int:
    return 2 * prod(first) * second[-1]


def _grouped_product(first: Sequence[int], second: Sequence[int], *_args: Any, **_options: Any) -> int:
    """Products of groups of rows (2-D, 3-D), of batches (3-D, 3-D), or sums over groups of columns (2-D, 2-D)."""
    return 2 * prod(first) * second[-1]


def _trilinear(first: Sequence[int], weight: Sequence[int], *_args: Any, **_options: Any) -> int:
    """FLOPs of `nn.Bilinear`: [..., in_1], [out, in_1, in_2]; products with the weight and the other input."""
    out, in_1, in_2 = weight
    return 2 * prod(first[:-1]) * out * (in_1 * in_2 + in_2)


def _recurrent_layer(
    inputs: Sequence[int], in_weight: Sequence[int], state_weight: Sequence[int], *_args: Any, **_options: Any
) -> int:
    """FLOPs of one layer of an LSTM in one direction: two matrices for every position."""
    return 2 * prod(inputs[:-1]) * (prod(in_weight) + prod(state_weight))


def _recurrent_layers(inputs: Sequence[int], weights: Sequence[Sequence[int]], *_args: Any, **_options: Any) -> int:
    """FLOPs of a whole recurrent network, whose biases are among the weights."""
    return 2 * prod(inputs[:-1]) * sum(prod(weight) for weight in weights if len(weight) == 2)


def _multi_head_attention(
    query: Sequence[int], key: Sequence[int], _value: Sequence[int], width: int, *_args: Any, **_options: Any
) -> int:
    """FLOPs of `nn.MultiheadAttention` in one kernel: four projections, scores and weighted values."""
    batch, length, others = query[0], query[1], key[1]
    return 2 * batch * (2 * (length + others) * width**2 + 2 * length * others * width)


def _encoder_layer(source: Sequence[int], width: int, *args: Any, **options: Any) -> int:
    """FLOPs of `nn.TransformerEncoderLayer` in one kernel: attention and two linear layers."""
    inner: Sequence[int] = args[12] if len(args) > 12 else options["ffn_weight_1"]
    return _multi_head_attention(source, source, source, width) + 4 * prod(source) * inner[0]


_LACKING: dict[str, Callable[..., int]] = {  # by the name in torch.ops.aten
    "_scaled_dot_product_flash_attention_for_cpu": _attention_on_cpu,
    "mv": _matrix_vector,
    "addmv": _added_matrix_vector,
    "dot": _dot,
    "_int_mm": _int_product,
    "_grouped_mm": _grouped_product,
    "_trilinear": _trilinear,
    "mkldnn_rnn_layer": _recurrent_layer,
    "_cudnn_rnn": _recurrent_layers,
    "miopen_rnn": _recurrent_layers,
    "_native_multi_head_attention": _multi_head_attention,
    "_transformer_encoder_layer_fwd": _encoder_layer,
}
CUSTOM_MAPPING: dict[Any, Any] = {
    getattr(torch.ops.aten, name): formula for name, formula in _LACKING.items() if hasattr(torch.ops.aten, name)
}


def flop_counter(note: Callable[[int], object]) -> FlopCounterMode:
    """torch's FLOP counter with more formulas, which passes the FLOPs of every operation in forward to `note`."""

    def noting(formula: Callable[..., int]) -> Callable[..., int]:
        def count(*args: Any, **options: Any) -> int:
            flops = formula(*args, **options)
            if not _in_backward():
                note(flops)
            return flops

        count._get_raw = True  # type: ignore[attr-defined]  # the formula itself takes tensors
        return count

    formulas = {**flop_registry, **{operation: shape_wrapper(formula) for operation, formula in CUSTOM_MAPPING.items()}}
    return FlopCounterMode(display=False, custom_mapping={key: noting(formula) for key, formula in formulas.items()})


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


@dataclass(slots=True)
class _Latency:
    """Begin and end marks of one module's calls."""

    begins: list[Event] = field(default_factory=list)
    ends: list[Event] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Whether the module was called."""
        return bool(self.begins)


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
        self.started = False
        parameter = next(model.parameters(), None)
        self._clock = clock_of(HOST if parameter is None else parameter.device)
        self.flops = self.macs = self.params = 0
        self._counts: Counter[nn.Module] = Counter()  # FLOPs of a module and of all in it
        self._called: list[nn.Module] = []  # the modules that run, the outermost first
        self._names = {module: name for name, module in model.named_modules()}
        self._latencies: dict[nn.Module, _Latency] = {}
        self._ignored: tuple[type, ...] = ()
        self._running = ExitStack()  # the hooks and the counter
        self._counter: FlopCounterMode | None = None

    def start_profile(self, ignore_list: Iterable[type] | None = None) -> None:
        """Start counting from zero.

        Args:
            ignore_list: module classes to exclude, with their FLOPs, from the report.
        """
        self._running.close()
        self.started = True
        self._ignored = tuple(ignore_list or ())
        self.reset_profile()
        for module in self._names:
            self._running.callback(module.register_forward_pre_hook(self._before).remove)
            self._running.callback(module.register_forward_hook(self._after, always_call=True).remove)
        self._counter = self._running.enter_context(flop_counter(self._note))

    def stop_profile(self) -> None:
        """Stop counting and keep the counts; removes all hooks."""
        if self._counter is not None:
            self._running.close()
            self._counter = None
            if num_parameters(self.model) and not self._counts[self.model]:
                logger.warning(
                    "the flops profiler has counted no operation of %s: none of its modules was called between "
                    "start_profile and stop_profile, or their operations are none that torch's counter knows",
                    type(self.model).__name__,
                )

    def reset_profile(self) -> None:
        self._counts, self._called = Counter(), []
        self._latencies = {module: _Latency() for module in self._names}

    def end_profile(self) -> None:
        self.stop_profile()
        self.reset_profile()
        self.started = False

    def _before(self, module: nn.Module, _inputs: Any) -> None:
        if not _in_backward():  # not what a checkpoint recomputes
            self._called.append(module)
            self._latencies[module].begins.append(self._clock.mark())

    def _after(self, module: nn.Module, _inputs: Any, _output: Any) -> None:
        if self._called and not _in_backward():
            self._latencies[module].ends.append(self._clock.mark())
            self._called.pop()

    def _note(self, flops: int) -> None:
        """Count FLOPs for the modules that run, and for those that contain the outermost of them."""
        if self._called:
            for module in {*self._called, *self._around(self._called[0])}:
                self._counts[module] += flops

    def _around(self, module: nn.Module) -> Iterator[nn.Module]:
        name = self._names[module]
        while name:
            name = name.rpartition(".")[0]
            yield self.model.get_submodule(name)

    # Results

    def modules(self) -> list[ModuleProfile]:
        """Profiles of all modules except ignored ones, in the model's order. Waits for the device."""
        self._clock.synchronize()
        left_out = [name for module, name in self._names.items() if self._ignored and isinstance(module, self._ignored)]
        return [
            self._profile_of(module, name, left_out)
            for module, name in self._names.items()
            if not any(name == out or name.startswith(f"{out}.") for out in left_out)
        ]

    def _profile_of(self, module: nn.Module, name: str, left_out: Sequence[str]) -> ModuleProfile:
        inside = [out for out in left_out if not name or out.startswith(f"{name}.")]
        flops = self._counts[module] - sum(self._counts[self.model.get_submodule(out)] for out in inside)
        return ModuleProfile(
            name=name,
            class_name=type(module).__name__,
            depth=name.count(".") + 1 if name else 0,
            params=num_parameters(module),
            flops=flops,
            macs=flops // 2,
            latency_s=self._took_ns(module) / 1e9,
            describes=module.extra_repr() if not list(module.children()) else "",
        )

    def _took_ns(self, module: nn.Module) -> int:
        if not self._latencies.get(module):
            return sum(self._took_ns(child) for child in module.children())
        times = self._latencies[module]
        return sum(self._clock.elapsed_ns(begin, end) for begin, end in zip(times.begins, times.ends))

    def get_total_flops(self, as_string: bool = False) -> Any:
        total = self.modules()[0].flops
        return scaled(total, "FLOPS") if as_string else total

    def get_total_macs(self, as_string: bool = False) -> Any:
        total = self.modules()[0].macs
        return scaled(total, "MACs") if as_string else total

    def get_total_duration(self, as_string: bool = False) -> Any:
        """Duration of the forwards in seconds."""
        total = self.modules()[0].latency_s
        return scaled(total, "s") if as_string else total

    def get_total_params(self, as_string: bool = False) -> Any:
        total = num_parameters(self.model)
        return scaled(total, "", billions="B") if as_string else total

    # Reports

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
        times: EngineTimes | None = None,
    ) -> None:
        """Write the report to a file or to standard output, if profiling was started.

        Args:
            times: times of the profiled update, if an engine ran it.
        """
        if not self.started:
            return
        modules = self.modules()
        self.flops, self.macs, self.params = modules[0].flops, modules[0].macs, modules[0].params
        text = report(
            modules,
            profile_step,
            times,
            self.recompute_fwd_factor,
            depth=module_depth,
            top=top_modules,
            detailed=detailed,
        )
        _write(text, output_file)

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Print only the table of the top modules."""
        if self.started:
            _write("\n".join(aggregated(self.modules(), module_depth, top_modules)), None)


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
        profiler.print_model_profile(
            profile_step=warm_up,
            module_depth=module_depth,
            top_modules=top_modules,
            detailed=detailed,
            output_file=output_file,
        )
    profile = (
        profiler.get_total_flops(as_string),
        profiler.get_total_macs(as_string),
        profiler.get_total_params(as_string),
    )
    profiler.end_profile()
    return profile


def _write(text: str, output_file: str | None) -> None:
    if output_file:
        path = Path(output_file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    else:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


# The flops profiler's report: a summary, the top modules of every depth, the tree of all modules.


_LABEL, _VALUE = 70, 8
_NOTATION = """Notation:
params: number of parameters
macs: multiply-accumulates; flops: floating-point operations, 2 per MAC (matrix products, convolutions, attention)
fwd, bwd: forward, backward; latency: duration of a module's forward in seconds
FLOPS: flops per second"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleProfile:
    """The profile of one module, including its submodules."""

    name: str  # qualified name; "" for the model itself
    class_name: str
    depth: int
    params: int
    flops: int
    macs: int
    latency_s: float
    describes: str = ""  # its extra_repr, if it has no submodules


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTimes:
    """Times of the update whose forward was profiled, summed over its micro-batches.

    Attributes:
        samples: number of samples of the update over all ranks.
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
    """Format the full report. `modules`: in pre-order, with the model first."""
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
    forward = model.flops * times.accumulation_steps
    backward_flops, all_flops = (2 + recomputed) * forward, (3 + recomputed) * forward
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
    """Format the `top` classes in params, MACs and latency for each depth down to `depth` (-1: all)."""
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
    """Format the tree of all modules, each with its numbers and their shares of the model's."""
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
