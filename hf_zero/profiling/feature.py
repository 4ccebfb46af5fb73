"""All profiling that a config enables, as one training feature. It only observes training.

    wall_clock_breakdown    WallClock       listens to the recorder
    comms_logger            CommsLog        listens to the recorder
    hf_zero.trace           TraceFile       listens to the recorder
    flops_profiler          FlopsProfiler   around the forward of one update
    memory_breakdown        MemoryLog       observes the engine's phases
    tensorboard, ...        Monitors        receive the metrics of every update
    dump_state              once, when the engine is complete

`see_memory_usage` logs memory of the device, the process and the machine with DeepSpeed's labels. `RunEvents` sends the
metrics of every update to monitors under DeepSpeed's names; `ThroughputLog` logs samples per second. A loss on an
accelerator is written when its copy to the host has completed, one or two updates later, without synchronization.
The x axis of monitors is the number of samples seen so far.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from hf_zero.comm import local_device, watching_collectives
from hf_zero.config import Resolved
from hf_zero.config.schema import profiling as sections
from hf_zero.device.kinds import current_device
from hf_zero.device.registry import HostCopy, clock_of, forget_peaks, reserved, runtime_of
from hf_zero.device.runtime import Clock
from hf_zero.device.runtime import Event as Mark
from hf_zero.features import ASKED, EngineTools, Progress, TrainingFeature
from hf_zero.log import log_dist
from hf_zero.profiling.breakdown import Breakdown, WallClock
from hf_zero.profiling.comms_log import CommsLog
from hf_zero.profiling.flops import GIB, FlopsProfiler
from hf_zero.profiling.monitors import Event, Monitors
from hf_zero.profiling.recorder import Recorder, Update
from hf_zero.profiling.trace import TraceFile

_ROOT = "Train/Samples"
_TIMES = {"fwd": "forward", "bwd": "backward", "bwd_inner": "backward_inner", "bwd_allreduce": "backward_allreduce"}
_TIMES["step"] = "step"
WARM_UP = 2  # number of updates excluded from the average


class RunEvents:
    """Collects the metrics of updates and writes them in order. Also listens to the recorder for times."""

    def __init__(self, monitors: Monitors, *, with_times: bool) -> None:
        self._monitors = monitors
        self._with_times = with_times
        self._loss: torch.Tensor | None = None
        self._waiting: deque[tuple[list[Event], int, HostCopy | None]] = deque()
        self._samples: dict[int, int] = {}  # by update number

    def add_loss(self, loss: Any) -> None:
        """Add a micro-batch's loss, which is already divided by the number of micro-batches."""
        if isinstance(loss, torch.Tensor):
            part = loss.detach().float()
            self._loss = part if self._loss is None else self._loss + part

    def note_update(self, engine: Any, number: int) -> None:
        """Collect the metrics after an update; the engine's counters already include it."""
        samples = engine.global_samples
        rates = engine.rates_of_last_update
        events: list[Event] = []
        if rates and rates[0] is not None:
            events.append((f"{_ROOT}/lr", float(rates[0]), samples))
        if engine.settings.resolved.precision.model == "fp16":
            events.append((f"{_ROOT}/loss_scale", engine.optimizer.loss_scale, samples))
        loss, self._loss = self._loss, None
        if self._with_times:
            self._samples[number] = samples
        self._waiting.append((events, samples, None if loss is None else HostCopy(loss.reshape(1))))
        self._write(wait=False)

    def on_update(self, update: Update) -> None:
        samples = self._samples.pop(update.number, None)
        if samples is not None:
            timers = Breakdown.of(update).timers
            self._monitors.write_events(
                [(f"{_ROOT}/elapsed_time_ms_{title}", timers[name], samples) for name, title in _TIMES.items()]
            )

    def flush(self) -> None:
        """Write all remaining metrics; waits for losses still being copied."""
        self._write(wait=True)

    def _write(self, *, wait: bool) -> None:
        while self._waiting and (wait or self._waiting[0][2] is None or self._waiting[0][2].has_arrived):
            events, samples, loss = self._waiting.popleft()
            if loss is not None:
                events.append((f"{_ROOT}/train_loss", loss.read()[0], samples))
            self._monitors.write_events(events)


