"""Full fp32 weights from a sharded checkpoint as library calls, under the names that DeepSpeed gave them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_zero.checkpoint.consolidate import DTYPES, Progress, Target, parse_bytes, weights_of, write_weights
from hf_zero.checkpoint.files.stream import Streamed
from hf_zero.checkpoint.opening import open_checkpoint
from hf_zero.checkpoint.view import CheckpointView

Directory = str | os.PathLike[str]


class LazyTensor:
    """A weight that still lies in its shards; `contiguous()` reads it."""

    def __init__(self, content: Streamed) -> None:
        self._content = content
        self.dtype = content.dtype
        self.shape = torch.Size(content.shape)

    def numel(self) -> int:
        return self._content.numel

    def contiguous(self) -> Tensor:
        return self._content.materialise()

    def __repr__(self) -> str:
        return f"LazyTensor({tuple(self.shape)}, {self.dtype})"


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: Directory,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Any]:
    """A state dict for `model.load_state_dict`: trainable weights in fp32, frozen ones as they were saved.

    Args:
        checkpoint_dir: the folder that `save_checkpoint` wrote to.
        tag: which checkpoint in it; default: the one that `latest` names.
        lazy_mode: values are `LazyTensor`s, read one at a time by their `contiguous()`.
    """
    weights = weights_of(open_checkpoint(checkpoint_dir, tag), dtype=None, exclude_frozen=exclude_frozen_parameters)
    state: dict[str, Any] = {name: LazyTensor(content) for name, content in weights.tensors.items()}
    if not lazy_mode:
        state = {name: value.contiguous() for name, value in state.items()}
    # Tied names share one tensor, as they did in the model.
    return {**state, **{alias: state[owner] for alias, owner in weights.aliases.items()}}


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: Directory, tag: str | None = None
) -> nn.Module:
    """Move `model` to the CPU and fill it with the checkpoint's weights. It must not belong to an engine any more."""
    model = model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: Directory,
    output_dir: Directory,
    dtype: torch.dtype | str = torch.float32,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the checkpoint's weights as ordinary files, streamed.

    `output_dir` is a folder (shards and index), or one file when it ends in .bin, .pt or .safetensors.
    """
    view = open_checkpoint(checkpoint_dir, tag)
    weights = weights_of(view, dtype=resolve_dtype(dtype), exclude_frozen=exclude_frozen_parameters)
    write_weights(weights, target_for(view, Path(output_dir), safe_serialization, max_shard_size))


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: Directory,
    output_dir: Directory,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """`convert_zero_checkpoint_to_state_dict` in fp32."""
    convert_zero_checkpoint_to_state_dict(
        checkpoint_dir,
        output_dir,
        max_shard_size=max_shard_size,
        safe_serialization=safe_serialization,
        tag=tag,
        exclude_frozen_parameters=exclude_frozen_parameters,
    )


def target_for(view: CheckpointView, output: Path, safetensors: bool, max_shard_size: str | int | None) -> Target:
    """The output as the callers of this file describe it.

    Raises:
        ValueError: for a size that is none, or a file name that contradicts the wish for safetensors.
    """
    limit = None if max_shard_size is None else parse_bytes(max_shard_size)
    # Trainer keeps config.json beside the tag's folder.
    target = Target(output, safetensors, limit, extras_from=(view.folder.path, view.folder.path.parent))
    if safetensors and target.is_file and not target.writes_safetensors:
        raise ValueError(f"output {str(output)!r} is a torch file by its name: end it in .safetensors or name a folder")
    return target


def resolve_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """A dtype or its name.

    Raises:
        ValueError: for one that weights are not written in.
    """
    known = {**DTYPES, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    found = known.get(dtype, None) if isinstance(dtype, str) else dtype
    if found is None or found not in DTYPES.values():
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(known)}")
    return found


__all__ = [
    "LazyTensor",
    "Progress",
    "convert_zero_checkpoint_to_fp32_state_dict",
    "convert_zero_checkpoint_to_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
]
