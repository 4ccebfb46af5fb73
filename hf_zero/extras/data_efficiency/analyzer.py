"""DeepSpeed's DataAnalyzer: metrics of all samples, and the indexes that a curriculum uses to choose samples.

run_map       every worker measures its range of the samples                   SAVE/NAME/worker{w}.npz
run_reduce    one process merges the results:                                  SAVE/NAME/NAME_...
                  sample_to_metric                     value of each sample
                  index_to_metric                      the distinct values, ascending
                  index_to_sample                      samples of each distinct value
                  index_to_sample_percentile_merged    the same, merged into about a hundred rows
                  metric_value                         sum over all samples
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_zero.comm import Collectives, collectives_for, is_initialized
from hf_zero.staging import alone_in, staging_file

# Megatron's indexed files: rows of integers of different lengths in NAME.bin and NAME.idx, read by memory mapping.
#
# .idx   "MMIDIDX\0\0"  uint64 version 1  uint8 dtype  uint64 rows N  uint64 documents D
#        N x int32 lengths   N x int64 offsets in bytes   D x int64 documents (rows at which they begin)
# .bin   the rows, little endian


Integers = NDArray[Any]
MAGIC = b"MMIDIDX\x00\x00"
_HEAD = struct.Struct("<QBQQ")
_TYPES = (np.uint8, np.int8, np.int16, np.int32, np.int64, np.uint16, np.uint32, np.uint64)
_DTYPES: dict[int, Any] = dict(enumerate(_TYPES, start=1))
_CODES = {np.dtype(dtype): code for code, dtype in _DTYPES.items()}


def fitting_dtype(low: int, high: int) -> Any:
    """The smallest unsigned integer type for values from `low` to `high`, or signed type if `low` is negative."""
    kinds = (np.int8, np.int16, np.int32, np.int64) if low < 0 else (np.uint8, np.uint16, np.uint32, np.uint64)
    for kind in kinds:
        limits = np.iinfo(kind)
        if limits.min <= low and high <= limits.max:
            return kind
    raise ValueError(f"no integer type holds both {low} and {high}")


def write_rows(prefix: str | os.PathLike[str], rows: Iterable[Sequence[int] | Integers], dtype: Any) -> None:
    """Write all rows as one document; both files are replaced atomically."""
    path = os.fspath(prefix)
    kind = np.dtype(dtype)
    lengths: list[int] = []
    names = [Path(f"{path}.bin"), Path(f"{path}.idx")]
    part, index = map(staging_file, names)
    with open(part, "wb") as file:
        for row in rows:
            values = np.asarray(row, dtype=kind)
            lengths.append(values.size)
            file.write(values.astype(kind.newbyteorder("<")).tobytes())
    offsets = np.zeros(len(lengths), np.int64)
    if lengths:
        offsets[1:] = np.cumsum(lengths[:-1]) * kind.itemsize
    with open(index, "wb") as file:
        file.write(MAGIC + _HEAD.pack(1, _CODES[kind], len(lengths), 2))
        file.write(np.asarray(lengths, "<i4").tobytes() + offsets.astype("<i8").tobytes())
        file.write(np.asarray([0, len(lengths)], "<i8").tobytes())
    with alone_in(names[0].parent):  # two files that belong together
        os.replace(part, names[0])
        os.replace(index, names[1])


class IndexedRows:
    """The rows of one pair of files, accessed by index.

    Raises:
        FileNotFoundError: if a file is missing; ValueError: if a file has another format or is truncated.
    """

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        path = os.fspath(prefix)
        index = Path(f"{path}.idx").read_bytes()
        if not index.startswith(MAGIC):
            raise ValueError(f"{path}.idx is not an index in Megatron's format (it begins with {index[:9]!r})")
        version, code, number, documents = _HEAD.unpack_from(index, len(MAGIC))
        start = len(MAGIC) + _HEAD.size
        if version != 1 or code not in _DTYPES or len(index) < start + 12 * number + 8 * documents:
            raise ValueError(f"{path}.idx is damaged or has an unknown version (version {version}, dtype {code})")
        self.dtype = np.dtype(_DTYPES[code])
        self.lengths: Integers = np.frombuffer(index, "<i4", number, start)
        self._offsets: Integers = np.frombuffer(index, "<i8", number, start + 4 * number)
        size = os.path.getsize(f"{path}.bin")
        needed = int(self.lengths.sum()) * self.dtype.itemsize
        if size < needed:
            raise ValueError(f"{path}.bin has {size} bytes, but its index expects {needed}")
        empty: Integers = np.zeros(0, self.dtype)
        self._values = np.memmap(f"{path}.bin", self.dtype.newbyteorder("<"), "r") if size else empty

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, number: int) -> Integers:
        start = int(self._offsets[number]) // self.dtype.itemsize
        return np.asarray(self._values[start : start + int(self.lengths[number])], dtype=self.dtype)

    def flat(self) -> Integers:
        """All rows concatenated."""
        return np.asarray(self._values[: int(self.lengths.sum())], dtype=self.dtype)


PER_SAMPLE, ACCUMULATED = "single_value_per_sample", "accumulate_value_over_samples"
Metric = Callable[[Any], Any]
Values = NDArray[Any]
_POINTS = 100  # approximate number of rows of a percentile index


class DataAnalyzer:
    """Computes metrics of a data set.

    Args:
        dataset: a map-style data set with integer keys.
        num_workers: number of processes that call `run_map`; this one has the index `worker_id`.
        num_threads: threads of this worker, which share its samples.
        batch_size: samples per call of a metric function, combined by `collate_fn`.
        metric_functions: map a batch to a vector of integers: one per sample, or the terms of a sum.
        metric_types: "single_value_per_sample" or "accumulate_value_over_samples" for each metric.
        metric_dtypes: required integer type of each metric's values; optional.
        sample_indices: index of each sample, if it differs from its position.

    Raises:
        ValueError: if the lists of metrics differ in length, or a type is unknown.
    """

    def __init__(
        self,
        dataset: Any,
        num_workers: int = 1,
        worker_id: int = 0,
        num_threads: int = 1,
        num_threads_reduce: int = 1,
        specific_threads: Sequence[int] = (),
        batch_size: int = 1,
        metric_names: Sequence[str] = (),
        metric_functions: Sequence[Metric] = (),
        metric_types: Sequence[str] = (),
        metric_dtypes: Sequence[Any] = (),
        save_path: str = "./",
        collate_fn: Callable[[list[Any]], Any] | None = None,
        custom_map_init: Any = None,
        custom_map_update: Any = None,
        custom_map_finalize: Any = None,
        custom_reduce: Any = None,
        sample_indices: Sequence[int] | None = None,
    ) -> None:
        if custom_map_init or custom_map_update or custom_map_finalize or custom_reduce:
            raise NotImplementedError(
                "DataAnalyzer(custom_map_init=, custom_map_update=, custom_map_finalize=, custom_reduce=): write the "
                "metric as a function of a batch in metric_functions"
            )
        if not len(metric_names) == len(metric_functions) == len(metric_types):
            raise ValueError(
                f"DataAnalyzer: {len(metric_names)} metric_names, {len(metric_functions)} metric_functions and "
                f"{len(metric_types)} metric_types: give one of each for every metric"
            )
        for kind in metric_types:
            if kind not in (PER_SAMPLE, ACCUMULATED):
                raise ValueError(f"DataAnalyzer(metric_types=[{kind!r}]): must be {PER_SAMPLE} or {ACCUMULATED}")
        self._dataset = dataset
        self._workers, self._worker = num_workers, worker_id
        self._threads = num_threads
        self._only = tuple(specific_threads)
        self._batch_size = batch_size
        self._metrics = list(zip(metric_names, metric_functions, metric_types))
        self._dtypes = list(metric_dtypes)
        self._folder = Path(save_path)
        self._collate = collate_fn or list
        self._numbers = sample_indices

    def run_map(self) -> None:
        """Measure this worker's samples."""
        for (name, _, _), (values, numbers) in zip(self._metrics, self._measured()):
            folder = self._folder / name
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"worker{self._worker}.npz"
            partial = staging_file(path)
            with open(partial, "wb") as file:
                np.savez(file, values=values, numbers=numbers)
            os.replace(partial, path)

    def run_reduce(self) -> None:
        """Merge the results of all workers.

        Raises:
            FileNotFoundError: if the results of a worker are missing.
        """
        workers = []
        for worker in range(self._workers):
            parts = [np.load(self._folder / name / f"worker{worker}.npz") for name, _, _ in self._metrics]
            workers.append([(part["values"], part["numbers"]) for part in parts])
        self._write(workers)

    def run_map_reduce(self, comm_group: Any = None) -> None:
        """Run both steps, by all ranks of the process group if there are several workers, else in this process."""
        if self._workers > 1 and is_initialized():
            self._run_together(collectives_for(torch.device("cpu")))
            return
        mine = self._worker
        for worker in range(self._workers):
            self._worker = worker
            self.run_map()
        self._worker = mine
        self.run_reduce()

    def _run_together(self, world: Collectives) -> None:
        """Use every rank as a worker; rank 0 writes. Collective; returns when the files are written."""
        self._workers, self._worker = world.size, world.rank
        parts = world.gather_objects(self._measured())
        if world.rank == 0:
            self._write(parts)
        world.gather_objects("written")

    def _measured(self) -> list[tuple[Values, Values]]:
        """For each metric, the values of this worker's samples and their indices."""
        first, last = _range(len(self._dataset), self._workers, self._worker)
        threads = self._only or range(self._threads)
        ranges = [_range(last - first, self._threads, thread) for thread in threads]
        with ThreadPoolExecutor(len(ranges)) as pool:
            parts = list(pool.map(lambda part: self._measure(first + part[0], first + part[1]), ranges))
        numbers = np.concatenate([self._ids(first + start, first + stop) for start, stop in ranges])
        measured = []
        for number, (_, _, kind) in enumerate(self._metrics):
            mine = [part[number] for part in parts if len(part[number])]
            measured.append((_joined(mine, summed=kind == ACCUMULATED), numbers))
        return measured

    def _write(self, workers: Sequence[Any]) -> None:
        """Write the index files from the results of all workers."""
        for number, (name, _, kind) in enumerate(self._metrics):
            (self._folder / name).mkdir(parents=True, exist_ok=True)
            parts = [worker[number] for worker in workers]
            values = [part for part, _ in parts if len(part)]
            if kind == PER_SAMPLE:
                write_metric(self._folder, name, np.concatenate(values), np.concatenate([ids for _, ids in parts]))
            else:
                write_total(self._folder, name, np.sum(values, axis=0))

    def _measure(self, first: int, last: int) -> list[Values]:
        by_metric: list[list[Values]] = [[] for _ in self._metrics]
        for start in range(first, last, self._batch_size):
            rows = range(start, min(last, start + self._batch_size))
            batch = self._collate([self._dataset[row] for row in rows])
            for number, (name, function, kind) in enumerate(self._metrics):
                values = self._checked(number, name, function(batch))
                if kind == PER_SAMPLE and len(values) != len(rows):
                    raise ValueError(
                        f"metric {name!r} returned {len(values)} values for a batch of {len(rows)} samples: a "
                        f"{PER_SAMPLE} metric must return one for each"
                    )
                by_metric[number].append(values)
        return [_joined(parts, summed=kind == ACCUMULATED) for parts, (_, _, kind) in zip(by_metric, self._metrics)]

    def _checked(self, number: int, name: str, given: Any) -> Values:
        values = given.detach().cpu().numpy() if isinstance(given, Tensor) else np.asarray(given)
        if values.ndim != 1 or values.dtype.kind not in "iu":
            raise ValueError(
                f"metric {name!r} must return a vector of integers, not {values.dtype} of shape {values.shape}"
            )
        if self._dtypes:
            wanted = np.dtype(
                str(self._dtypes[number]).removeprefix("torch.").removeprefix("<class 'numpy.").rstrip("'>")
            )
            if values.dtype != wanted:
                raise ValueError(f"metric {name!r} returned {values.dtype}, but metric_dtypes requires {wanted}")
        return values

    def _ids(self, first: int, last: int) -> Values:
        if self._numbers is None:
            return np.arange(first, last)
        return np.asarray([self._numbers[row] for row in range(first, last)], np.int64)


