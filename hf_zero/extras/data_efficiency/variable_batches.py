"""Loaders and learning rate schedules for batches by number of tokens, under DeepSpeed's names, for custom loops.

loader, scheduler, _ = get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed(dataset, engine, lengths)
engine.training_dataloader, engine.lr_scheduler = loader, scheduler
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler

from hf_zero.extras.data_efficiency.analyzer import DistributedDataAnalyzer, IndexedRows
from hf_zero.extras.data_efficiency.packs import PackedBatches, VariableBatches, scale_lr
from hf_zero.extras.data_efficiency.section import DataSampling, DynamicBatching, PackingPolicy, data_policy
from hf_zero.log import logger
from hf_zero.schedules import write_rates

Padding = Callable[[Any, int], Any]
Place = tuple[int, int]  # epoch, pack
_ANALYSED_AT_ONCE = 1024


class PackDataset(Dataset[list[Any]]):
    """The samples of a pack, accessed by epoch and index."""

    def __init__(self, dataset: Any, epoch: Callable[[int], PackedBatches], padding: Padding | None = None) -> None:
        """`padding`: pads a sample to the maximum length of its update."""
        self._dataset = dataset
        self._epoch = epoch
        self._padding = padding

    def __len__(self) -> int:
        return len(self._epoch(0).packs)

    def __getitem__(self, place: Place | int) -> list[Any]:
        epoch, number = place if isinstance(place, tuple) else (0, place)
        batches = self._epoch(epoch)
        samples = [self._dataset[sample] for sample in batches.packs[number]]
        if self._padding is None:
            return samples
        return [self._padding(sample, batches.longest[number // batches.per_update]) for sample in samples]


class PackSampler(Sampler[Place]):
    """The packs of one rank (every `world`-th), from the current update of training to the end of its epoch."""

    def __init__(
        self, epoch: Callable[[int], PackedBatches], world: int, rank: int, first_update: Callable[[], int] = lambda: 0
    ) -> None:
        self._epoch = epoch
        self._world, self._rank = world, rank
        self._first_update = first_update

    def __len__(self) -> int:
        return len(self._epoch(0).packs) // self._world

    def __iter__(self) -> Iterator[Place]:
        epoch, update = 0, self._first_update()
        while update >= len(self._epoch(epoch).samples):
            update -= len(self._epoch(epoch).samples)
            epoch += 1
        batches = self._epoch(epoch)
        for number in range(update * batches.per_update + self._rank, len(batches.packs), self._world):
            yield epoch, number


class VariableBatchSizeLR(LRScheduler):
    """Scales the learning rates of another schedule by the number of samples of the next update.

    Args:
        lr_scheduler: the schedule for updates of `base_batch_size` samples.
        batch_sizes: samples of every update, repeated cyclically, or a function of the update's number.
        lr_scaling_method: as in `scale_lr`.
    """

    def __init__(
        self,
        lr_scheduler: Any,
        base_batch_size: int,
        batch_sizes: Sequence[int] | Callable[[int], int],
        dataloader: Any = None,
        lr_scaling_method: str | None = "linear",
        last_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        # torch's __init__ is not called: it would step and overwrite the rates of the groups before they are read.
        self.base_lr_scheduler = lr_scheduler
        self.base_batch_size = base_batch_size
        self.batch_sizes = batch_sizes
        self.dataloader = dataloader
        self.lr_scaling_method = lr_scaling_method
        self.verbose = verbose
        self.last_epoch = last_epoch + 1
        self.base_lrs: list[Any] = self._rates()
        self._scale()

    @property
    def optimizer(self) -> Any:  # type: ignore[override]
        return self.base_lr_scheduler.optimizer

    def get_lr(self) -> list[Any]:
        return self._rates()

    def get_last_lr(self) -> list[Any]:
        return self._last_lr

    def step(self, epoch: int | None = None) -> None:
        """Advance both schedules by one update, or to the given update."""
        write_rates(self.optimizer, self.base_lrs)  # many of torch's schedules continue from the values in the groups
        if epoch is None:
            self.base_lr_scheduler.step()
        else:
            self.base_lr_scheduler.step(epoch)
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        self.base_lrs = self._rates()
        self._scale()

    def state_dict(self) -> dict[str, Any]:
        base = self.base_lr_scheduler.state_dict()
        return {"base_lr_scheduler": base, "last_epoch": self.last_epoch, "base_lrs": list(self.base_lrs)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the schedule's state and the rates of the next update. Batch sizes are those of this run."""
        self.base_lr_scheduler.load_state_dict(state_dict["base_lr_scheduler"])
        self.last_epoch = state_dict["last_epoch"]
        self.base_lrs = list(state_dict["base_lrs"])
        self._scale()

    def _rates(self) -> list[Any]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def _scale(self) -> None:
        update, sizes = self.last_epoch, self.batch_sizes
        samples = sizes(update) if callable(sizes) else sizes[update % len(sizes)]
        scaled = [scale_lr(self.base_batch_size, samples, rate, self.lr_scaling_method) for rate in self.base_lrs]
        write_rates(self.optimizer, scaled)
        self._last_lr = scaled
        if self.verbose:
            logger.info("update %d: %d samples, learning rates %s", update, samples, scaled)


