"""Autotuning: trials with the real launcher; failures are results; the best config is written and run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_zero.comm.collectives import LoneCollectives
from hf_zero.config import ConfigError, resolve
from hf_zero.extras.autotuning import Autotuning, TrialPolicy, tuning
from hf_zero.extras.autotuning.measure import Trial, measure, ranked
from hf_zero.extras.autotuning.tuning import (
    Experiment,
    Result,
    Search,
    best_of,
    experiment_of,
    judge,
    micro_batches,
    read_search,
    run_search,
    stages_of,
    with_config,
)
from hf_zero.features import EngineTools, Progress
from hf_zero.planning.candidates import Training
from tests.planning.material import config_folder, imitate_trials, planned

SCRIPT = Path(__file__).with_name("tuned_script.py")


def search(raw: dict[str, Any], *more: str, flag: str | None = None, **section: Any) -> Search:
    words = ("--num_gpus", "2", "x.py", "--deepspeed", "ds.json", *more)
    return Search(raw, Autotuning(enabled=True, **section), words, 4, flag)


def test_stages_and_micro_batches() -> None:
    assert stages_of({}) == stages_of({"zero_optimization": {"stage": "all"}}) == [0, 1, 2, 3]
    assert stages_of({"zero_optimization": {"stage": 2}}) == [2]
    assert stages_of({"zero_optimization": {"stage": [1, 3]}}) == [1, 3]
    assert micro_batches(search({"train_micro_batch_size_per_gpu": [8, 2]})) == [2, 8]
    assert micro_batches(search({"train_micro_batch_size_per_gpu": 3})) == [3, 6, 12]
    assert micro_batches(search({})) == [None], "nobody could tell the script"
    flagged = search({}, "--batch", "4", flag="--batch", max_train_micro_batch_size_per_gpu=10)
    assert micro_batches(flagged) == [4, 8]
    assert micro_batches(search({}, flag="--b", min_train_micro_batch_size_per_gpu=5)) == [5, 10, 20]


def test_a_trial_changes_stage_and_batch_and_nothing_else() -> None:
    raw = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "fp16": {}}
    found = experiment_of(search(raw, "--batch=2", flag="--batch"), 3, 4)
    assert found.name == "z3_tmbspg4" and found.command[-1] == "--batch=4"
    assert found.config == {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 3}, "fp16": {}}
    auto = experiment_of(search({"train_micro_batch_size_per_gpu": "auto"}, flag="--b"), 1, 2)
    assert auto.config["train_micro_batch_size_per_gpu"] == "auto" and auto.command[-2:] == ("--b", "2")
    assert with_config(["a", "--deepspeed=x.json"], 1, "y.json") == ["a", "--deepspeed=y.json"]


def test_what_a_trial_died_of() -> None:
    assert judge(1, "", "x\ntorch.OutOfMemoryError: CUDA out of memory.\ny")[0] == "out of memory"
    assert judge(1, "DoesNotFit: 2 rank(s) need", "")[0] == "out of memory"
    assert judge(-9, "", "") == ("out of memory", "killed by the system")
    assert judge(1, "", "ValueError: no")[:2] == ("failed", "ValueError: no")
    assert judge(None, "", "")[0] == "ran too long" and "end_profile_step" in judge(0, "", "")[1]


def run_with(found: dict[str, dict[str, float]], monkeypatch: pytest.MonkeyPatch, what: Search) -> list[str]:
    def run(_: Search, experiment: Experiment) -> Result:
        metrics = found.get(experiment.name, {})
        return Result(experiment, "ok" if metrics else "out of memory", metrics)

    monkeypatch.setattr(tuning, "_run", run)
    results = list(run_search(what))
    best = best_of(results, what.section.metric)
    return [*(result.experiment.name for result in results), "best", best.experiment.name if best else "none"]


def test_memory_ends_a_stage_and_small_gains_do_too(monkeypatch: pytest.MonkeyPatch) -> None:
    what = search({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": [0, 2]}})
    rates = {"z0_tmbspg1": 10.0, "z2_tmbspg1": 9.0, "z2_tmbspg2": 20.0, "z2_tmbspg4": 20.5}
    found = {name: {"throughput": rate, "latency": 1 / rate} for name, rate in rates.items()}
    assert run_with(found, monkeypatch, what) == ["z0_tmbspg1", "z0_tmbspg2", *list(rates)[1:], "best", "z2_tmbspg4"]
    least = search(dict(what.raw), metric="latency", num_tuning_micro_batch_sizes=1)
    slow = {"z0_tmbspg1": {"throughput": 1.0, "latency": 2.0}, "z2_tmbspg1": {"throughput": 1.0, "latency": 1.0}}
    assert run_with(slow, monkeypatch, least)[-1] == "z2_tmbspg1", "the quickest, where DeepSpeed takes the slowest"
    few = search(dict(what.raw), tuner_num_trials=2)
    assert len(run_with(found, monkeypatch, few)) == 2 + 2
    more = search({"train_micro_batch_size_per_gpu": [1], "zero_optimization": {"stage": 0}}, fast=False)
    assert run_with(found, monkeypatch, more)[1:3] == ["z0_tmbspg1_rbs5e+07", "z0_tmbspg1_rbs5e+08"]
    assert run_with({}, monkeypatch, what)[-1] == "none"


def test_a_search_has_to_be_asked_for(tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    config.write_text('{"zero_optimization": {"stage": "all"}}')
    with pytest.raises(ConfigError, match="the config must enable autotuning, too"):
        read_search(["x.py", "--deepspeed", str(config)], 3)
    with pytest.raises(ConfigError, match="name no config"):
        read_search(["x.py", "--deepspeed", "none"], 3)
    config.write_text('{"autotuning": {"enabled": true, "metric": "FLOPS_per_gpu", "tuner_type": "model_based"}}')
    with pytest.raises(ConfigError, match="2 problems"):
        read_search(["x.py", f"--deepspeed={config}"], 2)


def test_the_section_in_a_run_of_its_own() -> None:
    both = {"train_batch_size": 2, "autotuning": {"enabled": True}}
    assert not resolve(both, world_size=1).extras, "without the launcher's option it trains as ever"
    both["autotuning"] = {"enabled": True, "metric_path": "m.json", "start_profile_step": 1, "end_profile_step": 2}
    assert resolve(both, world_size=1).extras["autotuning"] == TrialPolicy(path="m.json", first=1, last=2)
    both["autotuning"] = {"enabled": True, "start_profile_step": 5}
    with pytest.raises(ConfigError, match="greater than start_profile_step"):
        resolve(both, world_size=1)


def test_a_trial_writes_and_ends(tmp_path: Path) -> None:
    trial = Trial(TrialPolicy(path=str(tmp_path / "m.json"), first=1, last=3), samples=4)
    trial.begin(EngineTools(lambda _: None, lambda _: lambda: None, LoneCollectives()))
    trial.after_step(Progress(step=1), applied=True)
    trial.after_step(Progress(step=2), applied=True)
    with pytest.raises(SystemExit) as ended:
        trial.after_step(Progress(step=3), applied=True)
    found = json.loads((tmp_path / "m.json").read_text())
    assert ended.value.code == 0 and found["throughput"] == pytest.approx(4 / found["latency"])


def test_a_trial_resumed_beyond_its_start_does_not_end(tmp_path: Path) -> None:
    trial = Trial(TrialPolicy(path=str(tmp_path / "m.json"), first=1, last=3), samples=4)
    trial.after_step(Progress(step=3), applied=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_tune_and_run_through_the_launcher(tmp_path: Path) -> None:
    """Two micro-batches at one stage on 2 ranks, the larger one out of memory; then training with the best."""
    config = {"zero_optimization": {"stage": [2]}, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    config["autotuning"] = {"enabled": True, "start_profile_step": 1, "end_profile_step": 3}
    config["train_micro_batch_size_per_gpu"] = "auto"
    (tmp_path / "ds.json").write_text(json.dumps(config))
    words = ["launch", "--num_gpus", "2", "--autotuning", "run", str(SCRIPT), "--deepspeed", "ds.json", "--wall", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parents[3])}
    command = [sys.executable, "-m", "hf_zero", *words, "--steps", "5"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    results = tmp_path / "autotuning_results"
    summary = (results / "summary.txt").read_text()
    assert "| z2_tmbspg1 | ok |" in summary and "| z2_tmbspg2 | out of memory |" in summary
    assert json.loads((results / "z2_tmbspg1" / "metrics.json").read_text())["samples_per_update"] == 2
    assert json.loads((results / "ds_config_optimal.json").read_text())["zero_optimization"] == {"stage": 2}
    assert "z2_tmbspg1" in done.stdout
    assert "--per_device_train_batch_size 1" in (results / "cmd_optimal.txt").read_text()
    assert json.loads((tmp_path / "trained.json").read_text()) == {"micro": 1, "steps": 5}


def test_measured_candidates_rank_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = planned("40M", Training(length=32, checkpointing=False))
    asked = imitate_trials(monkeypatch, rate=lambda number: float(number) if number > 1 else 0.0)
    measured = measure(found, 3, tmp_path)
    assert [each.tokens_per_s for each in measured] == [None, 64, 96]
    assert ranked(found, measured).chosen is measured[2].estimate and ranked(found, measured[:1]).chosen is None
    for experiment in asked:
        assert resolve(dict(experiment.config), world_size=8).batch.train_batch_size == 8
        assert experiment.command[experiment.place - 1] == "--deepspeed"
    with pytest.raises(ConfigError, match="on this host only"):
        measure(planned("40M", Training(length=32), nodes=2), 1, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "number"), [("", 4), ("--tensor-parallel 2", 2), ("--sequence-parallel 2", 4)])
def test_measure_through_the_launcher(flags: str, number: int, tmp_path: Path) -> None:
    """All candidates of a tiny model on 2 ranks of this CPU."""
    folder = config_folder(tmp_path / "model", hidden_size=64)
    words = ["plan", folder, "--gpu", "cpu", "--gpus-per-node", "2", "--seq-length", "16", "--precision", "fp32"]
    words += ["--measure", "4", "--measure-dir", str(tmp_path / "out"), "--json", "--gradient-checkpointing", "off"]
    words += flags.split()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parents[3])}
    command = [sys.executable, "-m", "hf_zero", *words]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=290)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert [each["outcome"] for each in found["measured"]] == ["ok"] * number
    best = max(found["measured"], key=lambda each: each["tokens_per_second"])
    assert found["chosen"] == best["name"]
