"""Two nodes on one machine: network namespaces joined by a veth pair, each with its own name, sshd and /tmp.

    node1 10.213.77.1  <---- veth ---->  node2 10.213.77.2

A node has a separate view of the machine: network, host name, /etc/hosts, boot id, /dev/shm and temporary folder. All
other files are shared, as on a cluster with a network file system. /etc/hosts is like Debian's: a node's own name is
127.0.1.1, which is useless to the other node.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("node1", "node2")
ADDRESSES = ("10.213.77.1", "10.213.77.2")
INTERFACE = "eth0"
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
_SSHD = """
Port 22
HostKey {keys}/host
AuthorizedKeysFile {keys}/user.pub
PidFile none
PermitRootLogin yes
PasswordAuthentication no
UsePAM no
StrictModes no
UseDNS no
SetEnv TMPDIR={tmp}
"""
_CLIENT = """
Host *
  User root
  IdentityFile {keys}/user
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
"""
# Runs inside the new namespaces, without effect outside.
_BECOME_A_NODE = """
set -e
mount --make-rprivate /
hostname {name}
mount --bind {folder}/hosts /etc/hosts
mount --bind {folder}/boot_id /proc/sys/kernel/random/boot_id
mount --bind {keys}/config /etc/ssh/ssh_config
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs {tmp}
mkdir -p /run/sshd
exec /usr/sbin/sshd -D -e -f {folder}/sshd_config
"""


@dataclass(frozen=True)
class Node:
    """One node, which lives as long as its sshd."""

    name: str
    address: str
    sshd: int
    tmp: Path

    def start(self, command: Sequence[object], environment: Mapping[str, str], output: Path) -> subprocess.Popen[bytes]:
        """Starts a command on this node, with its output in a file."""
        words = ["nsenter", "--target", str(self.sshd), "--mount", "--net", "--uts", "--wd=" + str(ROOT)]
        with output.open("wb") as file:
            return subprocess.Popen(
                [*words, *map(str, command)],
                env={**os.environ, "TMPDIR": str(self.tmp), **environment},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def sent_bytes(self) -> int:
        """Bytes that this node has sent over the network so far."""
        # Not from /sys, which shows the interfaces of the namespace that mounted it.
        told = _run("nsenter", "--target", str(self.sshd), "--net", "ip", "-s", "-j", "link", "show", INTERFACE)
        return int(json.loads(told)[0]["stats64"]["tx"]["bytes"])


Cluster = tuple[Node, Node]


def missing() -> list[str]:
    """What this machine lacks for simulated nodes, in words."""
    lacks = [] if os.geteuid() == 0 else ["root"]
    programs = ("ip", "unshare", "nsenter", "ssh", "ssh-keygen", "pdsh", "mpirun.openmpi")
    lacks += [program for program in programs if shutil.which(program) is None]
    if not Path("/usr/sbin/sshd").exists():
        lacks.append("sshd")
    if not lacks and subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True).returncode:
        lacks.append("the right to make namespaces")
    return lacks


@contextmanager
def two_nodes(folder: Path, *, same_boot_id: bool = False) -> Iterator[Cluster]:
    """Two nodes with files under `folder`; removed at the end, with everything that runs on them."""
    token = secrets.token_hex(4)
    spaces = [f"hf_zero-{token}-{name}" for name in NAMES]
    servers: list[subprocess.Popen[bytes]] = []
    try:
        _make_network(spaces, [f"hfz{token}{side}" for side in "ab"])
        keys = _make_keys(folder)
        for index, space in enumerate(spaces):
            place = _prepare(folder, index, keys, boot_id=0 if same_boot_id else index)
            script = _BECOME_A_NODE.format(name=NAMES[index], folder=place, keys=keys, tmp=folder / "tmp")
            command = ["ip", "netns", "exec", space, "unshare", "--mount", "--uts", "sh", "-c", script]
            with (place / "sshd.log").open("wb") as log:
                servers.append(subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True))
        nodes = [Node(*facts) for facts in zip(NAMES, ADDRESSES, (s.pid for s in servers), [folder / "tmp"] * 2)]
        _await_ssh(nodes, folder)
        yield nodes[0], nodes[1]
    finally:
        for space in spaces:
            _end_all_in(space)
        for server in servers:
            server.kill()
            server.wait()
        for space in spaces:
            subprocess.run(["ip", "netns", "delete", space], capture_output=True)


def _make_network(spaces: Sequence[str], ends: Sequence[str]) -> None:
    for space in spaces:
        _run("ip", "netns", "add", space)
    _run("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
    for space, end, address in zip(spaces, ends, ADDRESSES):
        _run("ip", "link", "set", end, "netns", space, "name", INTERFACE)
        _run("ip", "-n", space, "address", "add", f"{address}/24", "dev", INTERFACE)
        for link in (INTERFACE, "lo"):
            _run("ip", "-n", space, "link", "set", link, "up")


def _make_keys(folder: Path) -> Path:
    keys = folder / "ssh"
    keys.mkdir()
    for key in ("host", "user"):
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(keys / key))
    (keys / "config").write_text(_CLIENT.format(keys=keys))
    return keys


def _prepare(folder: Path, index: int, keys: Path, boot_id: int) -> Path:
    place = folder / NAMES[index]
    place.mkdir()
    other = 1 - index
    hosts = f"127.0.0.1 localhost\n127.0.1.1 {NAMES[index]}\n{ADDRESSES[other]} {NAMES[other]}\n"
    (place / "hosts").write_text(hosts)
    (place / "boot_id").write_text(f"00000000-0000-4000-8000-00000000000{boot_id}\n")
    (folder / "tmp").mkdir(exist_ok=True)
    (place / "sshd_config").write_text(_SSHD.format(keys=keys, tmp=folder / "tmp"))
    return place


def _await_ssh(nodes: Sequence[Node], folder: Path) -> None:
    deadline = time.monotonic() + 60
    for here, there in ((nodes[0], nodes[1]), (nodes[1], nodes[0])):
        for target in (here, there):
            while True:
                output = folder / f"{here.name}-to-{target.name}"
                if here.start(["ssh", target.name, "true"], {}, output).wait() == 0:
                    break
                logs = "".join((folder / name / "sshd.log").read_text() for name in NAMES)
                assert time.monotonic() < deadline, f"{output.read_text()}\n{logs}"
                time.sleep(0.1)


def _end_all_in(space: str) -> None:
    listed = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True).stdout.split()
    if listed:
        subprocess.run(["kill", "-9", *listed], capture_output=True)


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, f"{shlex.join(words)}: {done.stderr}"
    return done.stdout


def launch_words(*words: object) -> list[object]:
    return [sys.executable, "-m", "hf_zero", "launch", *words]


def run_on(node: Node, words: Sequence[object], environment: Mapping[str, str], output: Path) -> int:
    """Runs a command on a node to its end; returns its exit status."""
    return wait_for([node.start(words, environment, output)], [output])[0]


def wait_for(
    processes: Sequence[subprocess.Popen[bytes]], outputs: Sequence[Path], timeout_s: float = 200
) -> list[int]:
    """Exit statuses of all; their output is part of the report."""
    deadline = time.monotonic() + timeout_s
    try:
        return [process.wait(max(0.1, deadline - time.monotonic())) for process in processes]
    finally:
        for process in processes:
            process.terminate()  # not kill: launchers end their ranks first
        for process in processes:
            process.wait(60)
        for output in outputs:
            print(f"--- {output.name}\n{output.read_text(errors='replace')[-6000:]}")