class _Constant:
    """A schedule that keeps an optimizer's learning rates."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self, epoch: int | None = None) -> None:
        return None

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        return None


def lr_scheduler_for_variable_batch_size(
    base_batch_size: int,
    batch_sizes: Sequence[int] | Callable[[int], int],
    dataloader: Any,
    lr_scheduler_or_optimizer: Any,
    lr_scaling_method: str | None = "linear",
    verbose: bool = False,
) -> VariableBatchSizeLR:
    """A schedule that scales the given one, or the constant rates of an optimizer.

    Raises:
        ValueError: if the argument is neither a schedule nor an optimizer.
    """
    given = lr_scheduler_or_optimizer
    if hasattr(given, "param_groups"):
        given = _Constant(given)
    elif not hasattr(getattr(given, "optimizer", None), "param_groups"):
        raise ValueError(f"lr_scheduler_or_optimizer: {type(given).__name__} is neither a schedule nor an optimizer")
    return VariableBatchSizeLR(given, base_batch_size, batch_sizes, dataloader, lr_scaling_method, verbose=verbose)


def dataloader_for_variable_batch_size(
    dataset: Any,
    microbatch_ids: Sequence[tuple[int, Sequence[int]]],
    batch_max_seqlens: Sequence[int],
    dataloader_rank: int = 0,
    dataloader_batch_size: int = 1,
    dataloader_num_replicas: int = 1,
    dataloader_collate_fn: Callable[[list[Any]], Any] | None = None,
    dataloader_num_workers: int = 2,
    dataloader_pin_memory: bool = False,
    required_microbatches_of_same_seqlen: bool = False,
    sample_padding_fn: Padding | None = None,
) -> tuple[DataLoader[Any], dict[str, Any]]:
    """A loader over the packs that `batch_by_seqlens` returns, and arguments of `engine.deepspeed_io` for the same."""
    per_update = max(1, len(microbatch_ids) // max(1, len(batch_max_seqlens)))
    packs = [list(samples) for _, samples in microbatch_ids]
    sizes = [sum(map(len, packs[start : start + per_update])) for start in range(0, len(packs), per_update)]
    batches = PackedBatches(packs, per_update, sizes, list(batch_max_seqlens))
    padding = _padding(sample_padding_fn, is_needed=required_microbatches_of_same_seqlen)
    return _loader(
        PackDataset(dataset, lambda epoch: batches, padding),
        PackSampler(lambda epoch: batches, dataloader_num_replicas, dataloader_rank),
        dataloader_batch_size,
        dataloader_collate_fn,
        dataloader_num_workers,
        dataloader_pin_memory,
    )


def get_dataloader_and_lr_scheduler_for_variable_batch_size(
    dataset: Any,
    dataset_seqlens: Sequence[int],
    max_tokens: int,
    effective_batch_size: int,
    dataset_filter_ids: Sequence[int] | None = None,
    lr_scaling_method: str | None = "linear",
    min_batch_size: int = 1,
    max_batch_size: int | None = None,
    sequence_picking_order: str = "dataloader",
    dataloader_batch_size: int = 1,
    dataloader_rank: int = 0,
    dataloader_num_replicas: int = 1,
    dataloader_num_workers: int = 0,
    dataloader_collate_fn: Callable[[list[Any]], Any] | None = None,
    dataloader_pin_memory: bool = False,
    lr_scheduler_or_optimizer: Any = None,
    required_microbatches_of_same_size: bool = False,
    required_microbatches_of_same_seqlen: bool = False,
    sample_padding_fn: Padding | None = None,
    verbose: bool = False,
    seed: int | None = None,
    *,
    first_update: Callable[[], int] = lambda: 0,
) -> tuple[DataLoader[Any], VariableBatchSizeLR, dict[str, Any]]:
    """A loader of batches by number of tokens, a schedule that scales with their sizes, and arguments of
    `engine.deepspeed_io`.

    Args:
        effective_batch_size: packs per update, over all ranks.
        dataset_filter_ids: the samples to use; default: all.
        dataloader_batch_size: packs per forward.
        first_update: returns the update at which an iteration of the loader begins.

    Raises:
        ValueError: if a setting is unknown, or there are not enough samples for an update.
    """
    policy = PackingPolicy(
        max_tokens=max_tokens,
        min_samples=min_batch_size,
        max_samples=max_batch_size,
        order=sequence_picking_order,
        seed=seed or 0,
    )
    batches = VariableBatches(
        dataset_seqlens, policy, effective_batch_size, dataset_filter_ids, alike=required_microbatches_of_same_size
    )
    padding = _padding(sample_padding_fn, is_needed=required_microbatches_of_same_seqlen)
    loader, keywords = _loader(
        PackDataset(dataset, batches.epoch, padding),
        PackSampler(batches.epoch, dataloader_num_replicas, dataloader_rank, first_update),
        dataloader_batch_size,
        dataloader_collate_fn,
        dataloader_num_workers,
        dataloader_pin_memory,
    )
    scheduler = lr_scheduler_for_variable_batch_size(
        effective_batch_size, batches.samples_of, loader, lr_scheduler_or_optimizer, lr_scaling_method, verbose
    )
    return loader, scheduler, keywords


def get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed(
    dataset: Any,
    engine: Any,
    dataset_seqlens: Sequence[int] | None = None,
    dataset_filter_ids: Sequence[int] | None = None,
    dataloader_collate_fn: Callable[[list[Any]], Any] | None = None,
    sample_padding_fn: Padding | None = None,
    batch_seqlens_fn: Callable[[Any], Any] | None = None,
) -> tuple[DataLoader[Any], VariableBatchSizeLR, dict[str, Any]]:
    """Like `get_dataloader_and_lr_scheduler_for_variable_batch_size`, with the settings in the engine's section
    dynamic_batching; the loader begins at the engine's current update.

    Args:
        dataset_seqlens: tokens of every sample; default: those that the analyzer has written to `metrics_path`.
        batch_seqlens_fn: maps a batch to the tokens of its samples, to run the analyzer if necessary. Collective.

    Raises:
        RuntimeError: if the section is not enabled.
        ValueError: if lengths are missing, or belong to another data set.
    """
    resolved = engine.settings.resolved
    section, loading = resolved.section(DynamicBatching), resolved.section(DataSampling)
    policy = data_policy(resolved).packing
    if policy is None:
        raise RuntimeError(
            "data_efficiency.data_sampling.dynamic_batching is not enabled in the engine's config: set enabled and "
            "max_tokens"
        )
    ranks = engine.groups.data
    lengths = dataset_seqlens
    if lengths is None:
        lengths = _analysed(dataset, engine, section.metrics_path, dataloader_collate_fn, batch_seqlens_fn)
    return get_dataloader_and_lr_scheduler_for_variable_batch_size(
        dataset,
        lengths,
        policy.max_tokens,
        engine.settings.samples_per_update(),
        dataset_filter_ids,
        section.lr_scaling_method,
        policy.min_samples,
        policy.max_samples,
        policy.order,
        engine.settings.train_micro_batch_size_per_gpu(),
        ranks.rank,
        ranks.size,
        loading.num_workers,
        dataloader_collate_fn,
        loading.pin_memory,
        engine.lr_scheduler or engine.optimizer,
        sample_padding_fn=sample_padding_fn,
        required_microbatches_of_same_seqlen=sample_padding_fn is not None,
        verbose=section.verbose,
        seed=policy.seed,
        first_update=lambda: int(engine.global_steps),
    )


def _analysed(
    dataset: Any,
    engine: Any,
    metrics_path: str | None,
    collate_fn: Callable[[list[Any]], Any] | None,
    batch_seqlens_fn: Callable[[Any], Any] | None,
) -> list[int]:
    """Tokens of every sample, from the analyzer's file."""
    key = "data_efficiency.data_sampling.dynamic_batching.metrics_path"
    if metrics_path is None:
        raise ValueError(f"give dataset_seqlens, the tokens of every sample, or set {key} to the analyzer's folder")
    prefix = Path(metrics_path) / "seqlen" / "seqlen_sample_to_metric"
    exist = [prefix.with_name(f"{prefix.name}{suffix}").exists() for suffix in (".bin", ".idx")]
    if not all(engine.groups.world.gather_objects(all(exist))):
        if batch_seqlens_fn is None:
            raise ValueError(
                f"{prefix}.bin and .idx do not exist on every rank: run DataAnalyzer with a metric named seqlen, or "
                "give batch_seqlens_fn or dataset_seqlens"
            )
        DistributedDataAnalyzer(
            dataset,
            batch_size=_ANALYSED_AT_ONCE,
            metric_names=["seqlen"],
            metric_functions=[batch_seqlens_fn],
            metric_types=["single_value_per_sample"],
            save_path=metrics_path,
            collate_fn=collate_fn,
        ).run_map_reduce(engine.groups.world)
    lengths = [int(value) for value in IndexedRows(str(prefix)).flat()]
    if len(lengths) != len(dataset):
        raise ValueError(f"{prefix} has {len(lengths)} samples, but the data set has {len(dataset)}: analyze this one")
    return lengths


def _padding(given: Padding | None, *, is_needed: bool) -> Padding | None:
    if is_needed and given is None:
        raise ValueError("required_microbatches_of_same_seqlen: give sample_padding_fn(sample, length)")
    return given if is_needed else None


def _loader(
    packs: PackDataset,
    sampler: PackSampler,
    batch_size: int,
    collate_fn: Callable[[list[Any]], Any] | None,
    num_workers: int,
    pin_memory: bool,
) -> tuple[DataLoader[Any], dict[str, Any]]:
    joined = partial(_joined, collate_fn or list)  # loader workers may need to pickle it
    loader: DataLoader[Any] = DataLoader(
        packs, batch_size=batch_size, sampler=sampler, collate_fn=joined, num_workers=num_workers, pin_memory=pin_memory
    )
    keywords = {"dataset": packs, "batch_size": batch_size, "data_sampler": sampler, "collate_fn": joined}
    return loader, {**keywords, "num_local_io_workers": num_workers, "pin_memory": pin_memory}


def _joined(collate_fn: Callable[[list[Any]], Any], packs: Sequence[Sequence[Any]]) -> Any:
    """Several packs collated as one batch."""
    return collate_fn([sample for samples in packs for sample in samples])
