"""Compares `plan` with measured runs: bytes of model states, peak memory, and the choice of the fastest config.

    python -m bench.planning --name predictions            # 20 runs on 2 ranks, a few minutes; writes to bench/results

Every run trains a Llama, a Mixtral or a BERT on 2 local gloo ranks for a few steps in a separate process. Model states
are read from the engine. The peak is that of memory not backed by files, plus the rank's own shared blocks, above the
level after imports and one step in plain PyTorch (libraries keep workspaces); the maximum over ranks and rounds counts.
glibc returns freed memory to the system: with its defaults holes in the heap would be added, for which `plan` leaves
room (`hf_zero.planning.machine.HOLES`).

Artificial memory limits then simulate smaller machines: for each limit, is the config that `plan` chooses the fastest
of the runs that fit? There is one limit per run, SLACK above its measured peak, so that any prediction within a tenth
fits. `plan` leaves MARGIN of every limit free. Runs of one size alternate over several rounds. A run within ALIKE of
the fastest in the median of rounds, or faster in one of them, cannot be distinguished from it and counts as the
fastest. Time is the slower rank's CPU time, because others may use the machine.

    python -m bench.planning --architectures --name architectures     # 50 runs of ten kinds of models, only peaks
    python -m bench.planning --again bench/results/DATE-architectures.json     # its peaks with new predictions
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from bench.architectures import ARCHITECTURES, Architecture
from bench.surroundings import ROOT, about, keep, rank_environments

RANKS = 2
STEPS, WARM_UP = 3, 1
ROUNDS = 3
SLACK, MARGIN = 0.15, 0.05
ALIKE = 1.05  # CPU times on a shared machine resolve no smaller differences
TIMEOUT_S = 300


@dataclass(frozen=True)
class Size:
    """A model and its samples: a Llama, a Mixtral with 8 experts, or a BERT with dropout."""

    hidden: int
    intermediate: int
    layers: int
    vocabulary: int
    batch: int
    length: int
    precision: str = "fp32"  # many processors have no bf16
    kind: str = "llama"


SIZES = {
    "12m": Size(256, 688, 8, 8192, 1, 128, "bf16"),
    "25m": Size(384, 1088, 8, 8192, 2, 192),
    "60m": Size(640, 1728, 8, 12288, 1, 256),
    "experts": Size(256, 512, 4, 8192, 2, 384, kind="mixtral"),
    "dropout": Size(384, 1536, 6, 8192, 4, 384, kind="bert"),
}
# (stage, offload device of the optimizer, gradient checkpointing)
WAYS = {"stage 0": (0, None, False), "stage 2": (2, None, False), "stage 3": (3, None, False)} | {
    "stage 3, optimizer nvme": (3, "nvme", False)
}
PEAK_WAYS = {name: way for name, way in WAYS.items() if way[1] is None} | {
    "stage 0, checkpointing": (0, None, True),
    "stage 3, checkpointing": (3, None, True),
}


def config_of(size: Size | Architecture, folder: str) -> Any:
    """Writes config.json of a size into `folder`."""
    from transformers import BertConfig, LlamaConfig, MixtralConfig

    if isinstance(size, Architecture):
        size.config().save_pretrained(folder)
        return size.config()
    kinds: dict[str, tuple[Any, str]] = {
        "llama": (LlamaConfig, "LlamaForCausalLM"),
        "mixtral": (MixtralConfig, "MixtralForCausalLM"),
        "bert": (BertConfig, "BertForMaskedLM"),
    }
    make, architecture = kinds[size.kind]
    more = {} if size.kind == "bert" else {"num_key_value_heads": size.hidden // 64, "use_cache": False}
    config = make(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.hidden // 64,
        max_position_embeddings=size.length,
        architectures=[architecture],
        **more,
    )
    config.save_pretrained(folder)
    return config


def model_of(folder: str) -> Any:
    """A model with random weights, from the file that `config_of` has written."""
    from hf_zero.planning.model import build_model
    from hf_zero.planning.model import config_of as read

    return build_model(read(folder))


def predictions(folder: str, size: Size | Architecture, nvme: str | None, *, calibrates: bool = True) -> dict[str, Any]:
    """`plan` for this size on ranks of one host that share its memory: candidate -> estimate."""
    from hf_zero.planning.choose import plan
    from hf_zero.planning.machine import calibrated, hardware
    from hf_zero.planning.model import load_model

    config_of(size, folder)
    given = {"gpu": "cpu", "gpus_per_node": RANKS, "device_memory": "1T", "disk": "1T", "nvme_path": nvme}
    here = hardware(given)
    if calibrates:
        here = calibrated(here, size.precision)
        sys.stderr.write(f"{here.notes[-1]}\n")
    found = plan(load_model(folder, size.precision), here, _training(size, nvme))
    return {each.candidate.name: each for each in found.estimates}


def _training(size: Size | Architecture, nvme: str | None) -> Any:
    from hf_zero.planning.candidates import Training

    return Training(length=size.length, micro_batch=size.batch, precision=size.precision, nvme_path=nvme)  # type: ignore


# One rank of one run


def work(folder: str, size: Size | Architecture, way: str, out: str, nvme: str) -> None:
    """Train, and write the measurements to `out`."""
    import torch

    import hf_zero
    from bench.states import state_bytes
    from hf_zero.comm import collectives_for
    from hf_zero.device.host_memory import trim

    torch.set_num_threads(1)
    hf_zero.install()
    from deepspeed import initialize

    stage, optimizer, checkpointing = (WAYS | PEAK_WAYS)[way]
    torch.manual_seed(0)
    config = _ds_config(folder, size, stage, optimizer, nvme)
    wake_libraries(model_of(folder), size)
    gc.collect()
    trim()
    before = anonymous_bytes()
    model = model_of(folder)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    engine, *_ = initialize(model=model, model_parameters=_groups(model), config=config)
    steps = 1 if isinstance(size, Architecture) else STEPS

    def step() -> None:
        inputs = samples_of(model, size)
        engine.backward(engine(**inputs).loss)
        engine.step()

    for _ in range(WARM_UP):
        step()
    gc.collect()
    trim()
    seconds, walls = [], []
    with Peak() as peak:
        for _ in range(steps):
            started = time.process_time(), time.perf_counter()
            step()
            seconds.append(time.process_time() - started[0])
            walls.append(time.perf_counter() - started[1])
    shared = sum(block.numel() for block in collectives_for(torch.device("cpu")).buffers())
    found = {
        "states": state_bytes(engine),
        "peak": peak.most - before + shared,
        "shared": shared,
        "imports": before,
        "cpu_s": median(seconds),
        "wall_s": median(walls),
    }
    Path(f"{out}.{os.environ['RANK']}").write_text(json.dumps(found))
    engine.destroy()


def work_in_turn(name: str, ways: Sequence[str], folder: str, out: str, nvme: str) -> None:
    """Runs the ways one after another, each in a fork of this process, which has done their common imports once."""
    import hf_zero

    hf_zero.install()
    from deepspeed import initialize  # noqa: F401

    import hf_zero.planning.choose

    config_of((SIZES | ARCHITECTURES)[name], folder)
    model_of(folder)
    port = int(os.environ["MASTER_PORT"])
    for number, way in enumerate(ways):
        child = os.fork()
        if child == 0:
            os.environ["MASTER_PORT"] = str(port + number)
            work(folder, (SIZES | ARCHITECTURES)[name], way, f"{out}-{way.replace(' ', '-')}", nvme)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            raise RuntimeError(f"{name}, {way}: the process ended with an error")


def samples_of(model: Any, size: Size | Architecture) -> dict[str, Any]:
    """Random inputs and labels for the model."""
    import torch

    from hf_zero.planning.model import sample_inputs

    inputs = sample_inputs(model, size.batch, size.length, torch.device("cpu"))
    vocabulary = getattr(model.config, "vocab_size", 2)
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            inputs[name] = torch.randn_like(value)
        elif isinstance(value, torch.Tensor):
            inputs[name] = torch.randint_like(value, 2 if value.dim() == 1 else vocabulary)
    if "input_ids" in inputs and inputs["labels"].dim() > 1:
        inputs["labels"] = inputs["input_ids"]
    return inputs


def wake_libraries(model: Any, size: Size | Architecture) -> None:
    """Run a step of the same shapes before the training. What libraries keep from their first call is not part of a
    training: packed matrices and, on processors with bf16, code that oneDNN generates for every shape."""
    import torch

    model = model.to(torch.bfloat16 if size.precision == "bf16" else torch.float32).train()
    model(**samples_of(model, size)).loss.backward()
    torch.optim.AdamW(model.parameters(), fused=True).step()


def _ds_config(folder: str, size: Size | Architecture, stage: int, optimizer: str | None, nvme: str) -> dict[str, Any]:
    """The ds.json that `plan` would write, with Trainer's values filled in."""
    from hf_zero.planning.candidates import Candidate, ds_config

    config = ds_config(Candidate(stage, optimizer), _training(size, nvme))  # type: ignore[arg-type]
    config |= {"train_batch_size": size.batch * RANKS, "train_micro_batch_size_per_gpu": size.batch}
    config |= {"gradient_accumulation_steps": 1, "gradient_clipping": 1.0}
    if size.precision != "fp32":
        config[size.precision] = {"enabled": True}
    return config | {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}


