"""Slurm on the two nodes: munge for authentication, slurmctld on the first node, slurmd on both."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.multinode.cluster import Cluster

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol")
_CONFIG = """
ClusterName=two
SlurmctldHost={first}({address})
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
NodeName={first},{second} CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=30 State=UP
"""


def missing() -> list[str]:
    return [program for program in PROGRAMS if shutil.which(program) is None]


@contextmanager
def slurm(nodes: Cluster, folder: Path) -> Iterator[dict[str, str]]:
    """Slurm's daemons, and the environment variables for its commands."""
    variables = {"SLURM_CONF": str(folder / "slurm.conf")}
    for name in ("state", *(f"spool-{node.name}" for node in nodes)):
        (folder / name).mkdir()
    config = _CONFIG.format(
        first=nodes[0].name,
        second=nodes[1].name,
        address=nodes[0].address,
        folder=folder,
        cpus=os.cpu_count(),
    )
    (folder / "slurm.conf").write_text(config)
    # Set explicitly, so that slurmd does not look for cgroups, which a container may not have. They are not used.
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    daemons = [_munge(folder)]
    try:
        daemons.append(nodes[0].start(["slurmctld", "-D"], variables, folder / "slurmctld.out"))
        daemons += [node.start(["slurmd", "-D"], variables, folder / f"slurmd-{node.name}.out") for node in nodes]
        _await_nodes(nodes, variables, folder)
        yield variables
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()


def _munge(folder: Path) -> subprocess.Popen[bytes]:
    """munge's daemon; both nodes reach its socket through the shared file system."""
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o600)
    files = [f"--{name}={folder}/munge.{name.split('-')[0]}" for name in ("socket", "pid-file", "log-file")]
    # Its own checks require folders that only root may enter; ours is under a temporary one.
    command = ["munged", "--foreground", "--force", f"--key-file={key}", f"--seed-file={folder / 'munge.seed'}", *files]
    with (folder / "munged.out").open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=output)


def _await_nodes(nodes: Cluster, variables: dict[str, str], folder: Path) -> None:
    deadline = time.monotonic() + 60
    output = folder / "sinfo"
    while True:
        nodes[0].start(["sinfo", "--noheader", "--format=%T %D"], variables, output).wait()
        if output.read_text().split() == ["idle", "2"]:
            return
        logs = "\n".join(f"{log.name}: {log.read_text()[-1500:]}" for log in sorted(folder.glob("*.out")))
        logs += "\n".join(f"{log.name}: {log.read_text()[-1500:]}" for log in sorted(folder.glob("*.log")))
        assert time.monotonic() < deadline, f"{output.read_text()}\n{logs}"
        time.sleep(0.3)