class ThroughputLog:
    """Logs samples per second. The first two updates are warm-up, as in DeepSpeed's timer."""

    def __init__(self, clock: Clock, device: torch.device, every: int) -> None:
        self._clock = clock
        self._device = device
        self._every = every
        self._num_updates = 0
        self._first: Mark | None = None
        self._last: tuple[int, Mark] | None = None  # (number of updates, mark) of the last line
        # Lines whose marks have not passed: (step, number of updates, samples of an update, mark).
        self._due: deque[tuple[int, int, int, Mark]] = deque()

    def count(self, global_step: int, samples: int) -> None:
        """Count an update of `samples` samples."""
        self._num_updates += 1
        is_due = global_step % self._every == 0
        if self._num_updates == WARM_UP:
            self._first = self._clock.mark()
            self._last = WARM_UP, self._first
        elif is_due and self._num_updates > WARM_UP:
            self._due.append((global_step, self._num_updates, samples, self._clock.mark()))
        while self._due and self._clock.has_passed(self._due[0][3]):
            self._show(*self._due.popleft())

    def _show(self, global_step: int, num_updates: int, samples: int, at: Mark) -> None:
        assert self._first is not None and self._last is not None
        num_before, before = self._last
        average = samples * (num_updates - WARM_UP) / max(1, self._clock.elapsed_ns(self._first, at)) * 1e9
        current = samples * (num_updates - num_before) / max(1, self._clock.elapsed_ns(before, at)) * 1e9
        self._last = num_updates, at
        now, peak = runtime_of(self._device).allocated()
        log_dist(
            f"global_step={global_step}, RunningAvgSamplesPerSec={average:.4f}, CurrSamplesPerSec={current:.4f}, "
            f"MemAllocated={now / GIB:.2f}GB, MaxMemAllocated={peak / GIB:.2f}GB"
        )