def _groups(model: Any) -> list[dict[str, Any]]:
    """Parameter groups as in Trainer: biases and norms are not decayed."""
    parameters = list(model.parameters())
    decayed, rest = [p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() < 2]
    return [{"params": decayed, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}]


def anonymous_bytes() -> int:
    """Memory of this process that no file backs."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


class Peak:
    """The peak of `anonymous_bytes` inside a `with` block."""

    def __enter__(self) -> Peak:
        self.most = anonymous_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self.most = max(self.most, anonymous_bytes())

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


# All runs


def measure(folder: str, name: str, ways: Sequence[str], nvme: str) -> list[list[dict[str, Any]]]:
    """One run of each way; returns the results of all ranks."""
    out = f"{folder}/out-{name}"
    words = [sys.executable, "-m", "bench.planning", "--worker", name, ";".join(ways), folder, out, nvme]
    processes = []
    for environment in rank_environments(RANKS):
        # Freed memory is returned to the system, so that resident memory is memory in use.
        environment = {**environment, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
        processes.append(subprocess.Popen(words, cwd=ROOT, env=environment))
    deadline = time.monotonic() + TIMEOUT_S * len(ways)
    try:
        codes = [process.wait(max(1.0, deadline - time.monotonic())) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(codes):
        raise RuntimeError(f"{name}, {', '.join(ways)}: ranks ended with {codes}")
    return [
        [json.loads(Path(f"{out}-{way.replace(' ', '-')}.{rank}").read_text()) for rank in range(RANKS)] for way in ways
    ]


def compare(sizes: Sequence[str], rounds: int) -> Iterator[dict[str, Any]]:
    """Predictions and measurements, run by run."""
    for name in sizes:
        with tempfile.TemporaryDirectory() as folder:
            nvme = f"{folder}/drive"
            Path(nvme).mkdir()
            predicted = predictions(folder, SIZES[name], nvme)
            measured: dict[str, list[list[dict[str, Any]]]] = {way: [] for way in WAYS}
            for number in range(rounds):
                for way in list(WAYS)[:: 1 if number % 2 == 0 else -1]:  # alternating, so that drift affects all alike
                    measured[way] += measure(folder, name, [way], nvme)
                    sys.stderr.write(f"{name}, {way}, round {number + 1}\n")
            for way in WAYS:
                yield _run(name, way, predicted[way], measured[way])


def _run(
    name: str,
    way: str,
    estimate: Any,
    rounds: Sequence[Sequence[dict[str, Any]]],
    measured: dict[str, Any] | None = None,
) -> dict[str, Any]:
    ranks = [rank for each in rounds for rank in each]
    return {
        "size": name,
        "way": way,
        "predicted": {
            "states": estimate.memory.states,
            "peak": estimate.memory.device_total,
            "device": dict(estimate.memory.device),
            "seconds": estimate.seconds,
        },
        "measured": measured
        or {
            "states": max(sum(rank["states"].values()) for rank in ranks),
            "by_kind": ranks[0]["states"],
            "peak": max(rank["peak"] for rank in ranks),
            "peaks": [max(rank["peak"] for rank in each) for each in rounds],
            "shared": max(rank["shared"] for rank in ranks),
            "imports": max(rank["imports"] for rank in ranks),
            "cpu_s": [max(rank["cpu_s"] for rank in each) for each in rounds],
            "wall_s": [max(rank["wall_s"] for rank in each) for each in rounds],
        },
    }


def peaks(names: Sequence[str], again: Sequence[dict[str, Any]] = ()) -> Iterator[dict[str, Any]]:
    """Predicted and measured peaks of architectures; `again`: runs whose measured peaks are reused."""
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            predicted = predictions(folder, ARCHITECTURES[name], None, calibrates=False)
            before = {run["way"]: run["measured"] for run in again if run["size"] == name}
            rounds = (
                dict.fromkeys(PEAK_WAYS, [])
                if before
                else dict(zip(PEAK_WAYS, measure(folder, name, list(PEAK_WAYS), folder), strict=True))
            )
            for way in PEAK_WAYS:
                found = _run(name, way, predicted[way], [rounds[way]] if rounds[way] else [], before.get(way))
                sys.stderr.write(f"{name}, {way}: {off(found):+.1%} {found['predicted']['device']}\n")
                yield found


def off(run: dict[str, Any]) -> float:
    """Relative excess of the predicted peak over the measured one."""
    return float(run["predicted"]["peak"] / run["measured"]["peak"] - 1)


def peak_table(runs: Sequence[dict[str, Any]]) -> str:
    """One row per architecture, one column per way."""
    ways = list(PEAK_WAYS)
    within = [sum(abs(off(run)) <= bound for run in runs) for bound in (0.05, 0.10)]
    lines = [
        f"{within[0]} of {len(runs)} predicted peaks are within 5% of the measured ones, {within[1]} within 10%.",
        "",
    ]
    lines += ["| | " + " | ".join(ways) + " |", "|" + " --- |" * (1 + len(ways))]
    for name in dict.fromkeys(run["size"] for run in runs):
        cells = [f"{run['measured']['peak'] / 1e6:.0f} MB, {off(run):+.1%}" for run in runs if run["size"] == name]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def choices(runs: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """For each limit: the choice of `plan`, and the fastest run that fits."""
    for run in runs:
        limit = run["measured"]["peak"] * (1 + SLACK)
        same = [each for each in runs if each["size"] == run["size"]]
        fits = [each for each in same if each["predicted"]["peak"] <= limit * (1 - MARGIN)]
        least = min((each["predicted"]["seconds"] for each in fits), default=0.0)
        taken = next((each for each in fits if each["predicted"]["seconds"] <= least * 1.02), None)
        allowed = [each for each in same if each["measured"]["peak"] <= limit]
        fastest = min(allowed, key=_cpu_s)
        # A choice that exceeds the limit is wrong, however fast it is.
        ratios = [] if taken is None else _ratios(taken, fastest)
        right = taken in allowed and (median(ratios) <= ALIKE or min(ratios) <= 1)
        yield {
            "size": run["size"],
            "limit": limit,
            "taken": "nothing" if taken is None else taken["way"],
            "fastest": fastest["way"],
            "ratios": ratios,
            "right": right,
        }


def _ratios(taken: dict[str, Any], fastest: dict[str, Any]) -> list[float]:
    """CPU seconds of one over those of the other, round by round."""
    return [a / b for a, b in zip(taken["measured"]["cpu_s"], fastest["measured"]["cpu_s"])]


def _cpu_s(run: dict[str, Any]) -> float:
    return float(median(run["measured"]["cpu_s"]))


def table(runs: Sequence[dict[str, Any]], chosen: Sequence[dict[str, Any]]) -> str:
    """Both tables."""
    lines = ["| size | way | states, MB | predicted | | peak, MB | predicted | | CPU s per step | predicted |"]
    lines.append("|" + " --- |" * 10)
    for run in runs:
        measured, predicted = run["measured"], run["predicted"]
        cells = [run["size"], run["way"]]
        for kind in ("states", "peak"):
            off = predicted[kind] / measured[kind] - 1
            cells += [f"{measured[kind] / 1e6:.1f}", f"{predicted[kind] / 1e6:.1f}", f"{off:+.1%}"]
        lines.append("| " + " | ".join([*cells, f"{_cpu_s(run):.2f}", f"{predicted['seconds']:.2f}"]) + " |")
    lines += ["", "| size | limit, MB | taken | fastest | CPU s, over the fastest's | right |", "|" + " --- |" * 6]
    for each in chosen:
        right = "yes" if each["right"] else "no"
        ratios = " ".join(f"{ratio:.2f}" for ratio in each["ratios"])
        cells = [each["size"], f"{each['limit'] / 1e6:.0f}", each["taken"], each["fastest"], ratios, right]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """All runs, or one rank of one run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", nargs=5, metavar=("SIZE", "WAY", "FOLDER", "OUT", "DRIVE"), help="one rank")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--architectures", nargs="*", choices=ARCHITECTURES, help="measure these peaks (default: all)")
    parser.add_argument("--again", metavar="FILE", help="new predictions for a stored run of --architectures")
    parser.add_argument("--name", help="store the results under this name")
    arguments = parser.parse_args()
    if arguments.worker:
        name, way, folder, out, nvme = arguments.worker
        work_in_turn(name, way.split(";"), folder, out, nvme)
        return
    if arguments.architectures is not None or arguments.again:
        kept = json.loads(Path(arguments.again).read_text())["runs"] if arguments.again else ()
        names = arguments.architectures or list(dict.fromkeys(run["size"] for run in kept)) or list(ARCHITECTURES)
        found = []
        for run in peaks(names, kept):
            found.append(run)
            if arguments.name and run["way"] == list(PEAK_WAYS)[-1]:  # an interrupted run keeps what it has
                sizes = {each: asdict(ARCHITECTURES[each]) for each in names}
                _keep(arguments.name, found, [], peak_table(found), sizes)
        sys.stdout.write(peak_table(found))
        return
    runs = []
    for run in compare(arguments.sizes, arguments.rounds):
        runs.append(run)
        sys.stderr.write(table([run], []).splitlines()[2] + f" {run}\n")
    chosen = list(choices(runs))
    text = table(runs, chosen)
    sys.stdout.write(text)
    if arguments.name:
        _keep(arguments.name, runs, chosen, text, {name: asdict(replace(SIZES[name])) for name in arguments.sizes})


def _keep(name: str, runs: list[Any], chosen: list[Any], text: str, sizes: dict[str, Any]) -> None:
    run = {
        **about("bench.planning", "transformers"),
        "sizes": sizes,
        "runs": runs,
        "choices": chosen,
    }
    keep(run, f"`{run['command']}`, {run['date'][:10]}\n\n{text}", name)


if __name__ == "__main__":
    main()
