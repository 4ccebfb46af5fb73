"""Real runs: measurements compared with an external clock and the ledger, without side effects."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_zero import initialize
from hf_zero.api.engine import ZeroEngine
from hf_zero.comm import ledger
from hf_zero.integration.compat.comms import get_comm_operation_count, has_comm_data, log_summary
from hf_zero.log import logger
from hf_zero.profiling.feature import Profiling
from hf_zero.profiling.flops import get_model_profile
from hf_zero.profiling.recorder import Parts, Update
from hf_zero.profiling.trace import TraceFile
from hf_zero.spans import SPANS
from tests.support.models import stack, tiny_llama, token_rows
from tests.support.ranks import run_ranks

ROWS, STEPS, UPDATES = 2, 2, 6
SEEN: dict[str, Any] = {"wall_clock_breakdown": True, "steps_per_print": 3, "comms_logger": {"enabled": True}}


def new_engine(stage: int, **sections: Any) -> ZeroEngine:
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": STEPS,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 10_000, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        **sections,
    }
    return initialize(model=tiny_llama(), config=config)[0]


def train(engine: ZeroEngine, num_updates: int = UPDATES, pause_s: float = 0.0) -> list[float]:
    losses = []
    for number in range(num_updates * STEPS):
        batch = stack(token_rows(ROWS, seed=number))
        time.sleep(pause_s)
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


class Outside:
    """A listener that also reads its own clock when it is called, at the end of an update, on a CPU."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, Parts]] = []

    def on_update(self, update: Update) -> None:
        self.seen.append((time.perf_counter_ns(), update.end_ns - update.begin_ns, update.parts))


def run_seen(rank: int, stage: int, folder: str) -> dict[str, Any]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    plain = train(new_engine(stage))
    trace = {"enabled": True, "output_path": folder, "start_step": 1, "num_steps": 2}
    engine = new_engine(stage, **SEEN, hf_zero={"trace": trace})
    ledger.reset()
    watching: Profiling = engine.training_features.named("profiling")
    clock = Outside()
    assert watching.recorder is not None and watching.comms is not None
    watching.recorder.listeners.insert(0, clock)
    losses = train(engine, pause_s=0.01 * rank)
    found = log_summary(show_straggler=True, return_dict=True)
    counted = {"calls": get_comm_operation_count(), "has": has_comm_data()}
    counted["bytes"] = {
        name: sum(size * len(calls) for size, calls in sizes.items()) for name, sizes in watching.comms.records.items()
    }
    timers = engine.get_wall_clock_timers()
    tallies = dict(ledger.tallies)
    engine.destroy()
    return {
        "losses": (plain, losses),
        "clock": clock.seen,
        "lines": lines,
        "comms": counted,
        "ledger": [(operation, tally.calls, tally.num_bytes) for (_, operation), tally in tallies.items()],
        "summary": found,
        "timers": timers,
        "is_off": SPANS.watcher is None and ledger.watcher is None,
    }


@pytest.mark.parametrize("stage", [2, 3])
def test_a_run_that_is_seen(stage: int, tmp_path: Path) -> None:
    ranks = run_ranks(run_seen, 2, stage, str(tmp_path))
    for rank, seen in enumerate(ranks):
        assert seen["losses"][0] == seen["losses"][1] and seen["is_off"]
        check_parts(seen["clock"])
        check_comms(seen)
        check_trace(tmp_path / f"trace_rank{rank}.json", rank)
    lines = ranks[0]["lines"]
    assert sum(line.startswith("[Rank 0] time (ms) | fwd: ") for line in lines) == UPDATES
    tables = [line for line in lines if "time per update, updates" in line]
    assert "updates 1 to 3, 2 rank(s)" in tables[0]
    assert "data " in tables[0] and "rank 1" in tables[0].split("data ")[1].splitlines()[0]  # it sleeps
    assert list(ranks[0]["timers"]) == ["fwd", "bwd", "bwd_inner", "bwd_allreduce", "step"]
    analysis = ranks[0]["summary"]["straggler_analysis"]
    assert analysis and ranks[0]["summary"]["metadata"]["world_size"] == 2


