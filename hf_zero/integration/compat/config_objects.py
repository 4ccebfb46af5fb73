"""`deepspeed.runtime.config.DeepSpeedConfig`: what a config means for the ranks of this job."""

from __future__ import annotations

from typing import Any

from hf_zero.comm import get_rank, get_world_size
from hf_zero.config.objects import ConfigView


class DeepSpeedConfig(ConfigView):
    """The resolved fields of a config as attributes: see ConfigView."""

    def __init__(self, config: object, mpu: Any = None, mesh_device: Any = None) -> None:
        """
        Args:
            config: dict, path, JSON text or base64.
            mpu: its data-parallel size counts, where it has one.

        Raises:
            ConfigError: with all problems at once; a DeepSpeedConfigError and a ValueError.
        """
        if mesh_device is not None:
            raise NotImplementedError("DeepSpeedConfig(mesh_device=...): data parallelism only; leave it out")
        world_size = get_world_size() if mpu is None else int(mpu.get_data_parallel_world_size())
        super().__init__(config, world_size)
        self.global_rank = get_rank()
