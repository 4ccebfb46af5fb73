"""File names and dictionary keys of DeepSpeed's checkpoints (0.19.8): the only place that knows them."""

from __future__ import annotations

import re
from dataclasses import dataclass

FORMAT_VERSION = "0.19.8"
"""The DeepSpeed version of the files; DeepSpeed compares it, so it has no suffix."""

# Files of a checkpoint folder

LATEST = "latest"
LATEST_UNIVERSAL = "latest_universal"
SCRIPT = "zero_to_fp32.py"
MODEL_SUFFIX = "_model_states.pt"
OPTIMIZER_SUFFIX = "_optim_states.pt"
UNIVERSAL_FOLDER = "zero"
UNIVERSAL_OPTIMIZER_FILE = "optimizer_state.pt"

# Keys of the model file

MODULE = "module"
BUFFER_NAMES = "buffer_names"
OPTIMIZER = "optimizer"
PARAM_SHAPES = "param_shapes"
FROZEN_PARAM_SHAPES = "frozen_param_shapes"
SHARED_PARAMS = "shared_params"
FROZEN_PARAM_FRAGMENTS = "frozen_param_fragments"
LR_SCHEDULER = "lr_scheduler"
DATA_SAMPLER = "data_sampler"
RANDOM_LTD = "random_ltd"
TRAINING_FEATURES = "training_features"
"""Additional key: states of features without a key in DeepSpeed's file."""
EXTRA_STATES = "extra_states"
"""Only in views: extra states of modules, which files store among the weights."""
SKIPPED_STEPS = "skipped_steps"
GLOBAL_STEPS = "global_steps"
GLOBAL_SAMPLES = "global_samples"
DP_WORLD_SIZE = "dp_world_size"
MP_WORLD_SIZE = "mp_world_size"
PARALLEL_DIMENSIONS = "checkpoint_parallel_dimensions"
PP_DEGREE = "pp_degree"
TP_DEGREE = "tp_degree"
UNIVERSAL_INFO = "universal_checkpoint_info"
UNIVERSAL_VERSION_KEY = "universal_checkpoint_version"
UNIVERSAL_VERSION = 0.4
UNSUPPORTED_PATTERNS = "autotp_unsupported_parameter_patterns"
AFFINE_MAP = "affine_map"
AFFINE_MAP_VERSION = "version"
AFFINE_MAP_PARAMS = "params"

NOT_CLIENT_STATE = frozenset(
    {
        MODULE,
        OPTIMIZER,
        LR_SCHEDULER,
        SKIPPED_STEPS,
        GLOBAL_STEPS,
        DP_WORLD_SIZE,
        MP_WORLD_SIZE,
        DATA_SAMPLER,
        RANDOM_LTD,
        TRAINING_FEATURES,
        EXTRA_STATES,
        "hf_zero",
    }
)
"""Keys that `load_checkpoint` does not return; all others are client state."""

# Keys of the optimizer files

OPTIMIZER_STATE_DICT = "optimizer_state_dict"
DS_CONFIG = "ds_config"
DS_VERSION = "ds_version"
LOSS_SCALER = "loss_scaler"
DYNAMIC_LOSS_SCALE = "dynamic_loss_scale"
OVERFLOW = "overflow"
CLIP_GRAD = "clip_grad"
BASE_OPTIMIZER_STATE = "base_optimizer_state"
BASE_OPTIMIZER_STATE_STEP = "base_optimizer_state_step"
FP32_PARTITIONS = "single_partition_of_fp32_groups"
FP32_FLAT_GROUPS = "fp32_flat_groups"
FP32_GROUPS_FLAT = "fp32_groups_flat"  # stage 0 with 16-bit weights: one flat master per group
FP32_GROUPS = "fp32_groups"  # or one master per parameter
ZERO_STAGE = "zero_stage"
GROUP_PADDINGS = "group_paddings"
ALIGNMENT_PADDINGS = "param_alignment_paddings"
PARTITION_COUNT = "partition_count"
SLICE_MAPPINGS = "param_slice_mappings"
STATE = "state"
PARAM_GROUPS = "param_groups"
PARAMS = "params"
STEP = "step"
CAT_DIM = "cat_dim"
PARAM = "param"

# Expert parallelism is not supported here, but scripts in DeepSpeed's checkpoint folders import these names.
AUTOEP_LAYERS_KEY = "ds_autoep_layers"
AUTOEP_LAYERS_KEY_LEGACY = "autoep_layers"
AUTOEP_ZERO3_EXPERT_STATE_FORMAT_KEY = "checkpoint_format"
AUTOEP_ZERO3_PARTITIONED_EXPERT_STATE_FORMAT = "zero3_partitioned"

# Additional files and keys. DeepSpeed's globs only match *_model_states.pt and *_optim_states.pt, and its loaders skip
# unknown keys.
MANIFEST = "hf_zero_manifest.json"
HF_ZERO = "hf_zero"
STEPS = "steps"
WHOLE_STATES = "whole_states"
SHARD_STATES = "shard_states"
OTHER_STATES = "other_states"
"""Optimizer states under other keys than parameters, such as names."""
GRADIENT_ERRORS = "gradient_errors"
TENSOR_PARTS = "tensor_parts"
OUTSIDE_WEIGHTS = "outside_weights"
"""At stage 0: trained parameters that are not part of the model."""
MANIFEST_KEY = "manifest"

_MODEL_FILE = re.compile(r"(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<mp>\d+)_model_states\.pt")
_OPTIMIZER_FILE = re.compile(r"(?P<prefix>bf16_|fp16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt")


@dataclass(frozen=True, slots=True)
class FileName:
    """The parts of a state file's name. `rank` is None for the shared model file."""

    kind: str  # "model" or "optimizer"
    rank: int | None
    mp_rank: int


def parse(name: str) -> FileName | None:
    """Parse a state file's name; None for any other file."""
    match = _MODEL_FILE.fullmatch(name)
    if match:
        return FileName("model", None if match["rank"] is None else int(match["rank"]), int(match["mp"]))
    match = _OPTIMIZER_FILE.fullmatch(name)
    return FileName("optimizer", int(match["rank"]), int(match["mp"])) if match else None


def model_file(rank: int, stage: int, model_rank: int = 0) -> str:
    """Name of the model file of `rank` (among ranks with the same parts); below stage 3 all share one file."""
    return f"{f'zero_pp_rank_{rank}_' if stage == 3 else ''}mp_rank_{model_rank:02d}{MODEL_SUFFIX}"


def optimizer_file(rank: int, *, bf16: bool, model_rank: int = 0) -> str:
    return f"{'bf16_' if bf16 else ''}zero_pp_rank_{rank}_mp_rank_{model_rank:02d}{OPTIMIZER_SUFFIX}"