class DistributedDataAnalyzer(DataAnalyzer):
    """A DataAnalyzer that uses all ranks of a process group: each measures its part, rank 0 writes.

    Args:
        comm_group: accepted for compatibility; all ranks participate.
        device: accepted for compatibility, without effect: the metric functions choose their device.
    """

    def __init__(
        self,
        dataset: Any,
        num_workers: int = 1,
        num_threads: int = 1,
        worker_id: int = 0,
        batch_size: int = 1,
        metric_names: Sequence[str] = (),
        metric_functions: Sequence[Metric] = (),
        metric_types: Sequence[str] = (),
        save_path: str = "./",
        collate_fn: Callable[[list[Any]], Any] | None = None,
        device: Any = None,
        comm_group: Any = None,
        sample_indices: Sequence[int] | None = None,
    ) -> None:
        super().__init__(
            dataset,
            num_workers,
            worker_id,
            num_threads,
            batch_size=batch_size,
            metric_names=metric_names,
            metric_functions=metric_functions,
            metric_types=metric_types,
            save_path=save_path,
            collate_fn=collate_fn,
            sample_indices=sample_indices,
        )

    def run_map_reduce(self, comm_group: Any = None) -> None:
        """Run both steps. Collective over all ranks; returns when the files are written."""
        self._run_together(comm_group if isinstance(comm_group, Collectives) else collectives_for(torch.device("cpu")))


