"""The example for sbatch under a real Slurm of two nodes: ranks placed by srun, the losses of one node."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.multinode.cluster import AS_ROOT, ROOT, Cluster, launch_words, run_on, wait_for
from tests.multinode.slurm import missing, slurm
from tests.multinode.training import Training

pytestmark = [pytest.mark.multinode, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def slurm_variables(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    if missing():
        pytest.skip("needs " + ", ".join(missing()) + " (make test-multinode installs it)")
    with slurm(cluster, tmp_path_factory.mktemp("slurm")) as variables:
        yield variables


def test_the_sbatch_example(
    cluster: Cluster, slurm_variables: dict[str, str], training: Training, tmp_path: Path
) -> None:
    script, *arguments = training.words(tmp_path / "run", 4)
    output, log = tmp_path / "sbatch", tmp_path / "job"
    log.touch()
    here = ["--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=0", f"--output={log}"]
    words = ["sbatch", "--wait", *here, ROOT / "examples/clusters/slurm.sbatch", *arguments]
    variables = {**training.environment, **slurm_variables, "PYTHON": sys.executable, "TMPDIR": str(tmp_path)}
    with training.as_on_one_node(tmp_path / "run", cluster[1]):
        assert wait_for([cluster[0].start(words, variables, output)], [output, log]) == [0]


def test_without_an_allocation_srun_makes_one(
    cluster: Cluster, slurm_variables: dict[str, str], hostfile: Path, tmp_path: Path
) -> None:
    script = tmp_path / "tell.py"
    script.write_text(
        "import os, sys\n"
        f"path = {str(tmp_path)!r} + '/told' + os.environ['RANK']\n"
        "open(path, 'w').write(' '.join([os.uname().nodename, os.environ['LOCAL_RANK'], *sys.argv[1:]]))\n"
    )
    words = launch_words("--hostfile", hostfile, "--launcher", "slurm", script, "$(reboot)")
    assert run_on(cluster[0], words, slurm_variables, tmp_path / "launcher") == 0
    told = [(tmp_path / f"told{rank}").read_text() for rank in range(4)]
    expected = [("node1", 0), ("node1", 1), ("node2", 0), ("node2", 1)]
    assert told == [f"{node} {rank} --local_rank={rank} $(reboot)" for node, rank in expected]


def test_the_first_failure_of_a_job_under_slurm(
    cluster: Cluster, slurm_variables: dict[str, str], hostfile: Path, tmp_path: Path
) -> None:
    script = tmp_path / "fail.py"
    script.write_text(
        "import os, sys, time\nif os.environ['RANK'] == '3': sys.exit('rank 3 has no data')\ntime.sleep(120)\n"
    )
    output = tmp_path / "launcher"
    words = launch_words("--hostfile", hostfile, "--launcher", "slurm", script)
    assert run_on(cluster[0], words, slurm_variables, output) == 1
    assert output.read_text().splitlines()[-2:] == [
        "hf-zero launch: rank 3 on node2 failed first (exit status 1). Its last output:",
        "  rank 3 has no data",
    ]


def test_ranks_that_srun_and_mpirun_start_directly_find_each_other(
    cluster: Cluster, slurm_variables: dict[str, str], tmp_path: Path
) -> None:
    script = tmp_path / "sum.py"
    script.write_text(
        "import os, sys, torch, hf_zero\n"
        "hf_zero.init_distributed('gloo', distributed_port=29641)\n"
        "value = torch.ones(1) * (1 + torch.distributed.get_rank())\n"
        "torch.distributed.all_reduce(value)\n"
        "with open(sys.argv[1] + os.environ['RANK'], 'w') as file:\n"
        "    file.write(f\"{value.item()} {os.uname().nodename} {os.environ['LOCAL_RANK']}\")\n"
    )
    ways = {
        "srun": ["srun", "--nodes=2", "--ntasks=4", "--ntasks-per-node=2"],
        "openmpi": ["mpirun.openmpi", "-n", "2", "--bind-to", "none", "--oversubscribe"],
        "mpich": ["mpirun.mpich", "-n", "2"],
    }
    for way, words in ways.items():
        command = [*words, sys.executable, script, tmp_path / f"{way}-"]
        variables = {**slurm_variables, **AS_ROOT, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        assert run_on(cluster[0], command, variables, tmp_path / way) == 0
    told = {way: [path.read_text() for path in sorted(tmp_path.glob(f"{way}-*"))] for way in ways}
    assert told["srun"] == ["10.0 node1 0", "10.0 node1 1", "10.0 node2 0", "10.0 node2 1"]
    assert told["openmpi"] == told["mpich"] == ["3.0 node1 0", "3.0 node1 1"]
