"""Starts ranks for tests: fresh processes on gloo, a file as rendezvous, a short timeout, no orphans.

    def run_all_reduce(rank, value): ...           # module level, so that it pickles by name
    def test_all_reduce():
        assert run_ranks(run_all_reduce, 3, 1.0) == [3.0, 3.0, 3.0]
        assert run_each(run_all_reduce, 2, [(1.0,), (2.0,)]) == [[2.0, 2.0], [4.0, 4.0]]

Every call gets new processes. They are forked from one server that has already imported torch, so a rank starts in
hundredths of a second, but inherits nothing from earlier tests.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

SEED = 1234
# torch._dynamo: every optimizer imports it, which takes 1.5 seconds.
PRELOAD = ["torch", "torch.distributed", "torch.optim", "torch._dynamo"]
# Also preloaded for all ranks, but only if the current tests have imported the key (importing takes seconds).
PRELOAD_IF_USED = {
    "pytest": "pytest",
    "transformers": "transformers.models.llama.modeling_llama",
    "transformers.trainer": "tests.support.trainer_warm_up",
    "hf_zero.api.entry": "tests.support.engine_warm_up",
}
OUR_MODULES = r"hf_zero(\.|$)"  # a pattern
OURS = ("hf_zero.", "tests.support.")
NOT_FOR_RANKS = ("tests.support.starting", "tests.support.test_")  # the first one is called for every audit event
# Time to wait for other ranks' reports once one has failed, so that the earliest failure is shown.
REPORT_S = 0.3
RENDEZVOUS_VARIABLE = "TEST_RENDEZVOUS_URL"


class RankFailure(AssertionError):
    """One rank failed (the earliest one is named), or the ranks did not end in time."""

    def __init__(self, message: str, rank: int | None, kind: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.kind = kind  # class name of the rank's exception, "Timeout" or "Died"


@dataclass(frozen=True)
class _Job:
    """A rank's parameters, sent to it by pickle."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    world_size: int
    timeout_s: float
    init: bool
    folder: str
    environment: dict[str, str]


@dataclass(frozen=True)
class _Report:
    """A rank's answer: its value, or its failure."""

    rank: int
    value: Any = None
    failure: str | None = None
    kind: str = ""
    at: float = 0.0


