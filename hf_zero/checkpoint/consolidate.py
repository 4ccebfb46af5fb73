"""Converts sharded fp32 masters, or a live model, to ordinary weights: whole tensors, streamed to files.

Safetensors files are written tensor by tensor: a JSON header, then the bytes at the offsets in the header.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_zero.checkpoint.files.stream import (
    Arriving,
    Awaited,
    Record,
    Streamed,
    Written,
    created,
    into_place,
    streamed,
    sync_folder,
    write_records,
    write_small,
    written,
)
from hf_zero.checkpoint.files.torch_file import write_torch_file, write_torch_file_as_it_comes
from hf_zero.checkpoint.opening import open_checkpoint
from hf_zero.checkpoint.view import CheckpointView
from hf_zero.comm import Collectives
from hf_zero.comm.parts import whole_shape
from hf_zero.errors import CheckpointError
from hf_zero.params.consolidation import persistent_buffers, state_dict_order, unsharded_values, whole_scales
from hf_zero.precision import named_with_scales
from hf_zero.quantities import bytes_of
from hf_zero.staging import StagingFolder, alone_in

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}


def write_safetensors(
    path: Path, tensors: Mapping[str, Streamed], metadata: Mapping[str, str], progress: Any = None
) -> Written:
    """Write `tensors` to the new file `path` and fsync it. The widest dtypes come first, to align every tensor."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    cursor, contents = 0, []
    for name, content in sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize):
        end = cursor + content.num_bytes
        header[name] = {"dtype": _name(content), "shape": list(content.shape), "data_offsets": [cursor, end]}
        contents.append((cursor, content))
        cursor = end
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % 8)
    start = 8 + len(encoded)
    records = [Record(0, struct.pack("<Q", len(encoded)) + encoded)]
    records += [Record(start + offset, content) for offset, content in contents]
    with created(path) as file:
        checksums = write_records(file, records, progress)
        os.fsync(file)
    return written(path, records, checksums)


def _name(content: Streamed) -> str:
    if content.dtype not in _NAMES:
        raise TypeError(f"safetensors files hold no {content.dtype}; write a .bin file instead")
    return _NAMES[content.dtype]


Progress = Callable[[int], None]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Files of a Hugging Face model besides its weights, which Trainer saves in the checkpoint's folder.
_MODEL_FILES = ("config.json", "generation_config.json")


@dataclass(frozen=True, slots=True)
class Weights:
    """Whole tensors by name, not yet read from the shards, and second names of tied tensors."""

    tensors: Mapping[str, Streamed]
    aliases: Mapping[str, str]
    num_parameters: int  # elements of all parameters, tied ones once, without buffers

    @property
    def num_bytes(self) -> int:
        return sum(content.num_bytes for content in self.tensors.values())


def weights_of(
    view: CheckpointView, *, dtype: torch.dtype | None = torch.float32, exclude_frozen: bool = False
) -> Weights:
    """Everything a `state_dict` of the model holds, in DeepSpeed's order: buffers, frozen, trainable, tied names.

    Args:
        dtype: of all floating-point tensors; None keeps frozen parameters as saved and the rest in fp32.
    """

    def target(original: torch.dtype, keep: bool = False) -> torch.dtype:
        if not original.is_floating_point or (dtype is None and keep):
            return original
        return dtype or torch.float32

    tensors = {name: streamed(value, target(value.dtype)) for name, value in view.buffers.items()}
    parameters: dict[str, Streamed] = {}
    if not exclude_frozen:
        parameters.update(
            {name: replace(value, dtype=target(value.dtype, keep=True)) for name, value in view.frozen.items()}
        )
    parameters.update({name: view.master(name, dtype or torch.float32) for name in view.shapes})
    aliases = {alias: owner for alias, owner in view.aliases.items() if owner in parameters}
    return Weights({**tensors, **parameters}, aliases, sum(content.numel for content in parameters.values()))


