"""A job as one Python file that needs only hf_zero, torch and the training libraries (transformers, accelerate, peft).

The file contains the very code that the tests run, so it behaves the same. It starts its own ranks.
"""

from __future__ import annotations

from tests.hostile.script import without_imports_of_ours
from tests.integration import flows
from tests.metamorphic import body, comparing, libraries, model, own, spec
from tests.metamorphic.spec import Job
from tests.support import as_json, own_optimizers

HANG_S = 120

_HEAD = '''"""Metamorphic job {seed}: {kind}.

    python {name}

{description}
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import socket
import subprocess
import sys
import tempfile
'''

_TAIL = '''

JOB = r"""
{json}
"""


def play(path: str) -> None:
    """One rank of a segment."""
    faulthandler.dump_traceback_later({hang_s}, exit=True)  # where it hangs
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    with open(path, "rb") as file:
        segment = pickle.load(file)
    rank = int(os.environ["RANK"])
    result = run_segment(segment, rank, segment.folder)
    with open(f"{{path}}.{{rank}}", "wb") as file:
        pickle.dump(result, file)


def ranks_of(segment: Segment) -> list[RankResult]:
    path = f"{{segment.folder}}/segment-{{segment.start}}"
    with open(path, "wb") as file:
        pickle.dump(segment, file)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = segment.shape.world
    common = {{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1"}}
    common["LOCAL_WORLD_SIZE"] = str(world)
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, path], env={{**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}}
        )
        for rank in range(world)
    ]
    if any([rank.wait() for rank in ranks]):
        sys.exit("a rank has failed")
    results = []
    for rank in range(world):
        with open(f"{{path}}.{{rank}}", "rb") as file:
            results.append(pickle.load(file))
    return results


def main() -> None:
    job, results, is_wrong = Job.from_json(JOB), [], False
    for number, run in enumerate(job.runs):
        with tempfile.TemporaryDirectory() as folder:
            parts = [(segment.shape, ranks_of(segment)) for segment in segments(job, run, folder)]
        results.append(together(job, parts))
        text = results[-1] if isinstance(results[-1], str) else ""
        if number and not text:
            text, _ = difference(job, run, results[-1], results[0])
        print(f"run {{number}}: {{text or 'right'}}", flush=True)
        is_wrong |= bool(text)
    sys.exit(is_wrong)


if __name__ == "__main__":
    play(sys.argv[1]) if len(sys.argv) > 1 else main()
'''


def script_of(job: Job, kind: str, name: str = "script.py") -> str:
    """The text of a script that exits with 0 if all runs agree."""
    parts = [as_json, spec, model, body, comparing]
    if job.task.driver == "own":
        parts += [own_optimizers, own]
    elif job.task.driver != "engine":
        parts += [flows, libraries]
    description = describe(job).replace("\n", "\n    ")
    head = _HEAD.format(seed=job.task.seed, kind=kind, name=name, description=f"    {description}".rstrip())
    sources = "".join(without_imports_of_ours(part) for part in parts)
    return head + sources + _TAIL.format(json=job.to_json(indent=1), hang_s=HANG_S)


def describe(job: Job) -> str:
    """A readable description of a job's non-default values."""
    lines = [f"{job.task.model} by {job.task.driver}: {_words(job.task, spec.Task(0))}"]
    for number, run in enumerate(job.runs):
        lines.append(f"run {number}: {_words(run.first, spec.Shape())}")
        if run.resume_at:
            lines.append(f"       after {run.resume_at} updates: {_words(run.second, spec.Shape())}")
    return "\n".join(lines)


def _words(one: spec.Task | spec.Shape, plain: spec.Task | spec.Shape) -> str:
    shown = {name: value for name, value in vars(one).items() if value != getattr(plain, name)}
    always = ("world", "stage") if isinstance(one, spec.Shape) else ("updates", "precision", "optimizer")
    shown = {**{name: getattr(one, name) for name in always}, **shown}
    return ", ".join(f"{name}={value}" for name, value in shown.items() if name not in ("driver", "model", "seed"))
