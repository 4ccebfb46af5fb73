"""Where the time goes: parts that add up, separately timed collectives, tables over ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hf_zero.comm import Pending
from hf_zero.config.schema.profiling import CommsLogger
from hf_zero.device.runtime import HOST, Clock, Event, HostMark
from hf_zero.profiling.breakdown import PARTS, Breakdown, table
from hf_zero.profiling.calls import FinishedCall
from hf_zero.profiling.comms_log import WAITS, CommsLog, bandwidth_gbps, stragglers, summary
from hf_zero.profiling.comms_log import table as comms_table
from hf_zero.profiling.feature import ThroughputLog
from hf_zero.profiling.flops import amount, macs_to_string, number_to_string, params_to_string
from hf_zero.profiling.recorder import Edge, Recorder, Update, divide
from hf_zero.profiling.timers import SynchronizedWallClockTimer
from hf_zero.profiling.trace import TraceFile
from hf_zero.spans import SPANS


def edges(*told: tuple[int, str]) -> list[Edge]:
    return [Edge(HostMark(at), kind) for at, kind in told]


def test_every_moment_belongs_to_the_innermost_span() -> None:
    told = edges((10, "forward"), (12, "gather"), (15, "gather"), (16, ""), (17, ""), (20, ""), (25, "backward"))
    told += edges((30, "reduce"), (34, ""), (40, ""), (41, "step"), (50, ""))
    parts, intervals, total = divide(told, HostMark(0), Clock().elapsed_ns, 1000)
    assert parts == {
        ("", "data"): 10,
        ("forward", "forward"): 5,
        ("forward", "gather"): 5,
        ("", "other"): 6,
        ("backward", "backward"): 11,
        ("backward", "reduce"): 4,
        ("step", "step"): 9,
    }
    assert total == sum(parts.values()) == 50
    assert [(i.kind, i.begin_ns, i.end_ns) for i in intervals][:3] == [
        ("gather", 1015, 1016),
        ("gather", 1012, 1017),
        ("forward", 1010, 1020),
    ]
    found = Breakdown.of(Update(1, 0, total, parts, (), (), ()))
    assert sum(found.parts.values()) == pytest.approx(found.total)
    assert found.timers == pytest.approx(
        {"fwd": 10e-6, "bwd": 15e-6, "bwd_inner": 11e-6, "bwd_allreduce": 4e-6, "step": 9e-6}
    )


class SlowDevice(Clock):
    """Marks pass when the test says so."""

    def __init__(self) -> None:
        self.passed: set[int] = set()
        self.num_marks = self.num_synchronized = 0

    def mark(self) -> Event:
        self.num_marks += 1
        return HostMark(self.num_marks * 1000)

    def mark_after(self, wait: Callable[[], None]) -> Event:
        wait()
        return self.mark()

    def has_passed(self, event: Event) -> bool:
        return isinstance(event, HostMark) and event.at_ns <= 1000 * max(self.passed, default=0)

    def synchronize(self) -> None:
        self.num_synchronized += 1
        self.passed.add(self.num_marks)


class Heard:
    def __init__(self) -> None:
        self.updates: list[Update] = []

    def on_update(self, update: Update) -> None:
        self.updates.append(update)


def one_update(recorder: Recorder) -> None:
    for kind in ("forward", "backward", "step"):
        with SPANS.span(kind):
            pass


def test_updates_are_told_of_when_the_device_has_done_them_and_nobody_waits() -> None:
    device, heard = SlowDevice(), Heard()
    recorder = Recorder(device)
    recorder.listeners.append(heard)
    recorder.attach()
    at_start = device.num_synchronized
    try:
        for number in (1, 2):
            one_update(recorder)
            recorder.end_update(number)
        assert heard.updates == []
        device.passed.add(device.num_marks)
        one_update(recorder)
        recorder.end_update(3)
        assert [update.number for update in heard.updates] == [1, 2]
        assert device.num_synchronized == at_start
        recorder.finish()
    finally:
        recorder.detach()
    assert [update.number for update in heard.updates] == [1, 2, 3] and SPANS.watcher is None
    assert [sum(update.parts.values()) for update in heard.updates] == [5000, 6000, 6000]
    assert all(a.end_ns == b.begin_ns for a, b in zip(heard.updates, heard.updates[1:]))


class Far(Pending):
    num_waits = 0

    def wait(self) -> None:
        self.num_waits += 1


def test_a_collective_of_the_device_is_timed_beside_the_compute_stream() -> None:
    device, heard, far = SlowDevice(), Heard(), Far()
    recorder = Recorder(device)
    recorder.listeners.append(heard)
    tensor = torch.zeros(3)
    with recorder.call("backward", "reduce_scatter", [12, 4], 2) as call:
        followed = call.follow(far, tensor)
    assert far.num_waits == 1  # by the observing stream
    recorder.end_update(1)
    device.passed.add(device.num_marks)
    recorder.end_update(2)  # not waited for yet: reported later
    assert [update.calls for update in heard.updates] == [[], []]
    followed.wait()
    recorder.end_update(3)
    device.synchronize()
    recorder.end_update(4)
    found = [call for update in heard.updates for call in update.calls]
    assert [(call.operation, call.num_bytes, call.num_ranks) for call in found] == [
        ("reduce_scatter", 12, 2),
        ("reduce_scatter", 4, 2),
    ]
    assert [call.latency_ms for call in found] == pytest.approx([0.75e-3, 0.25e-3])  # until the end: one mark
    assert far.num_waits == 2


class Request:
    is_done = False

    def __init__(self, started_us: int, ended_us: int) -> None:
        self.started_at, self.ended_at = started_us / 1e6, ended_us / 1e6


def test_transfers_that_are_under_way_are_told_of_with_a_later_update(tmp_path: Path) -> None:
    device, trace = SlowDevice(), TraceFile(tmp_path / "t.json", 0, start=0, num_updates=2)
    heard, reads = Heard(), [Request(4, 9), Request(6, 11)]
    recorder = Recorder(device, HOST, [heard, trace])
    begin = device.mark()
    recorder.transfer("in", 8, begin, device.mark())
    for request in reads:
        recorder.request("read", 16, request)
    recorder.end_update(1)
    assert heard.updates[0].transfers == []
    device.passed.add(device.num_marks)
    reads[0].is_done = reads[1].is_done = True
    recorder.end_update(2)
    assert [(each.lane, each.num_bytes, each.end_ns - each.begin_ns) for each in heard.updates[1].transfers] == [
        ("in", 8, 1000),
        ("read", 16, 5000),
        ("read", 16, 5000),
    ]
    events = json.loads(trace.path.read_text())["traceEvents"]
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    moved = [(rows[event["tid"]], event["dur"], event["args"]) for event in events if "bytes" in event["args"]]
    assert moved == [
        ("host to device", 1.0, {"bytes": 8}),
        ("drive reads", 5.0, {"bytes": 16}),
        ("drive reads (2)", 5.0, {"bytes": 16}),
    ]


def test_bandwidths_are_deepspeeds() -> None:
    assert bandwidth_gbps("all_reduce", 1000, 1, 0.5) == pytest.approx((0.032, 0.0))
    assert bandwidth_gbps("broadcast", 1000, 1, 0.5) == pytest.approx((0.016, 0.016))
    assert bandwidth_gbps("all_gather", 1000, 4, 0.5) == pytest.approx((0.016, 0.012))
    assert bandwidth_gbps("all_gather", 1000, 4, 0.0) == (0.0, 0.0)


OPERATIONS = ("all_reduce", "all_gather")


def call(operation: str, num_bytes: int, latency_ms: float) -> FinishedCall:
    return FinishedCall("backward", operation, num_bytes, 2, latency_ms, ((0, round(latency_ms * 1e6)),), "launch")


def test_five_equal_calls_have_five_equal_times() -> None:
    """DeepSpeed 0.19.8 never resets its timer: five equal calls record 8.3, 8.6, 8.6, 8.7, 8.7 ms."""
    log = CommsLog(CommsLogger(enabled=True))
    log.take([call("all_reduce", 2**20, 1.5)] * 5 + [call("all_gather", 64, 0.1)])
    assert log.get_raw_data()["all_reduce"][2**20][:2] == [5, [1.5] * 5]
    assert log.get_total_operations() == 6 and log.get_operation_names() == ["all_reduce", "all_gather"]
    shown = comms_table(summary(log)).splitlines()
    assert shown[0].split("  ")[0] == "Comm. Op" and shown[0].index("Message Size") == 20
    assert shown[2].split() == ["1.00", "MB", "5", "7.50", "1.50", "11.18", "5.59"]
    log.reset_data()
    assert not log.has_data()


@pytest.mark.parametrize(
    ("policy", "names"),
    [
        (CommsLogger(enabled=True, prof_all=False, prof_ops=["all_gather_into_tensor"]), ["all_gather"]),
        (CommsLogger(enabled=True, prof_all=False), []),
        (CommsLogger(enabled=False), []),
        (CommsLogger(enabled=True, debug=True), [f"{o} | [Caller Func: launch]" for o in OPERATIONS]),
    ],
)
def test_what_is_logged(policy: CommsLogger, names: list[str]) -> None:
    log = CommsLog(policy)
    log.take([call("all_reduce", 8, 1.0), call("all_gather", 8, 1.0)])
    assert log.get_operation_names() == names


def test_sizes_that_not_all_ranks_have_called_are_no_stragglers() -> None:
    """DeepSpeed reduces the numbers of rank 0's sizes over all ranks, and hangs if another rank has different sizes."""
    fast, slow = CommsLog(CommsLogger(enabled=True)), CommsLog(CommsLogger(enabled=True))
    fast.take([call("all_reduce", 8, 1.0), call("all_reduce", 8, 3.0), call("all_reduce", 16, 1.0)])
    slow.take([call("all_reduce", 8, 2.0), call("all_reduce", 8, 4.0)])
    found = stragglers([summary(fast), summary(slow)], 1)
    assert list(found["all_reduce"]) == [8]
    assert found["all_reduce"][8]["total_straggler_ms"] == pytest.approx(2.0)
    assert comms_table(found, WAITS).splitlines()[-1].split() == ["8", "B", "2", "4.00", "2.00", "2.00", "1.00"]