@dataclass(frozen=True, slots=True)
class Target:
    """Output of a conversion.

    Attributes:
        output: a .bin, .pt or .safetensors file, or a folder of shards.
        safetensors: format of a folder's shards.
        shard_bytes: maximum size of a folder's shards.
    """

    output: Path
    safetensors: bool = False
    shard_bytes: int | None = 5 * 10**9
    extras_from: tuple[Path, ...] = field(default=())

    @property
    def is_file(self) -> bool:
        return self.output.suffix in (".bin", ".pt", ".pth", ".safetensors")

    @property
    def writes_safetensors(self) -> bool:
        return self.output.suffix == ".safetensors" if self.is_file else self.safetensors


def parse_bytes(text: str | int) -> int:
    """A size in bytes: "5GB" is 5000000000, "5GiB" 5368709120.

    Raises:
        ValueError: for anything that is not a positive number with a known unit.
    """
    size = int(bytes_of(str(text)) or 0)
    if size < 1:
        raise ValueError(f"max shard size {text!r} is not a size: give a positive number and a unit, such as 5GB")
    return size


def write_weights(weights: Weights, target: Target, progress: Progress | None = None) -> list[Path]:
    """Write one file, or a folder of shards with its index. Final names appear only when all is written.

    Raises:
        CheckpointError: if the output exists as something else, or the written files have the wrong size.
    """
    if target.is_file:
        if target.output.is_dir():
            raise CheckpointError(target.output, "is a folder, but the output is a file", "remove it first")
        target.output.parent.mkdir(parents=True, exist_ok=True)
        _write_file(target.output, list(weights.tensors), weights, target, progress)
        return [target.output]
    return _write_folder(weights, target, progress)


def _write_file(path: Path, names: Sequence[str], weights: Weights, target: Target, progress: Progress | None) -> None:
    tensors = {name: weights.tensors[name] for name in names}
    aliases = {alias: owner for alias, owner in weights.aliases.items() if owner in tensors}

    def write(partial: Path) -> Written:
        if target.writes_safetensors:
            # Tied tensors are written once; the metadata lists their names, which safetensors.torch.load_model reads.
            written = write_safetensors(partial, tensors, {"format": "pt", **aliases}, progress)
        else:
            both = {**tensors, **{alias: tensors[owner] for alias, owner in aliases.items()}}
            written = write_torch_file(partial, both, lambda file, records: write_records(file, records, progress))
        # Check before the rename: afterwards another process may have put its own file there.
        size, payload = partial.stat().st_size, sum(content.num_bytes for content in tensors.values())
        if not size == written.num_bytes >= payload:
            raise CheckpointError(path, f"has {size} bytes, but should have {written.num_bytes}", "try again")
        return written

    into_place(path, write)


def _write_folder(weights: Weights, target: Target, progress: Progress | None) -> list[Path]:
    folder = target.output
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(folder, "is a file, but the output is a folder", "choose another name")
    staging = StagingFolder(folder if folder.is_dir() else folder.absolute().parent, folder.name or "weights")
    try:
        names = _write_shards(staging.path, weights, target, progress)
        _copy_model_files(target.extras_from, staging.path)
        if folder.is_dir() or not _renamed(staging.path, folder):
            with alone_in(folder):
                _move_in(staging.path, folder, names)
    finally:
        staging.remove()
    sync_folder(folder)
    sync_folder(folder.absolute().parent)
    return [folder / name for name in names]


def _renamed(staging: Path, folder: Path) -> bool:
    """Rename the folder to its final name; False if another process has just taken that name."""
    try:
        staging.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
        return False
    return True


def _write_shards(folder: Path, weights: Weights, target: Target, progress: Progress | None) -> list[str]:
    """Write the shards and, if there are several, the index, whose name comes last."""
    stem, suffix = _stem(target)
    shards = list(_shards(weights, target.shard_bytes))
    names = [f"{stem}{suffix}"]
    if len(shards) > 1:
        names = [f"{stem}-{i:05d}-of-{len(shards):05d}{suffix}" for i in range(1, len(shards) + 1)]
    for name, members in zip(names, shards, strict=True):
        _write_file(folder / name, members, weights, target, progress)
    if len(shards) > 1:
        place = {member: name for name, members in zip(names, shards, strict=True) for member in members}
        if not target.safetensors:
            place.update({alias: place[owner] for alias, owner in weights.aliases.items()})
        index = {"metadata": {"total_size": weights.num_bytes}, "weight_map": dict(sorted(place.items()))}
        names.append(f"{stem}{suffix}.index.json")
        write_small(folder / names[-1], (json.dumps(index, indent=2) + "\n").encode())
    return names


