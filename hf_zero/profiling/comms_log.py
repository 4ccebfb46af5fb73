"""`comms_logger`: count, latency and bandwidth of collectives, by operation and size.

For a call of duration d in a group of n ranks, with a whole buffer of s bytes (as in the ledger), the algorithm and bus
bandwidths are: all-reduce 2s/d and 2(n-1)/n s/d; all-gather, reduce-scatter and all-to-all s/d and (n-1)/n s/d;
broadcast s/d for both. In Gbit/s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hf_zero.config.schema.profiling import CommsLogger
from hf_zero.log import log_dist
from hf_zero.profiling.calls import FinishedCall
from hf_zero.profiling.flops import amount, trim_mean
from hf_zero.profiling.recorder import Update

_SHARED = ("all_gather", "reduce_scatter", "all_to_all")


def bandwidth_gbps(operation: str, num_bytes: int, num_ranks: int, latency_ms: float) -> tuple[float, float]:
    """(algorithm bandwidth, bus bandwidth) in Gbit/s; 0 if no time was measured."""
    if latency_ms <= 0:
        return 0.0, 0.0
    algorithm = num_bytes * 8 / (latency_ms * 1e6)
    if operation == "all_reduce":
        return 2 * algorithm, 2 * algorithm * (num_ranks - 1) / num_ranks
    if operation in _SHARED:
        return algorithm, algorithm * (num_ranks - 1) / num_ranks
    return algorithm, algorithm


class CommsLog:
    """Listener that records collectives. Its methods have the names of DeepSpeed's CommsLogger.

    Attributes:
        records: (latency in ms, algorithm bandwidth, bus bandwidth) of every call, by operation, then by bytes.
    """

    def __init__(self, policy: CommsLogger) -> None:
        self.policy = policy
        self.is_on = policy.enabled
        self.records: dict[str, dict[int, list[tuple[float, float, float]]]] = {}

    def on_update(self, update: Update) -> None:
        self.take(update.calls)

    def take(self, calls: Sequence[FinishedCall]) -> None:
        for call in calls if self.is_on else ():
            # DeepSpeed's names are longer: all_gather_into_tensor, reduce_scatter_tensor.
            if self.policy.prof_all or any(name.startswith(call.operation) for name in self.policy.prof_ops):
                self._note(call)

    def _note(self, call: FinishedCall) -> None:
        name = f"{call.operation} | [Caller Func: {call.caller}]" if self.policy.debug else call.operation
        algorithm, bus = bandwidth_gbps(call.operation, call.num_bytes, call.num_ranks, call.latency_ms)
        sizes = self.records.setdefault(name, {})
        sizes.setdefault(call.num_bytes, []).append((call.latency_ms, algorithm, bus))
        if self.policy.verbose:
            log_dist(
                f"comm op: {name} | time (ms): {call.latency_ms:.2f} | msg size: {amount(call.num_bytes)} | "
                f"algbw (Gbps): {algorithm:.2f} | busbw (Gbps): {bus:.2f}"
            )

    # DeepSpeed's names

    def get_raw_data(self) -> dict[str, dict[int, list[Any]]]:
        """{operation: {bytes: [count, latencies in ms, algorithm Gbit/s, bus Gbit/s]}}."""
        return {
            name: {size: [len(calls), *map(list, zip(*calls))] for size, calls in sizes.items()}
            for name, sizes in self.records.items()
        }

    def has_data(self) -> bool:
        return bool(self.records)

    def reset_data(self) -> None:
        self.records.clear()

    def get_operation_names(self) -> list[str]:
        return list(self.records)

    def get_total_operations(self) -> int:
        return sum(len(calls) for sizes in self.records.values() for calls in sizes.values())

    def get_operation_summary(self, operation_name: str) -> dict[int, dict[str, Any]]:
        """By size in bytes: count, total_latency_ms, avg_latency_ms, tput_avg_gbps, busbw_avg_gbps, ..."""
        found = {}
        for size, calls in self.records.get(operation_name, {}).items():
            latencies, algorithm, bus = zip(*calls)
            found[size] = {
                "count": len(calls),
                "total_latency_ms": sum(latencies),
                "avg_latency_ms": trim_mean(latencies, 0.1),
                "tput_avg_gbps": trim_mean(algorithm, 0.1),
                "busbw_avg_gbps": trim_mean(bus, 0.1),
                "msg_size_bytes": size,
                "msg_size_str": amount(size),
            }
        return found

    def start_profiling_comms(self) -> None:
        self.is_on = True

    def stop_profiling_comms(self) -> None:
        self.is_on = False


def summary(log: CommsLog) -> dict[str, dict[int, dict[str, Any]]]:
    return {name: log.get_operation_summary(name) for name in log.get_operation_names()}


# Column title -> key in a summary.
_TIMES = {
    "Total Latency(ms)": "total_latency_ms",
    "Avg Latency(ms)": "avg_latency_ms",
    "tput_avg (Gbps)": "tput_avg_gbps",
    "busbw_avg (Gbps)": "busbw_avg_gbps",
}
WAITS = {
    "Total comm lat(ms)": "total_comm_lat_ms",
    "Total straggler(ms)": "total_straggler_ms",
    "Avg comm lat(ms)": "avg_comm_lat_ms",
    "Avg straggler(ms)": "avg_straggler_ms",
}


def table(totals: dict[str, dict[int, dict[str, Any]]], columns: Mapping[str, str] = _TIMES) -> str:
    """Format DeepSpeed's table, with columns of 20 characters."""
    rows: list[Sequence[str]] = [("Comm. Op", "Message Size", "Count", *columns)]
    for name, sizes in totals.items():
        rows.append([name])
        for _, row in sorted(sizes.items()):
            numbers = (f"{row[key]:.2f}" for key in columns.values())
            rows.append(["", row["msg_size_str"], str(row["count"]), *numbers])
    return "\n".join("".join(f"{text:<20}" for text in row).rstrip() for row in rows)


def stragglers(everyone: Sequence[dict[str, dict[int, dict[str, Any]]]], rank: int) -> dict[str, dict[int, Any]]:
    """A rank's waits for others, by operation and size: its own total latency minus the smallest of all ranks.

    Sizes that not all ranks have called equally often are omitted, because they say nothing about waiting.
    """
    waits: dict[str, dict[int, Any]] = {}
    for name, sizes in everyone[rank].items():
        for size, own in sizes.items():
            rows = [theirs.get(name, {}).get(size) for theirs in everyone]
            if any(row is None or row["count"] != own["count"] for row in rows):
                continue
            least = min(row["total_latency_ms"] for row in rows if row is not None)
            waited = own["total_latency_ms"] - least
            waits.setdefault(name, {})[size] = {
                "total_comm_lat_ms": least,
                "total_straggler_ms": waited,
                "avg_comm_lat_ms": least / own["count"],
                "avg_straggler_ms": waited / own["count"],
                "count": own["count"],
                "msg_size_str": own["msg_size_str"],
            }
    return waits
