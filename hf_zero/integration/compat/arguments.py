"""Settings of DeepSpeed scripts: command-line flags (config, schedules), and `DeepSpeedConfig`."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import Any

import torch

from hf_zero.checkpoint.deepspeed import keys as ds
from hf_zero.comm import this_process
from hf_zero.config.objects import ConfigView
from hf_zero.schedules import VALID_LR_SCHEDULES

DEEPSPEED_ENVIRONMENT_NAME = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
"""File with environment variables that a launcher exports to remote machines."""


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed` and `--deepspeed_config`, with their old spellings, to a script's parser."""
    group = parser.add_argument_group("DeepSpeed", "hf_zero, under DeepSpeed's flags")
    for flag in ("--deepspeed", "--deepscale"):
        group.add_argument(flag, action="store_true", help=_help(flag, "train with ZeRO (read by the script itself)"))
    for flag in ("--deepspeed_config", "--deepscale_config"):
        group.add_argument(flag, type=str, default=None, help=_help(flag, "path of the ds.json file"))
    return parser


def _help(flag: str, text: str) -> str:
    return f"old spelling of {flag.replace('deepscale', 'deepspeed')}" if "deepscale" in flag else text


_Flags = dict[str, tuple[Any, str]]  # name -> (default, help); a default of False makes a switch