def _stem(target: Target) -> tuple[str, str]:
    return ("model", ".safetensors") if target.safetensors else ("pytorch_model", ".bin")


def _move_in(staging: Path, folder: Path, names: Sequence[str]) -> None:
    """Move files into a folder with other files. Earlier weights are removed first, or they would be loaded too."""
    stem, suffix = _stem(Target(folder, safetensors=names[0].endswith(".safetensors")))
    stale = [folder / f"{stem}{suffix}.index.json", folder / f"{stem}{suffix}"]
    for path in [*stale, *folder.glob(f"{stem}-*-of-*{suffix}")]:
        path.unlink(missing_ok=True)
    for name in names:
        (staging / name).rename(folder / name)
    for name in _MODEL_FILES:
        if (staging / name).is_file() and not (folder / name).exists():
            (staging / name).rename(folder / name)


def _shards(weights: Weights, limit: int | None) -> Iterator[list[str]]:
    """Group names in order into shards within the limit; a larger tensor gets a separate shard."""
    chosen: list[str] = []
    filled = 0
    for name, content in weights.tensors.items():
        if chosen and limit is not None and filled + content.num_bytes > limit:
            yield chosen
            chosen, filled = [], 0
        chosen.append(name)
        filled += content.num_bytes
    yield chosen


def _copy_model_files(sources: Sequence[Path], folder: Path) -> None:
    for name in _MODEL_FILES:
        for source in sources:
            if (source / name).is_file() and not (folder / name).exists():
                shutil.copyfile(source / name, folder / name)


def save_whole_weights(module: nn.Module, path: Path, collectives: Collectives, *, exclude_frozen: bool) -> None:
    """Rank 0 writes `module.state_dict()` with whole weights, which are never all in memory. Collective.

    Raises:
        CheckpointError: on every rank, if the file could not be written; no partial file is left.
    """
    problem = ""
    arrivals = unsharded_values(module, exclude_frozen=exclude_frozen)
    if collectives.rank == 0:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            state, awaited = _state(module, exclude_frozen=exclude_frozen)
            batches = ([(place := awaited[id(p)], streamed(values, place.dtype))] for p, values in arrivals)
            into_place(path, lambda partial: write_torch_file_as_it_comes(partial, Arriving(state, batches)))
        except OSError as error:
            problem = f"{type(error).__name__}: {error}"
    for _ in arrivals:  # on other ranks, and after an error, because gathers need all ranks
        pass
    problem = str(collectives.gather_objects(problem)[0])
    if problem:
        raise CheckpointError(path, f"was not written ({problem})", "free disk space, or give another folder")


def _state(module: nn.Module, *, exclude_frozen: bool) -> tuple[dict[str, Awaited | Tensor], dict[int, Awaited]]:
    """The state dict with places for its parameters, and the place of each parameter by id."""
    awaited: dict[int, Awaited] = {}
    entries: dict[str, Awaited | Tensor] = {name: buffer.detach() for name, buffer in persistent_buffers(module)}
    for name, parameter in named_with_scales(module, remove_duplicate=False):
        if parameter.requires_grad or not exclude_frozen:
            entries[name] = awaited.setdefault(id(parameter), Awaited(parameter.dtype, whole_shape(parameter)))
            entries.update(whole_scales(name, parameter))
    return {name: entries[name] for name in state_dict_order(module) if name in entries} | entries, awaited


# Whole fp32 weights from a sharded checkpoint as library calls, under DeepSpeed's names.


Directory = str | os.PathLike[str]