def rendezvous_url() -> str:
    """The `init_method` of this run (a fresh file), for a function started with `init=False`."""
    return os.environ[RENDEZVOUS_VARIABLE]


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120, init: bool = True
) -> list[Any]:
    """Runs `function(rank, *args)` on `world_size` fresh processes; returns their values in rank order.

    With `init` the default gloo group exists when the function starts; without, the function creates its own (the
    launcher's variables are set, and `rendezvous_url()` names a file). Raises RankFailure with the first failing rank's
    traceback and every rank's output.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        rendezvous = {RENDEZVOUS_VARIABLE: f"file://{folder}/rendezvous"}
        environment = {**os.environ, **_launcher_variables(world_size), **rendezvous}
        job = _Job(function, args, world_size, timeout_s, init, folder, environment)
        ranks = _start(job)
        try:
            reports = _collect(ranks, deadline=time.monotonic() + timeout_s)
        finally:
            _end(ranks)
            _show_output(folder, world_size)
        return [report.value for report in _all_succeeded(reports, ranks, job)]


def run_each(
    function: Callable[..., Any], world_size: int, cases: Sequence[tuple[Any, ...]], *, timeout_s: float = 120
) -> list[list[Any]]:
    """Runs `function(rank, *case)` for several cases in one start; returns, by case, the values in rank order.

    For cases without side effects on the process. After a failure the output lists the cases; the last one failed.
    """
    by_rank = run_ranks(_run_cases, world_size, function, tuple(cases), timeout_s=timeout_s)
    return [list(values) for values in zip(*by_rank, strict=True)]


def _run_cases(rank: int, function: Callable[..., Any], cases: tuple[tuple[Any, ...], ...]) -> list[Any]:
    found = []
    for case in cases:
        print(f"case {case}")
        seed()
        found.append(function(rank, *case))
    return found


def seed() -> None:
    """Seeds every device that is there. `torch.manual_seed` formats the stack for each kind that is not."""
    import torch

    torch.default_generator.manual_seed(SEED)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(SEED)


def _launcher_variables(world_size: int) -> dict[str, str]:
    return {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        # Otherwise a rank that sends nothing could exit before gloo has connected the others to it.
        "TORCH_DIST_INIT_BARRIER": "1",
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# --- the parent's side -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rank:
    process: ForkServerProcess
    pipe: Connection


def forking_context() -> ForkServerContext:
    """Processes of this context start in hundredths of a second, because their server has imported torch."""
    context = multiprocessing.get_context("forkserver")
    used = [module for imported, module in PRELOAD_IF_USED.items() if imported in sys.modules]
    # What a rank imports beside the test itself: modules of the package, and helpers of the tests.
    ours = sorted(name for name in sys.modules if name.startswith(OURS) and not name.startswith(NOT_FOR_RANKS))
    context.set_forkserver_preload(PRELOAD + used + ours)
    return context


def _start(job: _Job) -> list[_Rank]:
    context = forking_context()
    ranks = []
    for rank in range(job.world_size):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_rank_main, args=(rank, job, sender), name=f"rank{rank}", daemon=True)
        process.start()
        sender.close()
        ranks.append(_Rank(process, receiver))
    return ranks


def _collect(ranks: list[_Rank], deadline: float) -> list[_Report]:
    """Reports as they arrive, until all are in, the deadline passes, or shortly after the first failure."""
    pending = {rank.pipe: number for number, rank in enumerate(ranks)}
    reports: list[_Report] = []
    while pending and (left := deadline - time.monotonic()) > 0:
        for pipe in wait(list(pending), timeout=left):
            assert isinstance(pipe, Connection)
            number = pending.pop(pipe)
            reports.append(_receive(pipe, number))
            if reports[-1].failure is not None:
                deadline = min(deadline, time.monotonic() + REPORT_S)
    return reports


def _receive(pipe: Connection, rank: int) -> _Report:
    try:
        report = pickle.loads(pipe.recv_bytes())
    except EOFError:
        failure = "it ended without a word (killed, or left through os._exit)"
        # Time zero: a death causes the others' broken connections, however late the parent notices it.
        return _Report(rank, failure=failure, kind="Died", at=0.0)
    assert isinstance(report, _Report)
    return report


def _end(ranks: list[_Rank]) -> None:
    """Leaves no process behind: ranks that have reported exit by themselves, the others are killed."""
    for rank in ranks:
        rank.pipe.close()
    patience = time.monotonic() + 5 * REPORT_S
    for rank in ranks:
        rank.process.join(max(0.0, patience - time.monotonic()))
        if rank.process.is_alive():
            rank.process.kill()
            rank.process.join()


def _show_output(folder: str, world_size: int) -> None:
    print(_output(folder, world_size), end="")


def _output(folder: str, world_size: int) -> str:
    lines = []
    for rank in range(world_size):
        log = _log(folder, rank)
        if log.exists():
            lines += [f"[rank {rank}] {line}" for line in log.read_text(errors="replace").splitlines()]
    return "".join(f"{line}\n" for line in lines)


def _all_succeeded(reports: list[_Report], ranks: list[_Rank], job: _Job) -> list[_Report]:
    """The reports in rank order, or RankFailure."""
    name = getattr(job.function, "__name__", repr(job.function))
    failures = sorted((report for report in reports if report.failure is not None), key=lambda report: report.at)
    if failures:
        first = failures[0]
        title = f"{name}: rank {first.rank} of {job.world_size} failed first ({len(failures)} reported a failure)"
        raise RankFailure(_message(title, first.failure or "", job), first.rank, first.kind)
    if len(reports) < job.world_size:
        silent = sorted(set(range(job.world_size)) - {report.rank for report in reports})
        title = f"{name}: ranks {silent} of {job.world_size} did not end within {job.timeout_s} s"
        raise RankFailure(_message(title, "", job), silent[0], "Timeout")
    return sorted(reports, key=lambda report: report.rank)


def _message(title: str, failure: str, job: _Job) -> str:
    return f"{title}\n{failure}\n{_output(job.folder, job.world_size)}"


# --- the rank's side ---------------------------------------------------------------------------------------------


def _log(folder: str, rank: int) -> Path:
    return Path(folder) / f"rank{rank}.log"


def _rank_main(rank: int, job: _Job, pipe: Connection) -> None:
    gc.freeze()  # loaded before this rank: garbage collections need not scan it
    redirect_output(_log(job.folder, rank))
    os.environ.clear()
    os.environ.update(job.environment, RANK=str(rank), LOCAL_RANK=str(rank))
    # Shows where a hanging rank is shortly before the parent gives up ...
    faulthandler.dump_traceback_later(job.timeout_s * 0.9, exit=False, file=sys.stderr)
    if job.environment.get("HF_ZERO_LATE_DEVICE") == "1":
        from tests.support.late import use_if_asked_for  # imports the package, which not every job needs

        use_if_asked_for()
    report = _run(rank, job)
    # ... and makes the rank exit if the parent is gone, whatever the teardown below waits for.
    faulthandler.dump_traceback_later(10, exit=True, file=sys.stderr)
    _send(pipe, report)
    _destroy_group()


def redirect_output(log: Path) -> None:
    """Redirects both streams, including those of C++ code, to this rank's file."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def _run(rank: int, job: _Job) -> _Report:
    import torch

    torch.set_num_threads(1)
    seed()
    warnings.filterwarnings("error", module=OUR_MODULES)  # as pyproject.toml has it for the tests themselves
    try:
        if job.init:
            _make_group(rank, job)
        return _Report(rank, value=job.function(rank, *job.args))
    except BaseException as error:  # noqa: BLE001 (whatever ends a rank is reported, also SystemExit)
        return _Report(rank, failure=traceback.format_exc(), kind=type(error).__name__, at=time.time())


def _make_group(rank: int, job: _Job) -> None:
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=job.environment[RENDEZVOUS_VARIABLE],
        rank=rank,
        world_size=job.world_size,
        timeout=timedelta(seconds=job.timeout_s),
    )


def _send(pipe: Connection, report: _Report) -> None:
    """Sends by value (plain pickle), so that tensors outlive this process; a value that does not pickle fails."""
    try:
        payload = pickle.dumps(report)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        failure = f"the returned value cannot be pickled: {error!r}"
        payload = pickle.dumps(_Report(report.rank, failure=failure, kind=type(error).__name__, at=time.time()))
    pipe.send_bytes(payload)
    pipe.close()


def _destroy_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
