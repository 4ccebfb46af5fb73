"""The device of the GPU programme. All that exists on CUDA alone is in `Gpu`; `Device` stands for it on a CPU."""

from __future__ import annotations

import ctypes
import gc
import pickle
import resource
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_zero.comm import Pending

DELAY_S = 1e-3  # of a sleep before, and another after each delayed collective


class Device:
    """The CPU: the programme's rehearsal."""

    is_gpu = False

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def facts(self) -> dict[str, Any]:
        return {"device": "CPU", "torch": torch.__version__}

    def limit_memory(self, share: float) -> None:
        """Limit this process to a share of the device's memory."""

    def nap(self) -> None:
        """Delay what the current stream does next."""
        time.sleep(DELAY_S)

    def late(self, start: Callable[[], Pending], *read: Tensor) -> Pending:
        """Start an asynchronous collective that begins late and ends late, without delaying the current stream.

        Args:
            read: its tensors.
        """
        return Deferred(start)

    def free_bytes(self) -> int:
        """Free memory of the device, by its driver."""
        return 0

    def synchronize(self) -> None:
        """Wait until the device has done everything."""

    def now(self) -> float:
        """Seconds, when the device has done everything."""
        self.synchronize()
        return time.perf_counter()

    def forget_peak(self) -> None:
        gc.collect()

    def peaks(self) -> dict[str, float]:
        """Peak bytes of the device's tensors, of its allocator, and of this process on the host."""
        return {"host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0}

    def no_waits(self) -> AbstractContextManager[None]:
        """Context in which a host that waits for the device raises."""
        return nullcontext()

    def lock(self, tensor: Tensor) -> bool:
        """Page-lock the memory of `tensor` until the process ends; False if the device cannot."""
        return False

    def unfinished(self) -> list[str]:
        """Collectives that have not ended, by NCCL's flight recorder."""
        return []

    def profiled(self, call: Callable[[], object], trace: Path | None = None, top: int = 12) -> dict[str, Any]:
        """Run `call` under the profiler: shares of time in which the device computes and copies, longest kernels.

        Args:
            trace: file for the trace; a name that ends in .gz is compressed.
        """
        with torch.profiler.profile(activities=self._activities()) as profile:
            start = self.now()
            call()
            seconds = self.now() - start
        if trace is not None:
            profile.export_chrome_trace(str(trace))
        spans: dict[str, list[tuple[float, float]]] = {"kernels": [], "copies": []}
        sums: dict[str, float] = {}
        for event in profile.events():
            # Named ranges of hf_zero span several kernels and the gaps between them.
            if event.device_type != self._profiled_type or event.is_user_annotation:
                continue
            kind = "copies" if event.name.startswith(("Memcpy", "Memset")) else "kernels"
            spans[kind].append((event.time_range.start, event.time_range.end))
            name = event.name[:90]
            sums[name] = sums.get(name, 0.0) + (event.time_range.end - event.time_range.start) / 1e3
        longest = sorted(sums.items(), key=lambda item: -item[1])[:top]
        shares = {kind: covered(each) / 1e6 / seconds for kind, each in spans.items()}
        return {"s": seconds, "busy": shares, "num_kernels": len(spans["kernels"]), "longest_ms": dict(longest)}

    _profiled_type = torch.autograd.DeviceType.CPU

    def _activities(self) -> list[Any]:
        return [torch.profiler.ProfilerActivity.CPU]


class Deferred(Pending):
    """A collective of one rank that takes place when somebody waits for it, and not before."""

    def __init__(self, start: Callable[[], Pending]) -> None:
        self._start: Callable[[], Pending] | None = start

    def wait(self) -> None:
        if self._start is not None:
            start, self._start = self._start, None
            start().wait()


class Gpu(Device):
    """The first CUDA device."""

    is_gpu = True
    _profiled_type = torch.autograd.DeviceType.CUDA

    def __init__(self) -> None:
        self.device = torch.device("cuda", 0)
        torch.cuda.set_device(0)
        self._side: Any = None

    def facts(self) -> dict[str, Any]:
        lines = Path("/proc/self/maps").read_text().splitlines()
        libraries = sorted({line.split()[-1] for line in lines if "libnccl.so" in line})
        return {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            # torch.cuda.nccl.version() is that of the library which torch was built with.
            "nccl": {"/".join(Path(each).parts[-4:]): _nccl_version(each) for each in libraries},
        }

    def limit_memory(self, share: float) -> None:
        torch.cuda.set_per_process_memory_fraction(share, 0)

    def nap(self) -> None:
        torch.cuda._sleep(round(DELAY_S * 1.7e9))  # cycles, at about 1.7 GHz

    def late(self, start: Callable[[], Pending], *read: Tensor) -> Pending:
        if self._side is None:
            self._side = torch.cuda.Stream()
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            self.nap()
            start().wait()  # the group's stream has waited for the side stream, which now waits for the group's
            self.nap()
            return _Late(self._side.record_event(), read)

    def free_bytes(self) -> int:
        self.synchronize()
        return torch.cuda.mem_get_info(0)[0]

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def forget_peak(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def peaks(self) -> dict[str, float]:
        device = {"tensors": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
        return {**super().peaks(), **device}

    def no_waits(self) -> AbstractContextManager[None]:
        return _Alarm()

    def lock(self, tensor: Tensor) -> bool:
        size = tensor.numel() * tensor.element_size()
        return int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), size, 0)) == 0

    def unfinished(self) -> list[str]:
        dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)
        if dump is None:
            return []
        entries = pickle.loads(dump()).get("entries", [])
        names = ("process_group", "collective_seq_id", "profiling_name", "state", "input_sizes")
        return [
            ", ".join(f"{name}={entry.get(name)}" for name in names)
            for entry in entries
            if entry.get("state") != "completed"
        ]

    def _activities(self) -> list[Any]:
        return [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]


def _nccl_version(library: str) -> int:
    """As NCCL's ncclGetVersion says it: 23007 is 2.30.7."""
    version = ctypes.c_int()
    ctypes.CDLL(library).ncclGetVersion(ctypes.byref(version))
    return version.value


class _Late(Pending):
    """A collective that has ended when an event has passed; its tensors are kept until somebody waits for it."""

    def __init__(self, ended: Any, read: tuple[Tensor, ...]) -> None:
        self._ended, self._read = ended, read

    def is_ready(self) -> bool:
        return bool(self._ended.query())

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._ended)
        self._read = ()


class _Alarm(AbstractContextManager[None]):
    def __enter__(self) -> None:
        torch.cuda.set_sync_debug_mode("error")

    def __exit__(self, *exception: object) -> None:
        torch.cuda.set_sync_debug_mode("default")


def device_of(kind: str) -> Device:
    """The device by its name on the command line: "cuda" or "cpu"."""
    return Gpu() if kind == "cuda" else Device()


def covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return total