class LazyTensor:
    """A weight that is read from its shards only by `contiguous()`, which returns a tensor in host memory.

    Attributes:
        shape: torch.Size of the whole weight.
        dtype: of the tensor that `contiguous()` returns.
    """

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
    checkpoint_dir: Directory, tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> dict[str, Any]:
    """Return a state dict for `model.load_state_dict`: trainable weights in fp32, frozen ones as saved.

    Args:
        checkpoint_dir: the folder that `save_checkpoint` wrote to.
        tag: the checkpoint in it; default: the one that `latest` names.
        exclude_frozen_parameters: leave out parameters that did not require gradients.
        lazy_mode: values are `LazyTensor`s, read one at a time by their `contiguous()`.

    Returns:
        Name -> whole tensor in host memory, in the model's names. Tied names share one tensor.

    Raises:
        CheckpointError: if there is no checkpoint, or a file is missing or damaged.
    """
    weights = weights_of(open_checkpoint(checkpoint_dir, tag), dtype=None, exclude_frozen=exclude_frozen_parameters)
    state: dict[str, Any] = {name: LazyTensor(content) for name, content in weights.tensors.items()}
    if not lazy_mode:
        state = {name: value.contiguous() for name, value in state.items()}
    # Tied names share one tensor, as in the model.
    return {**state, **{alias: state[owner] for alias, owner in weights.aliases.items()}}


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: Directory, tag: str | None = None
) -> nn.Module:
    """Move `model` to the CPU, load the checkpoint's weights and return it. It must no longer belong to an engine.

    Names that only one of both has are left out without an error, as in DeepSpeed.

    Raises:
        CheckpointError: if there is no checkpoint, or a file is missing or damaged.
        RuntimeError: torch's, for weights of other shapes.
    """
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
    """Write the checkpoint's weights as ordinary files, streamed: the whole model is never in memory.

    Args:
        checkpoint_dir: the folder that `save_checkpoint` wrote to.
        output_dir: a folder (shards and index, as from_pretrained reads it), or one file if it ends in .bin, .pt or
            .safetensors.
        dtype: of floating-point tensors: fp32, bf16 or fp16, as torch.dtype or name.
        max_shard_size: of a folder's files, in bytes or with a unit ("5GB" is 5000000000, "5GiB" 5368709120); None: one
            file.
        safe_serialization: write a folder's files as safetensors.
        tag: the checkpoint in `checkpoint_dir`; default: the one that `latest` names.
        exclude_frozen_parameters: leave out parameters that did not require gradients.

    Raises:
        CheckpointError: if there is no checkpoint, a file is missing or damaged, or the output cannot be written.
        ValueError: for another dtype, an invalid size, or a file name that contradicts `safe_serialization`.
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
    """`convert_zero_checkpoint_to_state_dict` in fp32, with the same arguments and errors."""
    convert_zero_checkpoint_to_state_dict(
        checkpoint_dir, output_dir, torch.float32, max_shard_size, safe_serialization, tag, exclude_frozen_parameters
    )


def target_for(view: CheckpointView, output: Path, safetensors: bool, max_shard_size: str | int | None) -> Target:
    """Create the output from the callers' arguments.

    Raises:
        ValueError: for an invalid size, or a file name that contradicts `safe_serialization`.
    """
    limit = None if max_shard_size is None else parse_bytes(max_shard_size)
    # Trainer keeps config.json next to the tag's folder.
    target = Target(output, safetensors, limit, extras_from=(view.folder.path, view.folder.path.parent))
    if safetensors and target.is_file and not target.writes_safetensors:
        raise ValueError(f"output {str(output)!r} has the name of a torch file: use .safetensors, or give a folder")
    return target


def resolve_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """Return a dtype from a dtype or its name.

    Raises:
        ValueError: if weights cannot be written in it.
    """
    known = {**DTYPES, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    torch_dtype = known.get(dtype) if isinstance(dtype, str) else dtype
    if torch_dtype is None or torch_dtype not in DTYPES.values():
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(known)}")
    return torch_dtype


__all__ = [
    "LazyTensor",
    "Progress",
    "convert_zero_checkpoint_to_fp32_state_dict",
    "convert_zero_checkpoint_to_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
]
