"""torchft for comparison in `bench.chaos`: the same model, with each replica restarted on its own.

    python -m venv .torchft && .torchft/bin/python -m pip install torchft torch==2.13.0 transformers psutil
    python -m bench.chaos --torchft-python .torchft/bin/python ...

This follows torchft's README (its DistributedDataParallel and Optimizer): every replica holds the whole model. When one
is lost, the others continue without its share of the batch until it has fetched their weights. The launcher below acts
as a cluster's scheduler: it restarts a replica that has ended, and ends one that is stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
import torchft
from torchft.coordination import LighthouseServer

from bench.models import SIZES, build_model

_CLIPPED_AT = 1.0  # TrainingArguments' max_grad_norm


def launch(options: argparse.Namespace) -> None:
    """Start and restart the replicas until all have finished."""
    os.environ["RUST_LOG"] = "error"  # otherwise a dozen log lines per update
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=100, heartbeat_timeout_ms=500)
    words = [sys.executable, "-m", "bench.chaos_torchft", *sys.argv[1:], "--lighthouse", lighthouse.address()]
    running: dict[int, subprocess.Popen[bytes] | None] = dict.fromkeys(range(options.replicas))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    stopped: dict[int, float] = {}
    try:
        while running:
            for number, replica in [*running.items()]:
                code = None if replica is None else replica.poll()
                if replica is not None and code is None:
                    is_stopped = psutil.Process(replica.pid).status() == psutil.STATUS_STOPPED
                    since = stopped.setdefault(number, time.monotonic()) if is_stopped else stopped.pop(number, None)
                    if since is not None and time.monotonic() - since > options.stopped:
                        replica.kill()
                elif code == 0:
                    del running[number]
                else:
                    stopped.pop(number, None)
                    running[number] = subprocess.Popen([*words, "--replica", str(number)], start_new_session=True)
            time.sleep(0.02)
    finally:
        for replica in running.values():
            if replica is not None:
                replica.kill()
                replica.wait()
        lighthouse.shutdown()


class Parallel(torchft.DistributedDataParallel):  # type: ignore[misc, unused-ignore]
    """In torchft 0.2.0 an assertion in the hook requires a result from a failed reduction, which ends the replicas that
    should continue without the lost one."""

    @staticmethod
    def _comm_hook(state, bucket):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN205 (torch compares annotations)
        work = state.allreduce(bucket.buffer())
        work.wait()
        found = getattr(work.get_future(), "_fut", None)
        if found is None:
            found = torch.futures.Future()
            found.set_result(bucket.buffer())  # unused by `step`: the manager knows of the failure
        return found


def train(options: argparse.Namespace) -> None:
    """Train one replica."""
    size, limit = SIZES[options.size], timedelta(seconds=5)  # a stopped replica blocks the others for this long
    model = build_model(size)
    torch.manual_seed(0)
    rows = torch.randint(0, size.vocabulary, (64, size.length))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=limit),
        timeout=limit,
        load_state_dict=lambda state: (
            model.load_state_dict(state["model"]),
            optimizer.load_state_dict(state["states"]),
        ),
        state_dict=lambda: {"model": model.state_dict(), "states": optimizer.state_dict()},
        min_replica_size=1,
        init_sync=False,  # all start with the same weights
        replica_id=f"replica_{options.replica}",
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=options.lighthouse,
        hostname="localhost",
    )
    parallel, managed = Parallel(manager, model), torchft.Optimizer(manager, optimizer)
    while (step := manager.current_step()) < options.updates:
        first = (step * options.replicas + options.replica) * size.batch
        batch = rows[torch.arange(first, first + size.batch) % len(rows)]
        managed.zero_grad()
        time.sleep(options.pause)
        loss = parallel(input_ids=batch, labels=batch).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), _CLIPPED_AT)
        managed.step()
        if manager.current_step() > step and manager.participating_rank() == 0:
            share = manager.num_participants() / options.replicas
            line = {"update": manager.current_step(), "loss": float(loss), "norm": float(norm), "share": share}
            with options.results.open("a") as file:
                file.write(f"{json.dumps({**line, 'at': time.time()})}\n")
    manager.shutdown(wait=False)


def main() -> None:
    """Launch, or train as one replica."""
    parser = argparse.ArgumentParser()
    parser.add_argument("results", type=Path)
    parser.add_argument("updates", type=int)
    parser.add_argument("--size", choices=sorted(SIZES), required=True)
    parser.add_argument("--replicas", type=int, required=True)
    parser.add_argument("--pause", type=float, default=0.0, help="idle seconds per update")
    parser.add_argument("--stopped", type=float, default=0.5, help="seconds until a stopped replica counts as dead")
    parser.add_argument("--replica", type=int)
    parser.add_argument("--lighthouse")
    options = parser.parse_args()
    if options.replica is None:
        launch(options)
    else:
        torch.set_num_threads(1)
        train(options)


if __name__ == "__main__":
    main()