def _joined(parts: list[Values], *, summed: bool) -> Values:
    if not parts:
        return np.zeros(0, np.int64)
    return np.sum(parts, axis=0) if summed else np.concatenate(parts)


def _range(number: int, parts: int, part: int) -> tuple[int, int]:
    bounds = np.linspace(0, number, parts + 1, dtype=np.int64)
    return int(bounds[part]), int(bounds[part + 1])


def write_metric(folder: Path, name: str, values: Values, numbers: Values) -> None:
    """Write all index files of a metric with one value per sample."""
    prefix = folder / name / name
    order = np.argsort(numbers, kind="stable")
    values, numbers = values[order], numbers[order]
    rows = samples_by_value(values, numbers)
    kind, number_kind = fitting_dtype(int(values.min()), int(values.max())), fitting_dtype(0, int(numbers.max()))
    write_rows(f"{prefix}_sample_to_metric", values[:, None], kind)
    write_rows(f"{prefix}_index_to_metric", [[value] for value in rows], kind)
    write_rows(f"{prefix}_index_to_sample", rows.values(), number_kind)
    lists = list(rows.values())
    step = max(1, len(lists) // _POINTS)
    merged = [np.concatenate(lists[start : start + step]) for start in range(0, len(lists), step)]
    write_rows(f"{prefix}_index_to_sample_percentile_merged", merged, number_kind)


def samples_by_value(values: Values, numbers: Values) -> Mapping[int, Values]:
    """Map each distinct value, in ascending order, to its samples in ascending order."""
    order = np.argsort(values, kind="stable")
    distinct, starts = np.unique(values[order], return_index=True)
    return {int(value): part for value, part in zip(distinct, np.split(numbers[order], starts[1:]))}


def write_total(folder: Path, name: str, total: Values) -> None:
    """Write the file of a metric that is summed over all samples."""
    write_rows(folder / name / f"{name}_metric_value", [total], fitting_dtype(int(total.min()), int(total.max())))
