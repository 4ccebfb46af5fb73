"""Checkpoint files as tools find and read them: their names, and DeepSpeed's object that reads and writes one."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch

from hf_zero.checkpoint.deepspeed import keys as ds

ZERO_STAGE = ds.ZERO_STAGE


def _natural(name: str) -> list[Any]:
    return [int(word) if word.isdigit() else word for word in re.split(r"(\d+)", name)]


def get_checkpoint_files(checkpoint_dir: str | os.PathLike[str], glob_pattern: str) -> list[str]:
    """Files of a checkpoint folder that match, numbers in their order.

    Raises:
        FileNotFoundError: when there is none.
    """
    found = sorted((str(path) for path in Path(checkpoint_dir).glob(glob_pattern)), key=_natural)
    if not found:
        raise FileNotFoundError(f"can't find {glob_pattern} files in directory '{checkpoint_dir}'")
    return found


def get_model_ckpt_name_for_rank(base_folder: str | os.PathLike[str], mp_rank_str: str) -> str:
    """The path of a model file of stages 0-2; `mp_rank_str` has two digits."""
    return os.path.join(base_folder, f"mp_rank_{mp_rank_str}{ds.MODEL_SUFFIX}")


def get_zero_ckpt_name_for_rank(base_folder: str | os.PathLike[str], dp_rank: int, mp_rank: int) -> str:
    """The path of a rank's optimizer states in fp32 training."""
    return os.path.join(base_folder, ds.optimizer_file(dp_rank, bf16=False, model_rank=mp_rank))


def get_layer_ckpt_name_for_rank(base_folder: str | os.PathLike[str], layer_id: str, tp_rank: int) -> str:
    """The path of a layer's file, as pipelines write them; there are none here."""
    return os.path.join(base_folder, f"{layer_id}-model_{tp_rank:02d}{ds.MODEL_SUFFIX}")


def get_optim_files(checkpoint_dir: str | os.PathLike[str]) -> list[str]:
    """The files with optimizer states, rank by rank."""
    return get_checkpoint_files(checkpoint_dir, f"*{ds.OPTIMIZER_SUFFIX}")


def get_model_state_files(checkpoint_dir: str | os.PathLike[str]) -> list[str]:
    return get_checkpoint_files(checkpoint_dir, f"*{ds.MODEL_SUFFIX}")


def get_model_state_file(checkpoint_dir: str | os.PathLike[str], zero_stage: int) -> str:
    """The file with the model's weights (stages up to 2), or rank 0's part of them.

    Raises:
        FileNotFoundError: for a folder, or a file in it, that is not there.
    """
    if not os.path.isdir(checkpoint_dir):
        raise FileNotFoundError(f"Directory '{checkpoint_dir}' doesn't exist")
    prefix = "zero_pp_rank_0_" if zero_stage == 3 else ""
    path = os.path.join(checkpoint_dir, f"{prefix}mp_rank_00{ds.MODEL_SUFFIX}")
    if not os.path.exists(path):
        raise FileNotFoundError(f"can't find model states file at '{path}'")
    return path


class CheckpointEngine:
    """Reads and writes single files. An engine of ours writes its checkpoints itself and asks no such object."""

    name = "TorchCheckpointEngine"

    def __init__(self, config_params: Any = None) -> None:
        self.config_params = config_params

    def create(self, info: Any) -> None:
        """Announced by callers before they save; nothing has to be prepared."""

    def makedirs(self, path: str | os.PathLike[str], exist_ok: bool = False) -> None:
        os.makedirs(path, exist_ok=exist_ok)

    def save(self, state_dict: Any, path: str | os.PathLike[str]) -> None:
        torch.save(state_dict, path)

    def load(self, path: str | os.PathLike[str], map_location: Any = None) -> Any:
        """What a file holds. It is unpickled as DeepSpeed does it: read only files that you trust."""
        return torch.load(path, map_location=map_location, weights_only=False)

    def commit(self, info: Any) -> bool:
        """What was saved is on disk when `save` returns."""
        return True

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        return dp_rank == 0

    def is_decoupled(self) -> bool:
        return False

    def set_commit_info(self, info: Any) -> None:
        """Nothing is committed later."""

    def get_commit_info(self) -> None:
        return None

    def cleanup(self) -> None:
        """Nothing is left behind."""

    def preserves_storage_sharing(self) -> bool:
        return True


class TorchCheckpointEngine(CheckpointEngine):
    """The one that DeepSpeed takes where nothing else is asked for."""