def check_parts(clock: list[tuple[int, int, Parts]]) -> None:
    """Parts add up to the update, and updates to the external clock's time, within three percent."""
    assert len(clock) == UPDATES
    for _, total, parts in clock:
        assert sum(parts.values()) == total
    told = sum(total for _, total, _ in clock[1:])
    outside = clock[-1][0] - clock[0][0]
    assert abs(told - outside) < 0.03 * outside


def check_comms(seen: dict[str, Any]) -> None:
    expected: dict[str, int] = {}
    for operation, _, num_bytes in seen["ledger"]:
        expected[operation] = expected.get(operation, 0) + num_bytes
    assert seen["comms"]["bytes"] == expected
    assert seen["comms"]["calls"] == sum(calls for _, calls, _ in seen["ledger"]) and seen["comms"]["has"]
    rows = [row for sizes in seen["summary"]["summary"].values() for row in sizes.values()]
    assert all(row["total_latency_ms"] > 0 for row in rows)


def check_trace(path: Path, rank: int) -> None:
    """The parts of Chrome's trace event format that Perfetto requires; spans of a row follow one another or nest."""
    trace = json.loads(path.read_text())
    assert trace["displayTimeUnit"] == "ms"
    rows: dict[int, list[dict[str, Any]]] = {}
    titles = {}
    for event in trace["traceEvents"]:
        assert isinstance(event["pid"], int) and event["pid"] == rank and isinstance(event["tid"], int)
        assert isinstance(event["name"], str) and event["ph"] in ("X", "M")
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
            titles[event["tid"]] = event["args"].get("name", titles.get(event["tid"]))
        else:
            assert event["ts"] > 1e15 and event["dur"] >= 0  # microseconds since 1970
            rows.setdefault(event["tid"], []).append(event)
    assert set(rows) <= set(titles) and {"updates", "compute", "communication"} <= set(titles.values())
    for spans in rows.values():
        check_nesting(spans)
    names = {event["name"] for spans in rows.values() for event in spans}
    assert {"update 2", "update 3", "forward", "backward", "step"} <= names and "update 4" not in names
    assert {"reduce_scatter", "all_gather"} <= names


def check_nesting(spans: list[dict[str, Any]]) -> None:
    open_until: list[float] = []
    for span in sorted(spans, key=lambda span: (span["ts"], -span["dur"])):
        while open_until and open_until[-1] <= span["ts"] + 0.5:
            open_until.pop()
        assert not open_until or span["ts"] + span["dur"] <= open_until[-1] + 0.5
        open_until.append(span["ts"] + span["dur"])


def test_what_is_not_asked_for_costs_nothing() -> None:
    engine = new_engine(0)
    assert engine.training_features.named("profiling") is None and not engine.phases.observers
    assert SPANS.watcher is None and ledger.watcher is None
    engine.destroy()