def test_the_table_names_who_is_slow() -> None:
    usual = [10.0, 20.0, 8.0, 5.0, 2.0, 1.0, 0.0]
    slow = [15.0, 30.0, 0.5, 5.0, 2.0, 1.0, 0.0]
    assert len(usual) == len(PARTS)
    text = table([usual, usual, slow], "updates 1 to 10")
    assert "backward       20.00     20.00     30.00" in text and "other" not in text
    assert "stragglers: rank 2 (51.00 ms, +42%); the median rank works 36.00 ms" in text
    assert "no straggler" in table([usual, usual], "updates 1 to 10")


def test_numbers_are_written_as_deepspeed_writes_them() -> None:
    assert (macs_to_string(3_014_656), params_to_string(106_816)) == ("3.01 MMACs", "106.82 K")
    assert number_to_string(0) == "0"
    assert params_to_string(1.5e9) == "1.5 B" and number_to_string(1.5e9, "M") == "1500 M"
    assert (amount(17), amount(678.86 * 2**20)) == ("17 B", "678.86 MB")


def test_throughput_is_of_what_lies_between_two_lines(caplog: pytest.LogCaptureFixture) -> None:
    device = SlowDevice()
    log = ThroughputLog(device, HOST, 2)
    for step in range(1, 7):
        log.count(step, 8)
        device.passed.add(device.num_marks)
    lines = [message for message in caplog.messages if "RunningAvg" in message]
    # Every mark is one microsecond after the previous one: the warm-up's, then one for every line.
    assert ["global_step=4" in line for line in lines] == [True]
    assert "RunningAvgSamplesPerSec=16000000.0000" in lines[0]


def test_the_older_timers_go_on() -> None:
    timers = SynchronizedWallClockTimer()
    timers("fwd").start()
    timers("fwd").stop()
    assert timers("fwd").elapsed(reset=False) > 0 and timers.get_mean(["fwd"])["fwd"] > 0