def memory_line() -> str:
    """Memory in use, with DeepSpeed's labels: MA allocated, CA reserved by PyTorch, Max_ peaks since the last call."""
    device = current_device()
    (now, peak), (held, held_peak) = runtime_of(device).allocated(), reserved(device)
    machine, process = psutil.virtual_memory(), psutil.Process().memory_info().rss
    return (
        f"MA {now / GIB:.2f} GB Max_MA {peak / GIB:.2f} GB CA {held / GIB:.2f} GB "
        f"Max_CA {held_peak / GIB:.2f} GB | CPU Virtual Memory: used = {machine.used / GIB:.2f} GB, "
        f"percent = {machine.percent}% | this process {process / GIB:.2f} GB"
    )


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log `memory_line` on rank 0 and reset the peaks, but only if `force` is set: scripts leave these calls in."""
    if not force:
        return
    log_dist(f"{message} | {memory_line()}")
    forget_peaks(current_device())


class MemoryLog:
    """`memory_breakdown`: logs memory before and after each phase of the engine."""

    def phase_begins(self, name: str) -> None:
        see_memory_usage(f"before {name}", force=True)

    def phase_ends(self, name: str) -> None:
        see_memory_usage(f"after {name}", force=True)


class Profiling(TrainingFeature):
    """The profiling feature, as described above.

    Attributes:
        recorder: None if nothing needs times.
        comms: the log of collectives, or None.
    """

    name = "profiling"
    waits_for_outcome = False

    def __init__(self, model: nn.Module, policy: sections.Observation, trace: sections.TraceSection) -> None:
        """Raises ConfigError if a monitor's library is not installed."""
        self.policy = policy
        self._flops_policy = policy.section(sections.FlopsProfilerSection)
        self._trace_policy = trace
        self.recorder: Recorder | None = None
        self.comms: CommsLog | None = None
        self._model = model
        self._trace: TraceFile | None = None
        self._wall_clock: WallClock | None = None
        self._throughput: ThroughputLog | None = None
        self._events: RunEvents | None = None
        self._flops: FlopsProfiler | None = None
        self._engine: Any = None
        self._rank = 0
        self._monitors = Monitors(policy.monitors)  # created first, to report a missing library early

    def begin(self, tools: EngineTools) -> None:
        policy, self._engine = self.policy, tools.engine
        self._rank = rank = tools.world.rank
        if rank == 0:
            self._monitors.open()
        device = local_device()
        if policy.memory_breakdown:
            tools.phases.observers.append(MemoryLog())
        if policy.throughput_every is not None:
            self._throughput = ThroughputLog(clock_of(device), device, policy.throughput_every)
        if policy.wall_clock_breakdown:
            self._wall_clock = WallClock(watching_collectives(), every=policy.steps_per_print)
        own = policy.section(sections.CommsLogger)
        comms = own if own.enabled else ASKED.get("comms")
        if comms is not None:
            self.comms = CommsLog(comms)
        trace = self._trace_policy
        if trace.enabled:
            path = Path(trace.output_path) / f"trace_rank{rank}.json"
            self._trace = TraceFile(path, rank, start=trace.start_step, num_updates=trace.num_steps)
        is_profiled = self._flops_policy.enabled and rank == 0
        with_times = policy.wall_clock_breakdown or is_profiled
        if self._monitors.enabled:
            self._events = RunEvents(self._monitors, with_times=with_times)
        events = self._events if with_times else None
        listeners = [each for each in (self._wall_clock, self.comms, self._trace, events) if each is not None]
        if listeners or is_profiled:
            self.recorder = Recorder(clock_of(device), device, listeners)
            self.recorder.attach()
        if policy.dump_state:
            dump_state(self._engine)

    # Hooks of an update

    def before_forward(self, progress: Progress, keywords: dict[str, Any]) -> dict[str, Any]:
        policy = self._flops_policy
        self._stop_counting()  # if the last forward has failed
        if policy.enabled and progress.step == policy.profile_step and progress.training and self._rank == 0:
            self._flops = FlopsProfiler(self._model, self._engine, policy.recompute_fwd_factor)
            self._flops.start_profile()
        return keywords

    def after_forward(self, progress: Progress, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> Any:
        self._stop_counting()
        return output

    def _stop_counting(self) -> None:
        if self._flops is not None:
            self._flops.stop_profile()

    def after_backward(self, progress: Progress, loss: Any) -> None:
        if self._events is not None:
            self._events.add_loss(loss)

    def after_step(self, progress: Progress, *, applied: bool) -> None:
        if self._events is not None:
            self._events.note_update(self._engine, progress.step)
        if self.recorder is not None:
            self.recorder.end_update(progress.step)
        if self._throughput is not None:
            self._throughput.count(progress.step, self._engine.settings.samples_per_update())
        if self._flops is not None:
            self._report_flops(progress.step - 1)
        self._end_recording()

    def _end_recording(self) -> None:
        """Stop recording what nothing needs any more, to avoid its overhead."""
        if self.recorder is None:
            return
        if self._trace is not None and self._trace.is_written and self._trace in self.recorder.listeners:
            self.recorder.listeners.remove(self._trace)
        flops = self._flops_policy
        if not self.recorder.listeners and not (flops.enabled and self._engine.global_steps <= flops.profile_step):
            self.recorder.detach()

    def _report_flops(self, step: int) -> None:
        profiler, policy = self._flops, self._flops_policy
        assert profiler is not None
        self._flops = None
        profiler.print_model_profile(
            profile_step=step,
            module_depth=policy.module_depth,
            top_modules=policy.top_modules,
            detailed=policy.detailed,
            output_file=policy.output_file or None,
            times=self.last_breakdown(),
        )
        profiler.end_profile()

    def last_breakdown(self) -> Breakdown | None:
        """The breakdown of the last recorded update; None without one. Synchronizes."""
        if self.recorder is None:
            return None
        self.recorder.finish()
        return None if self.recorder.last is None else Breakdown.of(self.recorder.last)

    def close(self) -> None:
        self._stop_counting()
        if self.recorder is not None:
            self.recorder.finish()
            self.recorder.detach()
        if self._wall_clock is not None:
            self._wall_clock.show_tables()
        if self._trace is not None:
            self._trace.write()
        if self._events is not None:
            self._events.flush()
        self._monitors.close()


def profiling_of(model: nn.Module, resolved: Resolved) -> Profiling:
    return Profiling(model, resolved.section(sections.Observation), resolved.section(sections.TraceSection))


def dump_state(engine: Any) -> None:
    """Log every attribute of the engine, sorted, one line each."""
    attributes = {name: value for name, value in sorted(vars(engine).items()) if not name.startswith("_")}
    attributes |= {f"settings.{name}": value for name, value in sorted(vars(engine.settings).items())}
    lines = [f"  {name} = {_shown(value)}" for name, value in attributes.items() if name != "settings"]
    log_dist("state of the engine:\n" + "\n".join(lines))


def _shown(value: Any) -> str:
    text = (
        f"{type(value).__name__} of {sum(p.numel() for p in value.parameters()):,} parameters"
        if isinstance(value, nn.Module)
        else repr(value)
    )
    return text if len(text) <= 200 else f"{text[:197]}..."