# The defaults are DeepSpeed's; some differ from those of the schedules themselves.
_RANGE_TEST: _Flags = {
    "lr_range_test_min_lr": (0.001, "first learning rate"),
    "lr_range_test_step_rate": (1.0, "growth per step size"),
    "lr_range_test_step_size": (1000, "updates per unit of growth"),
    "lr_range_test_staircase": (False, "grow in stairs"),
}
_CYCLE: _Flags = {
    "cycle_first_step_size": (1000, "updates on the way up"),
    "cycle_first_stair_count": (-1, "stairs on the way up"),
    "cycle_second_step_size": (-1, "updates on the way down"),
    "cycle_second_stair_count": (-1, "stairs on the way down"),
    "decay_step_size": (1000, "updates per unit of decay"),
    "cycle_min_lr": (0.01, "lowest learning rate of the cycle"),
    "cycle_max_lr": (0.1, "highest learning rate of the cycle"),
    "decay_lr_rate": (0.0, "decay of the learning rate after the cycle"),
    "cycle_min_mom": (0.8, "lowest momentum of the cycle"),
    "cycle_max_mom": (0.9, "highest momentum of the cycle"),
    "decay_mom_rate": (0.0, "growth of the momentum after the cycle"),
}
_CYCLE_SWITCH: _Flags = {"cycle_momentum": (False, "cycle the momentum too")}
_WARMUP_SHAPE: _Flags = {
    "warmup_num_steps": (1000, "updates of the warm-up"),
    "warmup_type": ("log", "shape of the warm-up: log or linear"),
}
_WARMUP: _Flags = {
    "warmup_min_lr": (0.0, "first learning rate of the warm-up"),
    "warmup_max_lr": (0.001, "learning rate after the warm-up"),
    **_WARMUP_SHAPE,
}
_RATIOS: _Flags = {
    "warmup_min_ratio": (0.01, "first ratio of the cosine schedule"),
    "cos_min_ratio": (0.01, "last ratio of the cosine schedule"),
}
_FLAGS_OF: dict[str, _Flags] = {
    "LRRangeTest": _RANGE_TEST,
    "OneCycle": _CYCLE,
    "WarmupCosineLR": {**_WARMUP_SHAPE, **_RATIOS},
}


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--lr_schedule` and the arguments of every schedule. The script itself decides what to do with them."""
    group = parser.add_argument_group("Convergence tuning", "hf_zero, under DeepSpeed's flags")
    group.add_argument("--lr_schedule", type=str, default=None, help=f"one of {', '.join(VALID_LR_SCHEDULES)}")
    for name, (default, text) in {**_RANGE_TEST, **_CYCLE, **_CYCLE_SWITCH, **_WARMUP, **_RATIOS}.items():
        if default is False:
            group.add_argument(f"--{name}", action="store_true", help=text)
        else:
            group.add_argument(f"--{name}", type=type(default), default=default, help=f"{text} (default {default})")
    return parser


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """(tuning arguments, everything else) of this process's command line."""
    return add_tuning_arguments(argparse.ArgumentParser()).parse_known_args()


def get_config_from_args(args: argparse.Namespace) -> tuple[dict[str, Any] | None, str | None]:
    """(scheduler section, None), or (None, reason)."""
    name = getattr(args, "lr_schedule", None)
    if name is None:
        return None, "--lr_schedule not specified on command line"
    if name not in VALID_LR_SCHEDULES:
        return None, f"{name} is not a schedule that --lr_schedule knows: {', '.join(VALID_LR_SCHEDULES)}"
    given = {flag: getattr(args, flag, None) for flag in _FLAGS_OF.get(name, _WARMUP)}
    return {"type": name, "params": {flag: value for flag, value in given.items() if value is not None}}, None


def get_lr_from_config(config: dict[str, Any]) -> tuple[float | None, str]:
    """(learning rate of a scheduler section, ""), or (None, reason)."""
    for key in ("type", "params"):
        if key not in config:
            return None, f"the scheduler section has no {key!r}"
    name = config["type"]
    if name not in VALID_LR_SCHEDULES:
        return None, f"{name} is not one of {', '.join(VALID_LR_SCHEDULES)}"
    if name == "WarmupCosineLR":
        return None, "WarmupCosineLR scales the optimizer's own rates and names none"
    key = {"LRRangeTest": "lr_range_test_min_lr", "OneCycle": "cycle_max_lr"}.get(name, "warmup_max_lr")
    return config["params"][key], ""


class DeepSpeedConfig(ConfigView):
    """A config for the ranks of this job, as attributes: see ConfigView."""

    def __init__(self, config: object, mpu: Any = None, mesh_device: Any = None) -> None:
        """
        Args:
            config: dict, path, JSON text or base64.
            mpu: provides the data-parallel size, if it has one.

        Raises:
            ConfigError: with all problems at once; a DeepSpeedConfigError and a ValueError.
        """
        if mesh_device is not None:
            raise NotImplementedError("DeepSpeedConfig(mesh_device=...): data parallelism only; leave it out")
        world_size = this_process().size if mpu is None else int(mpu.get_data_parallel_world_size())
        super().__init__(config, world_size)
        self.global_rank = this_process().rank


# Checkpoint files for tools: their names, and DeepSpeed's object that reads and writes one.


ZERO_STAGE = ds.ZERO_STAGE


def get_checkpoint_files(checkpoint_dir: str | os.PathLike[str], glob_pattern: str) -> list[str]:
    """Matching files of a checkpoint folder, in numerical order.

    Raises:
        FileNotFoundError: if there is none.
    """

    def numerical(name: str) -> list[Any]:
        return [int(word) if word.isdigit() else word for word in re.split(r"(\d+)", name)]

    files = sorted((str(path) for path in Path(checkpoint_dir).glob(glob_pattern)), key=numerical)
    if not files:
        raise FileNotFoundError(f"can't find {glob_pattern} files in directory '{checkpoint_dir}'")
    return files


def get_model_ckpt_name_for_rank(base_folder: str | os.PathLike[str], mp_rank_str: str) -> str:
    """The path of a model file of stages 0-2; `mp_rank_str` has two digits."""
    return os.path.join(base_folder, f"mp_rank_{mp_rank_str}{ds.MODEL_SUFFIX}")


def get_zero_ckpt_name_for_rank(base_folder: str | os.PathLike[str], dp_rank: int, mp_rank: int) -> str:
    """The path of a rank's optimizer states in fp32 training."""
    return os.path.join(base_folder, ds.optimizer_file(dp_rank, bf16=False, model_rank=mp_rank))


def get_layer_ckpt_name_for_rank(base_folder: str | os.PathLike[str], layer_id: str, tp_rank: int) -> str:
    """The path of a layer's file, as written by pipelines, which hf_zero does not have."""
    return os.path.join(base_folder, f"{layer_id}-model_{tp_rank:02d}{ds.MODEL_SUFFIX}")


def get_optim_files(checkpoint_dir: str | os.PathLike[str]) -> list[str]:
    """The files with optimizer states, rank by rank."""
    return get_checkpoint_files(checkpoint_dir, f"*{ds.OPTIMIZER_SUFFIX}")


def get_model_state_files(checkpoint_dir: str | os.PathLike[str]) -> list[str]:
    return get_checkpoint_files(checkpoint_dir, f"*{ds.MODEL_SUFFIX}")


def get_model_state_file(checkpoint_dir: str | os.PathLike[str], zero_stage: int) -> str:
    """The file with the model's weights (stages up to 2), or rank 0's part of them.

    Raises:
        FileNotFoundError: if the folder or the file does not exist.
    """
    if not os.path.isdir(checkpoint_dir):
        raise FileNotFoundError(f"Directory '{checkpoint_dir}' doesn't exist")
    prefix = "zero_pp_rank_0_" if zero_stage == 3 else ""
    path = os.path.join(checkpoint_dir, f"{prefix}mp_rank_00{ds.MODEL_SUFFIX}")
    if not os.path.exists(path):
        raise FileNotFoundError(f"can't find model states file at '{path}'")
    return path


class CheckpointEngine:
    """Reads and writes single files. hf_zero's engine writes its checkpoints itself and does not use this object."""

    name = "TorchCheckpointEngine"

    def __init__(self, config_params: Any = None) -> None:
        self.config_params = config_params

    def create(self, info: Any) -> None:
        """A no-op, which callers use to announce saves."""

    def makedirs(self, path: str | os.PathLike[str], exist_ok: bool = False) -> None:
        os.makedirs(path, exist_ok=exist_ok)

    def save(self, state_dict: Any, path: str | os.PathLike[str]) -> None:
        torch.save(state_dict, path)

    def load(self, path: str | os.PathLike[str], map_location: Any = None) -> Any:
        """Load a file by unpickling, like DeepSpeed: only load files that you trust."""
        return torch.load(path, map_location=map_location, weights_only=False)

    def commit(self, info: Any) -> bool:
        """A no-op: files are on disk when `save` returns."""
        return True

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        return dp_rank == 0

    def is_decoupled(self) -> bool:
        return False

    def set_commit_info(self, info: Any) -> None:
        """A no-op: nothing is committed later."""

    def get_commit_info(self) -> None:
        return None

    def cleanup(self) -> None:
        """A no-op: no files are left behind."""

    def preserves_storage_sharing(self) -> bool:
        return True


class TorchCheckpointEngine(CheckpointEngine):
    """DeepSpeed's default checkpoint engine."""
