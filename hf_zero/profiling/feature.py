"""What a config wants to see of a run, as one training feature: it looks, and changes nothing.

    wall_clock_breakdown    WallClock       listens to the recorder
    comms_logger            CommsLog        listens to the recorder
    hf_zero.trace           TraceFile       listens to the recorder
    flops_profiler          FlopsProfiler   around the forward of one update
    memory_breakdown        MemoryLog       looks at the engine's phases
    tensorboard, ...        Monitors        get the numbers of every update
    dump_state              once, when the engine is complete
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from hf_zero.comm import local_device, watching_collectives
from hf_zero.comm.collectives import LoneCollectives
from hf_zero.config import Resolved
from hf_zero.config.features import profiling as sections
from hf_zero.device.registry import clock_of
from hf_zero.features import ASKED, EngineTools, Progress, TrainingFeature
from hf_zero.log import log_dist
from hf_zero.profiling.breakdown import Breakdown, WallClock
from hf_zero.profiling.comms_log import CommsLog
from hf_zero.profiling.events import RunEvents, ThroughputLog
from hf_zero.profiling.flops import FlopsProfiler
from hf_zero.profiling.flops_report import EngineTimes
from hf_zero.profiling.memory import MemoryLog
from hf_zero.profiling.monitors import Monitors
from hf_zero.profiling.recorder import Recorder
from hf_zero.profiling.trace import TraceFile


class Profiling(TrainingFeature):
    """See above.

    Attributes:
        recorder: None where nothing needs times.
        comms: the log of collectives, where there is one.
    """

    name = "profiling"
    waits_for_outcome = False

    def __init__(self, model: nn.Module, policy: sections.Observation, trace: sections.Trace) -> None:
        """
        Raises:
            ConfigError: a monitor's library is not installed.
        """
        self.policy = policy
        self._flops_policy = policy.section(sections.FlopsProfiler)
        self._trace_policy = trace
        self.recorder: Recorder | None = None
        self.comms: CommsLog | None = None
        self.wall_clock: WallClock | None = None
        self._model = model
        self._trace: TraceFile | None = None
        self._throughput: ThroughputLog | None = None
        self._events: RunEvents | None = None
        self._flops: FlopsProfiler | None = None
        self._engine: Any = None
        self._rank = 0
        self._monitors = Monitors(policy.monitors)  # before anything is built: a missing library is said first

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
            self.wall_clock = WallClock(watching_collectives(), every=policy.steps_per_print)
        elif self._flops_policy.enabled and rank == 0:
            self.wall_clock = WallClock(LoneCollectives(), every=None, prints=False)
        own = policy.section(sections.CommsLogger)
        comms = own if own.enabled else ASKED.get("comms")
        if comms is not None:
            self.comms = CommsLog(comms)
        trace = self._trace_policy
        if trace.enabled:
            path = Path(trace.output_path) / f"trace_rank{rank}.json"
            self._trace = TraceFile(path, rank, start=trace.start_step, num_updates=trace.num_steps)
        if self._monitors.enabled:
            with_times = policy.wall_clock_breakdown or self._flops_policy.enabled
            self._events = RunEvents(self._monitors, with_times=with_times)
        listeners = [each for each in (self.wall_clock, self.comms, self._trace) if each is not None]
        if listeners:
            self.recorder = Recorder(clock_of(device), device)
            self.recorder.listeners += [*listeners, *([self._events] if self._events is not None else [])]
            self.recorder.attach()
        if policy.dump_state:
            dump_state(self._engine)

    # An update

    def before_forward(self, progress: Progress, keywords: dict[str, Any]) -> dict[str, Any]:
        policy = self._flops_policy
        if policy.enabled and progress.step == policy.profile_step and progress.training and self._rank == 0:
            self._flops = FlopsProfiler(self._model, self._engine, policy.recompute_fwd_factor)
            self._flops.start_profile()
        return keywords

    def after_forward(self, progress: Progress, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> Any:
        if self._flops is not None:
            self._flops.stop_profile()
        return output

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
        self._drop_idle()

    def _drop_idle(self) -> None:
        """A listener that has everything it needs costs nothing from then on."""
        if self.recorder is None:
            return
        if self._trace is not None and self._trace.is_written:
            self.recorder.drop(self._trace)
        flops = self._flops_policy
        is_profiled = flops.enabled and self._engine.global_steps > flops.profile_step
        is_wanted = self.policy.wall_clock_breakdown or self._events is not None
        if is_profiled and not is_wanted and self.wall_clock is not None:
            self.recorder.drop(self.wall_clock)

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
            times=self._times(),
        )
        profiler.end_profile()

    def _times(self) -> EngineTimes | None:
        if self.recorder is None or self.wall_clock is None:
            return None
        self.recorder.finish()
        last = self.wall_clock.last
        if last is None:
            return None
        samples, micro_batch_size, accumulation_steps = self._engine.settings.get_batch_info()
        return EngineTimes(
            world=self._engine.groups.world.size,
            micro_batch_size=micro_batch_size,
            accumulation_steps=accumulation_steps,
            samples=samples,
            forward_s=last.timers["fwd"] / 1e3,
            backward_s=last.timers["bwd"] / 1e3,
            step_s=last.timers["step"] / 1e3,
            total_s=last.total / 1e3,
        )

    def last_breakdown(self) -> Breakdown | None:
        """Of the last update; waits for the device. None without wall_clock_breakdown, or before an update."""
        if self.recorder is None or self.wall_clock is None:
            return None
        self.recorder.finish()
        return self.wall_clock.last

    def close(self) -> None:
        if self.recorder is not None:
            self.recorder.finish()
            self.recorder.detach()
        if self.wall_clock is not None:
            self.wall_clock.show_tables()
        if self._trace is not None:
            self._trace.write()
        if self._events is not None:
            self._events.flush()
        self._monitors.close()


def profiling_of(model: nn.Module, resolved: Resolved) -> Profiling:
    """The feature; for a config that wants to see anything, or a program that does."""
    return Profiling(model, resolved.section(sections.Observation), resolved.section(sections.Trace))


def dump_state(engine: Any) -> None:
    """Log every attribute of the engine, sorted, one line each."""
    attributes = {name: value for name, value in sorted(vars(engine).items()) if not name.startswith("_")}
    attributes |= {f"settings.{name}": value for name, value in sorted(vars(engine.settings).items())}
    lines = [f"  {name} = {_shown(value)}" for name, value in attributes.items() if name != "settings"]
    log_dist("state of the engine:\n" + "\n".join(lines))


def _shown(value: Any) -> str:
    text = f"{type(value).__name__} of {sum(p.numel() for p in value.parameters()):,} parameters" if isinstance(
        value, nn.Module
    ) else repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."