def profiled_ranges(_rank: int) -> set[str]:
    nothing_kept = {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
    engine = new_engine(3, zero_optimization={"stage": 3, "stage3_param_persistence_threshold": 0, **nothing_kept})
    train(engine, 2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        train(engine, 1)
    return {event.name for event in profiled.events() if event.name.startswith("hf_zero ")}


def test_pytorchs_profiles_name_units_and_phases() -> None:
    for names in run_ranks(profiled_ranges, 2):
        assert {"hf_zero forward", "hf_zero backward", "hf_zero step", "hf_zero reduce bucket 0"} <= names
        for layer in ("model.layers.0", "model.layers.1"):
            gathers = {name for name in names if name.startswith(f"hf_zero gather {layer}")}
            assert {name.rpartition(" (")[2] for name in gathers} == {"forward)", "backward)"}, names


def test_a_watch_costs_under_two_percent() -> None:
    """Computed instead of comparing two noisy runs: marks per update times the time of one, relative to the update."""
    engine = new_engine(2, wall_clock_breakdown=True, log_level="error")
    recorder = engine.training_features.named("profiling").recorder
    assert recorder is not None
    numbers: list[int] = []

    class Count:
        def on_update(self, update: Update) -> None:
            numbers.append(update.end_ns - update.begin_ns)

    recorder.listeners.append(Count())
    before = recorder.end_update
    num_edges: list[int] = []

    def end_update(number: int) -> None:
        num_edges.append(len(recorder._now.edges))
        before(number)

    recorder.end_update = end_update  # type: ignore[method-assign]
    train(engine)
    engine.destroy()
    started = time.perf_counter()
    for _ in range(1000):
        recorder.begin("forward", "")
        recorder.end()
    each_ns = (time.perf_counter() - started) * 1e9 / 2000
    assert max(num_edges) * each_ns < 0.02 * sorted(numbers)[len(numbers) // 2]


def macs_of_forward(text: str) -> str:
    (line,) = (line for line in text.splitlines() if line.startswith("fwd MACs per GPU:"))
    return line.split(":")[1].strip()


@pytest.mark.parametrize("stage", [1, 3])
def test_one_update_is_profiled_and_then_nothing_is_watched(stage: int, tmp_path: Path) -> None:
    path = tmp_path / "flops.txt"
    engine = new_engine(stage, flops_profiler={"enabled": True, "profile_step": 1, "output_file": str(path)})
    plain = train(new_engine(stage), 3)
    assert engine.flops_profiler_enabled() and engine.flops_profiler_profile_step() == 1
    assert train(engine, 3) == plain
    text = path.read_text()
    assert "Profile Summary at step 1:" in text and "gradient accumulation steps:" in text
    assert "params of model:" + " " * 54 + "31.64 K" in text
    last_batch = stack(token_rows(ROWS, seed=2 * STEPS - 1))
    assert macs_of_forward(text) == get_model_profile(tiny_llama(), kwargs=last_batch, print_profile=False)[1]
    assert SPANS.watcher is None  # it has seen its update
    engine.destroy()


def num_hooks(engine: ZeroEngine) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in engine.module.modules())


def test_a_profiled_forward_that_fails_leaves_no_counter(tmp_path: Path) -> None:
    """A script caught the error of one batch and went on: the counter and its hooks stayed until the process ended."""
    path = tmp_path / "flops.txt"
    engine = new_engine(1, flops_profiler={"enabled": True, "profile_step": 0, "output_file": str(path)})
    before = num_hooks(engine)
    for _ in range(2):
        with pytest.raises(ValueError, match="input_ids"):
            engine(input_ids=None)
    train(engine, 1)
    assert num_hooks(engine) == before and path.exists()
    engine.destroy()
    engine = new_engine(1, flops_profiler={"enabled": True, "profile_step": 0, "output_file": str(path)})
    with pytest.raises(ValueError, match="input_ids"):
        engine(input_ids=None)
    module = engine.module
    engine.destroy()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())


def test_memory_state_and_speed_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    engine = new_engine(1, memory_breakdown=True, dump_state=True, steps_per_print=2)
    train(engine, 4)
    engine.destroy()
    memory = [message for message in caplog.messages if " | MA " in message]
    each = [f"{when} {phase}" for phase in ("forward", "backward") for when in ("before", "after")]
    assert [line.split("] ")[1].split(" | ")[0] for line in memory[:4]] == each
    assert len(memory) == 4 * (2 * 4 + 2) and "percent = " in memory[0]
    assert "global_steps = 0" in caplog.text and "settings._micro_batch_size = 2" in caplog.text
    assert sum("RunningAvgSamplesPerSec=" in message for message in caplog.messages) == 1  # the first two are warm-up


def test_the_throughput_line_can_be_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    engine = new_engine(1, timers={"throughput": {"enabled": False}}, steps_per_print=2)
    train(engine, 4)
    assert "RunningAvgSamplesPerSec" not in caplog.text
    assert torch.is_grad_enabled()


def test_a_trace_without_updates_writes_nothing(tmp_path: Path) -> None:
    trace = TraceFile(tmp_path / "t.json", 0, start=0, num_updates=1)
    trace.write()
    assert not trace.path.exists()
