"""pdsh: one ssh per host, each of which starts that host's ranks."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from hf_zero.launch.backends.base import Backend, Command, Request, launcher_environment, python_variables
from hf_zero.launch.job import Job

_FAN_OUT = "1024"


class Pdsh(Backend):
    name = "pdsh"
    programs = (("pdsh",), ("ssh",))
    package = "pdsh"

    def command(self, job: Job, request: Request, programs: Sequence[str]) -> Command:
        environment = {**launcher_environment(), "PDSH_RCMD_TYPE": "ssh"}
        if request.ssh_port is not None:
            appended = environment.get("PDSH_SSH_ARGS_APPEND", "")
            environment["PDSH_SSH_ARGS_APPEND"] = f"{appended} -p {request.ssh_port}".strip()
        hosts = ",".join(job.world.names)
        words = [programs[0], "-S", "-f", _FAN_OUT, *request.launcher_args, "-w", hosts, remote_command(job, request)]
        # pdsh leaves its ssh processes alone when it ends, and with them the ranks.
        return Command(words, environment, ends_children=True)


def remote_command(job: Job, request: Request) -> str:
    """What the shell of a remote host reads. All but Python's own variables travels inside the job."""
    variables = [f"{name}={value}" for name, value in sorted(python_variables(job).items())]
    start = ["env", *variables] if variables else []
    words = [*start, sys.executable, "-u", "-m", "hf_zero.launch.ranks", job.encode(), "--host"]
    command = "exec " + shlex.join(words)
    if request.venv_script is not None:
        command = f". {shlex.quote(request.venv_script)} && {command}"
    # pdsh reads % itself: %h becomes the host, as we have named it.
    return command.replace("%", "%%") + " %h"
