"""`python -m hf_zero.launch.node --host NAME JOB`: what pdsh runs on each host, which starts that host's ranks."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from hf_zero.launch import LaunchError, shown
from hf_zero.launch.job import Job
from hf_zero.launch.ranks import report_to_launcher, run_node


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m hf_zero.launch.node", description=__doc__)
    parser.add_argument("--host", required=True, help="this host, as the hostfile names it")
    parser.add_argument("job", help="the word that hf-zero launch made")
    options = parser.parse_args(words)
    try:
        job = Job.decode(options.job)
        if options.host not in job.world.names:
            raise LaunchError(f"{shown(options.host)} is no host of this job, only {', '.join(job.world.names)}")
        enter(job.folder, options.host)
        return run_node(
            job, job.world.names.index(options.host), report=report_to_launcher(job.token), is_attached=True
        )
    except LaunchError as error:
        sys.stderr.write(f"hf-zero launch on {options.host}: {error}\n")
        return 2


def enter(folder: str, host: str) -> None:
    """Change into the folder that the job was started from."""
    try:
        os.chdir(folder)
    except OSError as error:
        raise LaunchError(
            f"the job was started in {shown(folder)}, which {host} has not: {error.strerror}. Put it on a file system "
            "that the hosts share, or start from a folder that all have"
        ) from None


if __name__ == "__main__":
    sys.exit(main())
