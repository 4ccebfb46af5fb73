"""`accelerate launch --use_hf_zero` with several machines: flags for the placement of ranks reach the workers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from tests.integration.test_launch_flag import SCRIPT, home, reports
from tests.support.launch import Finished, a_port, accelerate, launch


def started(folder: Path, *flags: object) -> Finished:
    # accelerate writes its environment into this file, to copy it to the other machines.
    environment = {**home(folder), "DS_ENV_FILE": str(folder / "environment")}
    return launch(SCRIPT, [], launcher=accelerate(*flags), environment=environment, timeout_s=250).check()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "ranks"),
    [
        ({}, 2),  # the same number on each machine
        ({"deepspeed_inclusion_filter": "localhost:0,2,3"}, 3),
        ({"deepspeed_exclusion_filter": "localhost:1"}, 3),
    ],
)
@pytest.mark.parametrize("as_file", [False, True], ids=["flags", "file"])
def test_hosts_and_filters_reach_our_launcher(
    settings: dict[str, str], ranks: int, as_file: bool, tmp_path: Path
) -> None:
    """This test's single host is enough to check who starts how many ranks."""
    (tmp_path / "hosts").write_text("localhost slots=4\n")
    machine = {"num_machines": 2, "num_processes": 4, "machine_rank": 0, "main_process_ip": "127.0.0.1"}
    ds = {"deepspeed_hostfile": str(tmp_path / "hosts"), "deepspeed_multinode_launcher": "pdsh", "zero_stage": 1}
    ds |= settings
    if as_file:
        path = tmp_path / "machine.yaml"
        path.write_text(yaml.safe_dump({**machine, "use_hf_zero": True, "use_cpu": True, "deepspeed_config": ds}))
        done = started(tmp_path, "--config_file", path)
    else:
        done = started(
            tmp_path, "--use_hf_zero", "--cpu", *(f"--{key}={value}" for key, value in (machine | ds).items())
        )
    found = reports(done)
    assert sorted(report["rank"] for report in found) == list(range(ranks))
    for report in found:
        assert (report["ranks"], report["backend"], report["stage"], report["HF_ZERO"]) == (ranks, "gloo", 1, "1")
        assert report["engine"] == "hf_zero.integration.engine.engine"


@pytest.mark.slow
@pytest.mark.parametrize("same_network", [False, True])
def test_two_launches_meet_as_two_machines(same_network: bool, tmp_path: Path) -> None:
    """`standard`: torch's own launcher on every machine, started by hand."""
    flags = ["--use_hf_zero", "--cpu", "--num_machines=2", "--num_processes=2", "--main_process_ip=127.0.0.1"]
    flags += [f"--main_process_port={a_port()}", "--deepspeed_multinode_launcher=standard"]
    flags += ["--zero_stage=3", *(["--same_network"] if same_network else [])]
    with ThreadPoolExecutor(2) as both:
        machines = list(both.map(lambda rank: started(tmp_path, *flags, f"--machine_rank={rank}"), range(2)))
    for rank, done in enumerate(machines):
        (report,) = reports(done)
        assert (report["rank"], report["ranks"], report["stage"], report["backend"]) == (rank, 2, 3, "gloo")
