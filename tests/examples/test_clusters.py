"""The examples for clusters, as far as one machine can test them: Ray runs, the Kubernetes manifest fits its schema."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import train_clm
import yaml
from torch.distributed.run import get_args_parser

from tests.examples.conftest import EXAMPLES
from tests.examples.test_train_clm import SMALL
from tests.support.launch import MARK, processes_marked

CLUSTERS = EXAMPLES / "clusters"


def manifest() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((CLUSTERS / "pytorchjob.yaml").read_text())
    return document


def worker_container() -> dict[str, Any]:
    [container] = manifest()["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    return dict(container)


def departures(value: Any, kind: str, models: Any, path: str) -> list[str]:
    """Differences, by path, between `value` and the generated model class `kind`."""
    if nested := re.fullmatch(r"list\[(.+)\]", kind):
        if not isinstance(value, list):
            return [f"{path}: not a list"]
        return [line for i, item in enumerate(value) for line in departures(item, nested[1], models, f"{path}[{i}]")]
    if nested := re.fullmatch(r"dict\(str, (.+)\)", kind):
        if not isinstance(value, dict):
            return [f"{path}: not a mapping"]
        return [line for k, item in value.items() for line in departures(item, nested[1], models, f"{path}.{k}")]
    plain = {"str": str, "int": int, "bool": bool}.get(kind)
    if plain is not None:
        return [] if type(value) is plain else [f"{path}: {value!r} is not of type {kind}"]
    model = getattr(models, kind)
    names = {json_name: name for name, json_name in model.attribute_map.items()}
    found = []
    for key, item in value.items():
        if key not in names:
            found.append(f"{path}.{key}: unknown")
        else:
            found += departures(item, model.openapi_types[names[key]], models, f"{path}.{key}")
    return found


def test_kubernetes_manifest_fits_the_schema_of_its_operator() -> None:
    models = pytest.importorskip("kubeflow.training.models", reason="needs the extra `clusters`: kubeflow-training")
    job = manifest()
    assert departures(job, "KubeflowOrgV1PyTorchJob", models, "job") == []
    job["spec"]["elasticPolicy"]["nprocPerNode"] = "8"
    job["spec"]["nprocPerNode"] = 8
    assert departures(job, "KubeflowOrgV1PyTorchJob", models, "job") == [
        "job.spec.elasticPolicy.nprocPerNode: unknown",
        "job.spec.nprocPerNode: 8 is not of type str",
    ]


@pytest.mark.parametrize("num_pods", [2, 3, 4])
def test_kubernetes_manifest_starts_a_command_that_exists(num_pods: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(CLUSTERS))
    import elastic

    container = worker_container()
    assert container["name"] == "pytorch"
    launcher, *words = container["command"]
    assert launcher == "torchrun"
    options = get_args_parser().parse_args(words)
    root = EXAMPLES.parent
    assert root / options.training_script == CLUSTERS / "elastic.py"
    world_size = 8 * num_pods
    arguments = elastic.arguments_of_this_start(options.training_script_args, world_size)
    [config] = [word.partition("=")[2] for word in arguments if word.startswith("--deepspeed=")]
    assert (root / config).is_file()
    *_, training_args = train_clm.parse(
        [word for word in arguments if not word.startswith("--deepspeed")] + ["--use_cpu"]
    )
    assert training_args.save_steps == 500
    assert training_args.per_device_train_batch_size * training_args.gradient_accumulation_steps * world_size == 192
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    volumes = manifest()["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["volumes"]
    assert {volume["name"] for volume in volumes} == mounts


def start_ray(text_folder: Path, home: Path, mark: str) -> subprocess.Popen[str]:
    arguments = ["--do_train", "--use_cpu", "--bf16", "--deepspeed", "configs/zero2_bf16.json"]
    arguments += ["--train_files", str(text_folder / "*.py"), *SMALL, "--tokenizer_cache", str(home / "tokenizers")]
    arguments += ["--max_steps", "60", "--save_strategy", "steps", "--save_steps", "20", "--logging_steps", "10"]
    arguments += ["--report_to", "none", "--disable_tqdm", "true", "--output_dir", str(home / "output")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    environment |= {"HF_HOME": str(home / "hf"), MARK: mark}
    return subprocess.Popen(
        [sys.executable, str(CLUSTERS / "ray_train.py"), "--storage", str(home / "ray"), "--", *arguments],
        cwd=EXAMPLES.parent,
        env=environment,
        text=True,
        stdout=(home / "log").open("w"),
        stderr=subprocess.STDOUT,
    )


def losses(home: Path) -> dict[int, float]:
    state = json.loads((home / "output/checkpoint-60/trainer_state.json").read_text())
    return {entry["step"]: entry["loss"] for entry in state["log_history"] if "loss" in entry}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ray_restarts_a_lost_worker_from_the_last_checkpoint(text_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray.train", reason="needs the extra `clusters`: ray[train]")
    for name in ("calm", "hurt"):
        (tmp_path / name).mkdir()
    calm = start_ray(text_folder, tmp_path / "calm", "calm")
    assert calm.wait(timeout=400) == 0, (tmp_path / "calm/log").read_text()[-5000:]

    hurt = start_ray(text_folder, tmp_path / "hurt", "hurt")
    while hurt.poll() is None and not list((tmp_path / "hurt/ray").glob("*/checkpoint_*")):
        time.sleep(0.1)
    workers = [pid for pid in processes_marked("hurt") if "RayTrainWorker" in Path(f"/proc/{pid}/cmdline").read_text()]
    assert len(workers) == 2
    os.kill(workers[0], signal.SIGKILL)
    assert hurt.wait(timeout=400) == 0, (tmp_path / "hurt/log").read_text()[-5000:]

    assert (tmp_path / "hurt/log").read_text().count("training on 2 process(es)") == 2
    assert losses(tmp_path / "hurt") == losses(tmp_path / "calm")


@pytest.mark.parametrize(
    ("global_batch", "most", "world", "expected"),
    [(8, 4, 2, (4, 1)), (8, 4, 1, (4, 2)), (24, 4, 3, (4, 2)), (24, 5, 4, (3, 2)), (7, 4, 1, (1, 7))],
)
def test_elastic_ranks_share_the_global_batch(
    global_batch: int, most: int, world: int, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(CLUSTERS))
    import elastic

    assert elastic.share(global_batch, most, world) == expected
    with pytest.raises(ValueError, match="cannot be shared among 5 ranks"):
        elastic.share(global_batch * 5 + 1, most, 5)
    words = ["--global_batch_size", str(global_batch), "--per_device_train_batch_size", str(most), "--bf16"]
    assert elastic.arguments_of_this_start(words, world) == [
        "--resume_from_checkpoint", "last", "--per_device_train_batch_size", str(expected[0]),
        "--gradient_accumulation_steps", str(expected[1]), "--bf16",
    ]  # fmt: skip
