"""MVAPICH's mpirun, a Hydra with switches of its own."""

from __future__ import annotations

from hf_zero.launch.backends.mpich import Mpich, even_placement
from hf_zero.launch.job import Job


class Mvapich(Mpich):
    name = "mvapich"
    programs = (("mpirun",), ("mpiname",))
    package = "mvapich2"

    def placement(self, job: Job) -> list[str]:
        return even_placement(job, self.name)

    def variables(self) -> dict[str, str]:
        """DeepSpeed's, less those that tune collectives of MPI, which nobody calls here."""
        return {"MV2_DEBUG_SHOW_BACKTRACE": "1", "MV2_ENABLE_AFFINITY": "0", "MV2_SUPPORT_DL": "1"}
