"""`deepspeed.initialize`, and the engine that it returns: `ZeroEngine` with all other names of DeepSpeed's engine."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from hf_zero.api import entry
from hf_zero.api.entry import OptimizerLike
from hf_zero.api.gathered_parameters import load_module_state_dict
from hf_zero.api.inputs import training_loader
from hf_zero.comm import enter, get_local_rank
from hf_zero.comm.process_group import get_world_group
from hf_zero.config import ConfigError, Problem
from hf_zero.device.kinds import BACKENDS
from hf_zero.errors import listen
from hf_zero.integration.engine.config_queries import ConfigQueries
from hf_zero.integration.engine.instead import ENGINE, explained
from hf_zero.integration.engine.optimizer import DeepSpeedOptimizer, optimizer_class
from hf_zero.integration.engine.view import View
from hf_zero.params.consolidation import consolidated_state_dict, with_extra_states
from hf_zero.sequence.groups import process_group_of


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: OptimizerLike | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[DeepSpeedEngine, Any, DataLoader[Any] | None, Any]:
    """Wrap `model` in an engine that trains it by the config. Collective.

    It joins the process group that the launcher describes, if the program has not; without a launcher it is one rank.

        engine, optimizer, _, scheduler = hf_zero.initialize(model=model, config="ds.json")

    Args:
        args: a namespace with `deepspeed_config`, or its old spelling `deepscale_config`, if no config is given
            otherwise.
        model: the model, on any device. It is moved, cast and sharded in place.
        optimizer: a torch optimizer, or a callable that creates one from parameters; overrides the config's section.
        model_parameters: parameters or param groups to train; default: all of the model's that require gradients.
        training_data: a dataset for the returned DataLoader.
        lr_scheduler: a scheduler, or a callable that creates one from the torch optimizer; overrides the config.
        distributed_port: port of rank 0, if MASTER_PORT is not set.
        dist_init_required: False leaves it to the program to join the process group, before this call.
        collate_fn: for the returned DataLoader.
        mpu: process groups of sequence parallelism (the result of `UlyssesSPAttentionHF.register_with_transformers`, or
            an object with `get_sequence_parallel_group`), or of tensor parallelism (`get_tensor_model_parallel_group`
            or `get_model_parallel_group`).
        mesh_param: sequence parallelism as (data ranks, ranks per sequence) or as a DeviceMesh with a dimension "sp".
        config: dict, path, JSON text or base64 JSON. `config_params` is its older name.

    Returns:
        (engine, optimizer, dataloader or None, scheduler or None)

    Raises:
        ConfigError: with every problem of the config at once.
        WrongArgument: without a model.
        DoesNotFit: if host memory or a drive has no room for what the config puts there.
    """
    listen()
    engine = entry.initialize(
        model,
        _config_source(args, config, config_params),
        optimizer=optimizer,
        model_parameters=model_parameters,
        training_data=training_data,
        lr_scheduler=lr_scheduler,
        distributed_port=distributed_port,
        mpu=mpu,
        dist_init_required=dist_init_required,
        collate_fn=collate_fn,
        mesh_param=mesh_param,
        engine_class=DeepSpeedEngine,
    )
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _config_source(args: Any, config: Any, config_params: Any) -> Any:
    from_args, old = getattr(args, "deepspeed_config", None), getattr(args, "deepscale_config", None)
    if from_args is not None and old is not None:
        rule = "the old spelling of args.deepspeed_config, which is given too"
        raise ConfigError(Problem("args.deepscale_config", old, rule, "give it in one place"))
    from_args = old if from_args is None else from_args
    given = config if config is not None else config_params
    if given is not None and from_args is not None:
        rule = "the config is given twice: here and as config="
        raise ConfigError(
            Problem("args.deepspeed_config", from_args, rule, "give it in one place", raises=AssertionError)
        )
    source = given if given is not None else from_args
    if source is None:
        fix = "pass config= (dict, path, JSON text or base64) or args.deepspeed_config"
        rule = "no config was given: initialize() requires --deepspeed_config to specify configuration file"
        raise ConfigError(Problem("config", None, rule, fix, raises=AssertionError))
    return source


class DeepSpeedEngine(ConfigQueries):
    """What `initialize` returns. Of the names that only DeepSpeed's engine has, docs/deepspeed_names.md says what to
    use instead."""

    optimizer_class = staticmethod(optimizer_class)

    def __getattr__(self, name: str) -> Any:
        """Look up attributes of the wrapped model."""
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            raise explained(error, name, "engine", ENGINE) from None

    # Accumulation

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the present or next backward is the last before an update."""
        return self.gradients.boundaries.is_last

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set whether the next backward is the last of its step; micro-batches are no longer counted.

        Raises:
            AssertionError: with managed_gradient_accumulation=false, where every `step` updates.
        """
        assert self.managed_gradient_accumulation(), (
            "set_gradient_accumulation_boundary() is not supported with managed_gradient_accumulation=False; "
            "the caller owns the boundary by calling step()"
        )
        self.gradients.tell_boundary(is_last=is_boundary)

    def coalesce_grad_reduction(self) -> AbstractContextManager[None]:
        """Do nothing: buckets are reduced once per micro-batch anyway, so several backward calls need no context."""
        return nullcontext()

    @View
    def inside_no_sync_ctxt(self) -> bool:
        return self.gradients.is_accumulating

    # The last update

    def get_global_grad_norm(self) -> float | None:
        """Global L2 norm of the last step before clipping; None before the first. Waits for the device."""
        optimizer = self._trained
        return None if optimizer is None else optimizer.grad_norm

    @View
    def _global_grad_norm(self) -> float | None:
        return self.get_global_grad_norm()

    def was_step_applied(self) -> bool:
        """Whether the last boundary changed the weights; waits for the device."""
        optimizer = self._trained
        return optimizer is not None and self.global_steps > 0 and not optimizer.overflow

    @View
    def _step_applied(self) -> bool:
        return self.was_step_applied()

    def loss_scale(self) -> float:
        """Factor of the loss in the next backward; 1 unless fp16 is used."""
        return float(self._optimizer("loss_scale").loss_scale)

    def dynamic_loss_scale(self) -> bool:
        return self._optimizer("dynamic_loss_scale").loss_scaler.dynamic

    def get_type(self) -> list[Any]:
        """`type` of every param group."""
        return [group.get("type") for group in self._optimizer("get_type").param_groups]

    def get_wall_clock_timers(self) -> dict[str, float]:
        """Times of the last update in ms; empty if no key of ds.json has them recorded. Waits for the device."""
        watching = cast(Any, self.training_features.named("profiling"))
        last = watching.last_breakdown() if watching is not None else None
        return dict(last.timers) if last is not None else {}

    _timer: Any = None

    @View
    def tput_timer(self) -> Any:
        """Created on first use, and counts updates from then on."""
        if self._timer is None:
            from hf_zero.profiling.timers import ThroughputTimer

            options = type("Enabled", (), {"enabled": True, "synchronized": False})()
            self._timer = ThroughputTimer(options, self.settings.samples_per_update(), start_step=0)
            self._timer.start()
        return self._timer

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        number = self.global_steps
        super().step(lr_kwargs)
        if self._timer is not None and self.global_steps > number:
            self._timer.stop(global_step=True)
            self._timer.start()

    # The optimizer and its schedule

    def _optimizer(self, caller: str) -> DeepSpeedOptimizer:
        return cast(DeepSpeedOptimizer, self.gradients.parts(caller).optimizer)

    @property
    def _trained(self) -> DeepSpeedOptimizer | None:
        assembly = self.gradients.assembly
        return None if assembly is None else cast(DeepSpeedOptimizer, assembly.optimizer)

    @View
    def basic_optimizer(self) -> torch.optim.Optimizer | None:
        """The torch optimizer inside the engine's."""
        return getattr(self._trained, "optimizer", None)

    @View
    def client_lr_scheduler(self) -> Any:
        """The schedule, unless the config made it."""
        return self.lr_scheduler if self.settings.resolved.scheduler is None else None

    def offload_states(
        self, include: Any = None, device: Any = "cpu", pin_memory: bool = True, non_blocking: bool = False
    ) -> None:
        """Move states that forward does not need to host memory, for example before generation; the next step reloads
        them.

        Args:
            include: members of `deepspeed.runtime.zero.offload_config.OffloadStateTypeEnum`; default: all except the
                model's weights.
            device: "cpu".
            pin_memory: use page-locked host memory, which copies faster.
            non_blocking: accepted; the copies are complete when this returns.

        Raises:
            ValueError: for another device, and for the model's weights.
        """
        if str(getattr(device, "value", device)) != "cpu":
            raise ValueError(f"offload_states(device={device!r}): only host memory (cpu) serves")
        from hf_zero.api.offload_states import OffloadStates  # few programs need it

        parts = self.gradients.parts("offload_states")
        if self.gradients.offloaded is None:
            self.gradients.offloaded = OffloadStates(parts.optimizer, parts.reducer)
        self.gradients.offloaded.send(include, pinned=pin_memory)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Move the states of `offload_states` back, if there are any."""
        self.gradients.bring_back()

    # Weights

    def module_state_dict(
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """The model's state dict with whole weights, on every rank. Collective at stage 3, and among ranks that hold
        parts of matrices.

        Args:
            destination: gets the weights and is returned; `prefix` comes before their names.
            keep_vars: the parameters themselves, where ranks have them whole.
            exclude_frozen_parameters: leave out parameters that do not require gradients.

        Raises:
            NotImplementedError: for `keep_vars` where ranks have parts.
        """
        module = self.module
        if self.zero_optimization_stage() < 3 and not self.groups.holds_parts:
            given: Any = destination
            state: dict[str, Any] = module.state_dict(destination=given, prefix=prefix, keep_vars=keep_vars)
            frozen = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
            for name in frozen if exclude_frozen_parameters else ():
                state.pop(prefix + name, None)
            return state
        if keep_vars:
            raise NotImplementedError(
                "module_state_dict(keep_vars=True): this rank has parts of the parameters, so whole ones are copies; "
                "leave keep_vars out, or read engine.module.named_parameters() inside "
                "deepspeed.zero.GatheredParameters(...)"
            )
        enter("module_state_dict")
        weights: dict[str, Any] = consolidated_state_dict(module, keeps=True, exclude_frozen=exclude_frozen_parameters)
        weights.update((name, inner.get_extra_state()) for name, inner in with_extra_states(module))
        state = {} if destination is None else destination
        state.update({prefix + name: value for name, value in weights.items()})
        return state

    load_module_state_dict = load_module_state_dict

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        """Whole weights in host memory on rank 0, None on the others. Collective. Callers check
        stage3_gather_16bit_weights_on_model_save themselves (accelerate), or need the weights regardless of it (Trainer
        with adapters, OpenRLHF)."""
        return self.module_view.consolidated(exclude_frozen_parameters)

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        """Whole weights on rank 0 and None elsewhere, at every stage. Collective."""
        if self.zero_optimization_stage() == 3:
            return self._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)
        if self.groups.holds_parts:
            return self.module_view.consolidated(exclude_frozen_parameters)
        if self.groups.world.rank != 0:
            return None
        return self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write whole weights in the model's dtype as one torch file, from rank 0. Collective.

        Args:
            save_dir: a folder; created if missing.
            save_filename: the file in it.
            exclude_frozen_parameters: leave out parameters that do not require gradients.

        Returns:
            False, with a warning, if nothing was written: at stage 3 without
            stage3_gather_16bit_weights_on_model_save.

        Raises:
            CheckpointError: on every rank, if the file could not be written.
        """
        return self.module_view.save_16bit_model(save_dir, save_filename, exclude_frozen_parameters)

    save_fp16_model = save_16bit_model

    def empty_partition_cache(self) -> None:
        """Release all gathered parameters at stage 3, except persistent ones. Collective."""
        store = self.module_view.store
        if store is not None:
            store.prepare_update()

    @View
    def param_names(self) -> dict[nn.Parameter, str]:
        return {parameter: name for name, parameter in self.module.named_parameters()}

    @View
    def is_compiled(self) -> bool:
        return self.module._compiled_call_impl is not None

    # Files

    def _get_ckpt_name(self, checkpoints_path: str, tag: str, mp_placeholder: str | None = None) -> str:
        """Path of the model file that this rank reads."""
        from hf_zero.checkpoint.deepspeed.keys import model_file

        name = model_file(self.groups.shard.rank, self.zero_optimization_stage(), self.groups.model_rank)
        return os.path.join(checkpoints_path, str(tag), name if mp_placeholder is None else name.replace("00", "*"))

    def _get_zero_ckpt_name(self, checkpoints_path: str, tag: str) -> str:
        """Path of this rank's optimizer file."""
        from hf_zero.checkpoint.deepspeed.keys import optimizer_file

        rank, part = self.groups.shard.rank, self.groups.model_rank
        name = optimizer_file(rank, bf16=self.bfloat16_enabled(), model_rank=part)
        return os.path.join(checkpoints_path, str(tag), name)

    def _get_optimizer_ckpt_name(self, checkpoints_path: str, tag: str, expp_rank: int = 0) -> str:
        """Path of this rank's optimizer file."""
        return self._get_zero_ckpt_name(checkpoints_path, tag)

    @View
    def save_non_zero_checkpoint(self) -> bool:
        """Whether this rank writes model files."""
        return self.zero_optimization_stage() == 3 or self.groups.world.rank == 0

    @View
    def save_zero_checkpoint(self) -> bool:
        """Whether ranks write optimizer files of their own."""
        return self.zero_optimization()

    # Ranks and groups

    @View
    def global_rank(self) -> int:
        return self.groups.world.rank

    @View
    def world_size(self) -> int:
        return self.groups.world.size

    @View
    def local_rank(self) -> int:
        return get_local_rank()

    @View
    def mpu(self) -> Any:
        """The `mpu` given to `initialize`, or this engine's tensor-parallel groups."""
        return None

    @View
    def mesh_device(self) -> None:
        return None

    @View
    def dist_backend(self) -> str:
        return BACKENDS.get(self.device.type, "gloo")

    @View
    def data_parallel_group(self) -> Any:
        if self.groups.sample.size > 1:
            return None
        return getattr(self.mpu, "get_data_parallel_group", get_world_group)()

    @View
    def dp_world_size(self) -> int:
        return self.groups.data.size

    def get_data_parallel_rank(self) -> int:
        return self.groups.data.rank

    @View
    def mp_world_size(self) -> int:
        """Number of ranks that hold parts of the same matrices."""
        return self.groups.model_size

    @View
    def checkpoint_mp_rank(self) -> int:
        return self.groups.model_rank

    def get_model_parallel_rank(self) -> int:
        return self.groups.model_rank

    def get_tensor_parallel_rank(self) -> int:
        return self.groups.along("tensor").rank

    def autotp_size(self) -> int:
        """Number of ranks that hold parts of the same matrices; 0: every rank holds them whole."""
        return self.groups.model_size if self.groups.model_size > 1 else 0

    @View
    def sequence_parallel_size(self) -> int:
        return self.groups.sample.size

    @View
    def seq_parallel_group(self) -> Any:
        return process_group_of(self.groups)

    def get_sequence_parallel_group(self) -> Any:
        return process_group_of(self.groups)

    @View
    def seq_data_parallel_group(self) -> Any:
        return get_world_group()

    @View
    def seq_dp_world_size(self) -> int:
        return self.groups.world.size

    def is_first_weights_partition_group(self) -> bool:
        """Whether this rank belongs to the first replica of the states."""
        return self.groups.replica == 0

    @View
    def gradient_average(self) -> bool:
        """Whether gradients are averages over ranks, not sums."""
        return self.settings.resolved.gradients.average

    # Batches

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Any = None,
        num_local_io_workers: int | None = None,
    ) -> DataLoader[Any]:
        """A DataLoader over this rank's part of `dataset`, or over the samples of `data_sampler`.

        Args:
            batch_size: default: the micro-batch; without a size and a sampler, the result is that of
                `initialize(training_data=...)`.
            route: "train" shuffles.
            pin_memory: use page-locked host memory, unless ranks are on CPUs.
            data_sampler: of this rank's samples; default: an equal part of the dataset.
            num_local_io_workers: worker processes of the loader; default: none.
        """
        size = batch_size or self.settings.train_micro_batch_size_per_gpu()
        if data_sampler is None and batch_size is None and route == "train":
            return training_loader(self, dataset, collate_fn)
        if data_sampler is None:
            ranks, shuffle = self.groups.data, route == "train"
            data_sampler = DistributedSampler(dataset, num_replicas=ranks.size, rank=ranks.rank, shuffle=shuffle)
        pinned = pin_memory and self.device.type != "cpu"
        options: Any = {"num_workers": num_local_io_workers or 0, "pin_memory": pinned, "collate_fn": collate_fn}
        return DataLoader(dataset, batch_size=size, sampler=data_sampler, **options)

    @View
    def training_data(self) -> Any:
        return getattr(self.training_dataloader, "dataset", None)

    @View
    def collate_fn(self) -> Any:
        return getattr(self.training_dataloader, "collate_fn", None)

    def is_map_style_dataset(self, obj: object) -> bool:
        return isinstance(obj, Dataset) and hasattr(obj, "__getitem__")

    def is_iterable_style_dataset(self, obj: object) -> bool:
        return isinstance(obj, IterableDataset)

    # Data efficiency

    def data_efficiency_enabled(self) -> bool:
        return self.data_sampling_enabled() or self.random_ltd_enabled()

    def data_sampling_enabled(self) -> bool:
        return self.training_features.named("data_sampler") is not None

    def curriculum_learning_enabled(self) -> bool:
        return self.data_sampling_enabled()

    def random_ltd_enabled(self) -> bool:
        return self.training_features.named("random_ltd") is not None

    def random_ltd_initialize(self) -> None:
        """Do nothing: its layers are found when the engine is created."""

    @View
    def random_ltd_scheduler(self) -> Any:
        return self.training_features.named("random_ltd")

    def set_custom_curriculum_learning_schedule(self, schedule_func_dict: Mapping[str, Any]) -> None:
        """Set functions from update number to difficulty, by metric (seqlen: of the section curriculum_learning)."""
        lengths = cast(Any, self.training_features.named("curriculum_learning"))
        if lengths is not None and "seqlen" in schedule_func_dict:
            lengths.set_custom_get_difficulty(schedule_func_dict["seqlen"])
        else:
            self._sampled_curriculum("set_custom_curriculum_learning_schedule").set_custom(schedule_func_dict)

    def set_data_post_process_func(self, post_process_func: Any) -> None:
        """Set a function of (batch, {"current_difficulties": {metric: difficulty}}) that returns the training batch."""
        self._sampled_curriculum("set_data_post_process_func").post_process = post_process_func

    def _sampled_curriculum(self, caller: str) -> Any:
        feature = self.training_features.named("data_sampler")
        if feature is None:
            raise RuntimeError(
                f"engine.{caller}() needs data_efficiency.data_sampling.curriculum_learning to be switched on in the "
                "config"
            )
        return feature

    # What does not exist here: the same for every engine

    @View
    def pipeline_parallelism(self) -> bool:
        return False

    @View
    def has_moe_layers(self) -> bool:
        """False: `expert_parallel` spreads transformers' own experts, and there are no other expert layers."""
        return False

    @View
    def moe_layers(self) -> list[nn.Module]:
        return []

    @View
    def num_experts(self) -> list[int]:
        return []

    @View
    def expert_parallel_group(self) -> dict[str, Any]:
        return {}

    @View
    def expert_data_parallel_group(self) -> dict[str, Any]:
        return {}

    @View
    def use_ds_comm(self) -> bool:
        return False

    @View
    def dont_change_device(self) -> bool:
        return False

    @View
    def enable_backward_allreduce(self) -> bool:
        return True

    def collect_python_gc(self) -> int:
        """Run a full garbage collection, also with `disable_python_gc`; return the number of objects found."""
        return gc.collect()
