"""ZeroEngine: the wrapped model that a training loop drives with forward, backward and step."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from hf_zero.api.engine_gradients import EngineGradients
from hf_zero.api.engine_module import EngineSettings, ModuleView, Phases
from hf_zero.api.garbage import pause_collector
from hf_zero.api.joint_backward import AT_WORK
from hf_zero.comm import ParallelGroups, ProgramGroups
from hf_zero.config import Resolved
from hf_zero.config.schema.root import HfZero
from hf_zero.features import Features, Progress
from hf_zero.log import logger
from hf_zero.params.store import ParameterStore
from hf_zero.precision import ForwardPrecision
from hf_zero.step.assemble import Assembly
from hf_zero.step.optimizer import ZeroOptimizer
from hf_zero.step.outcome import StepOutcome

if TYPE_CHECKING:
    from hf_zero.api.engine_checkpoints import EngineCheckpoints
    from hf_zero.api.gathered_parameters import ParameterOffload


_UNFROZEN = (
    "%d parameters that were frozen at initialize() require gradients now, and no update reaches them: %s, ... Call it "
    "(accelerator.prepare()) again after unfreezing, with an optimizer that has them"
)


class ZeroEngine(nn.Module):
    """A model whose `backward` reduces gradients and whose `step` updates a sharded optimizer.

        outputs = engine(**batch)
        engine.backward(outputs.loss)
        engine.step()                    # acts once per gradient_accumulation_steps

    The wrapped model's attributes can be read through the engine. Programs get the subclass with all of DeepSpeed's
    names, `hf_zero.integration.engine.engine.DeepSpeedEngine`.

    Attributes:
        module: the wrapped model, the object that `initialize` was given.
        device: this rank's torch.device, to which batches have to be moved.
        optimizer: the sharded optimizer. Without one it is None, or at stage 3 the handle of the model's hooks.
        lr_scheduler: the schedule, or None.
        training_dataloader: the loader over `training_data`, or None.
        config: the config as a dict, as it was given.
        global_steps: number of updates, including skipped ones.
        global_samples: number of samples in these updates, on all ranks.
        rates_of_last_update: learning rate of every param group in the last update, before the schedule advanced.
        is_destroyed: whether `destroy` has been called.
    """

    # The parts of an engine, for the code of hf_zero:
    #     groups: the process groups of the mesh.
    #     parallelism: the program's mesh dimensions besides those of the states.
    #     settings: the config and the batch sizes.
    #     module_view: device moves and whole weights of the model.
    #     gradients: computes reduced gradients from a loss, and knows when a step is due.
    #     phases: runs forward, backward, step and save, with observers.

    @staticmethod
    def optimizer_class(stage: int, dtype: torch.dtype) -> type[ZeroOptimizer]:
        """Class of the optimizer at this stage (of its states), for weights of `dtype`."""
        return ZeroOptimizer

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Python copies and pickles by this."""
        raise TypeError(
            "an engine can be neither copied nor pickled: copy its model, engine.module (at stage 3 inside "
            "hf_zero.gathered(engine), on every rank), or write everything with engine.save_checkpoint()"
        )

    def __init__(
        self,
        *,
        module: nn.Module,
        resolved: Resolved,
        device: torch.device,
        groups: ParallelGroups,
        assembly: Assembly | None,
        store: ParameterStore | None,
        parameter_offload: ParameterOffload | None,
        lr_scheduler: Any | None,
        client_optimizer: torch.optim.Optimizer | None,
        features: Features,
    ) -> None:
        """
        Args:
            assembly: what trains; None: there is no optimizer, only forward.
            store: the assembly's, or at stage 3 without an optimizer a separate one.
        """
        super().__init__()
        self._first_nan = None if store is None else store.first_nan
        self.phases = Phases(device)
        self.settings = EngineSettings(resolved, groups.data.size, groups.ranks_per_sample)
        self.module_view = ModuleView(module, store, device, resolved.zero, groups)
        self.gradients = EngineGradients(assembly, self.settings, self._first_nan, self.phases, groups.world.rank)
        self.module_view.before_saving = self.gradients.publish_changes
        self.module = module
        self.config = resolved.raw
        self.device = device
        self.groups = groups
        self.parallelism: tuple[ProgramGroups, ...] = ()
        # Without a trained parameter, stage 3 stores its hooks' handle here, as in DeepSpeed.
        self.optimizer: Any = assembly.optimizer if assembly else parameter_offload
        if assembly is not None:
            assembly.optimizer.engine = weakref.proxy(self)
        self.lr_scheduler = lr_scheduler
        self.client_optimizer = client_optimizer
        self.training_dataloader: Any = None  # set by `initialize(training_data=...)`
        self.global_steps = self.global_samples = self._num_skipped = 0
        self.training_features = features
        self.rates_of_last_update: list[float | None] = []  # per param group, before the schedule advanced
        self.input_shape: torch.Size | None = None  # of the last `input_ids`, for out-of-memory errors
        self._saves: EngineCheckpoints | None = None
        self._frozen = {name: each for name, each in self.module.named_parameters() if not each.requires_grad}
        self.is_destroyed = False
        self._broadcasts_buffers = resolved.section(HfZero).broadcast_buffers
        self._forward_precision = ForwardPrecision(resolved.precision, device)
        self._resume_collector = pause_collector(self) if resolved.config.disable_python_gc else None

    # Training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped model and return its output unchanged: `engine(**batch)`. Collective at stage 3.

        Tensors have to be on `engine.device`. With fp16.auto_cast, floating-point tensors among the positional
        arguments are cast to the model's dtype; otherwise nothing is cast.
        """
        self.gradients.publish_changes()
        self.gradients.note_forward(trains=self.module.training)
        self.input_shape = getattr(kwargs.get("input_ids"), "shape", None)
        features = self.training_features
        if features:
            kwargs = features.before_forward(self.training_progress, kwargs)
        phase = "forward" if torch.is_grad_enabled() else "evaluation"
        with self.phases.phase(phase), self._forward_precision.context():
            inputs = self._forward_precision.cast(args)
            output = self.module(*inputs, **kwargs)
            if features:
                output = features.after_forward(self.training_progress, inputs, kwargs, output)
        # With gradients, `backward` checks the final loss.
        if self._first_nan is not None and not torch.is_grad_enabled():
            self._first_nan.look(getattr(output, "loss", output), f"evaluation after step {self.global_steps}")
        return output

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Compute gradients of `loss` and reduce them over ranks as the stage requires. Collective.

        Other engines whose parameters the loss depends on get their gradients, too: call their `step` to apply them,
        or their `zero_grad` to drop them.

        Args:
            loss: a tensor of one element, the mean over this rank's batch.
            retain_graph: keep the graph for another backward, as in `Tensor.backward`.
            scale_wrt_gas: divide the loss by gradient_accumulation_steps; pass False if the caller has done so.

        Returns:
            The loss, divided by the accumulation steps if requested, without the loss scale.

        Raises:
            TypeError: if the loss is not a tensor (the output of the model, or a number).
            RuntimeError: if the engine has no optimizer, or has been destroyed.
        """
        loss = self.gradients.backward(loss, retain_graph=retain_graph, scale_wrt_gas=scale_wrt_gas)
        for feature in self.training_features:
            feature.after_backward(self.training_progress, loss)
        return loss

    def scale(self, loss: Tensor) -> Tensor:
        """Return `loss` multiplied by the loss scale, for a `backward` of your own: `engine.scale(loss).backward()`.

        With fp16 or prescale_gradients, a plain `loss.backward()` is an error of the next `step`. The loss is not
        divided by the accumulation steps.
        """
        return self.gradients.scale(loss)

    def no_sync(self) -> AbstractContextManager[None]:
        """Context in which `backward` accumulates without reducing (stages 0 and 1); stages 2 and 3, which have no
        place for whole gradients, still reduce every micro-batch. `step` inside it raises WrongMoment."""
        return self.gradients.no_sync()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, also those already reduced or accumulated. `step` does so by itself after an update.

        Args:
            set_to_none: accepted; gradients are always set to None.
        """
        self.gradients.drop()
        for parameter in self.module.parameters():
            parameter.grad = None

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Clip gradients, update weights and advance the schedule. Call it after every `backward`: between accumulation
        boundaries it only counts the micro-batch. Collective.

        An update whose gradients are not finite on any rank is skipped on all of them (`was_step_applied`).

        Args:
            lr_kwargs: arguments for the schedule's own `step`.

        Raises:
            WrongMoment: inside `no_sync`; with ignore_unused_parameters=false, if a trained parameter got no gradient
                on any rank.
            RuntimeError: if the loss was not scaled although the precision needs it, and on an overflow at the smallest
                loss scale.
            CheckpointError: if an asynchronous save has failed since.
        """
        if self._saves is not None:
            self._saves.background.check()  # before counters change: a caller may catch the error and call step() again
        num_samples = self.gradients.samples_in_update
        if not self.gradients.begin_step():
            return
        if unfrozen := [name for name, each in self._frozen.items() if each.requires_grad]:
            logger.warning(_UNFROZEN, len(unfrozen), ", ".join(unfrozen[:4]))
            self._frozen = {}
        parts = self.gradients.parts("step")
        optimizer = parts.optimizer
        scale = optimizer.loss_scale
        AT_WORK.end(self.gradients)
        self.rates_of_last_update = _rates(optimizer)
        for feature in self.training_features:
            feature.before_step(self.training_progress)
        with self.phases.phase("step"):
            optimizer.step()
            if self._broadcasts_buffers:
                from hf_zero.params.consolidation import broadcast_buffers  # few configs need it

                broadcast_buffers(self.module, self.groups.same_weights)
        self.global_steps += 1
        self.global_samples += num_samples
        outcome = parts.step.outcome
        assert outcome is not None
        self._follow(outcome, optimizer, scale, lr_kwargs or {})
        if self.training_features:
            is_asked = outcome.is_known or self.training_features.wait_for_outcome
            applied = not (is_asked and outcome.skipped)
            for feature in self.training_features:
                feature.after_step(self.training_progress, applied=applied)
        self._report()

    def _follow(self, outcome: StepOutcome, optimizer: ZeroOptimizer, scale: float, lr_kwargs: Any) -> None:
        """Advance the schedule unless the step was skipped; roll it back if a skip is discovered later."""
        moved, number = None, self.global_steps
        schedule = self.lr_scheduler
        if schedule is not None:
            from hf_zero.schedules import ScheduleMark

            if not ScheduleMark.fits(schedule):
                outcome.read()  # a schedule that cannot be rolled back must wait
            is_held = self.training_features.holds_schedule(self.training_progress)
            if not is_held and not outcome.is_known_to_skip:
                if outcome.is_known:
                    schedule.step(**lr_kwargs)
                else:
                    moved = ScheduleMark(schedule, optimizer)
                    moved.advance(**lr_kwargs)

        def count_skip() -> None:
            self._num_skipped += 1
            if moved is not None:
                moved.go_back()
            _report_skip(optimizer, number, outcome, scale)
            if self.gradients.watch is not None and optimizer.rules.loss_scale is None:  # fp16 skips are expected
                self.gradients.watch.look(number)

        if outcome.is_known_to_skip or not outcome.is_known:
            outcome.when_skipped(count_skip)

    def get_lr(self) -> list[float | None]:
        """Learning rate of every param group; None if the optimizer computes it (Adafactor's relative step)."""
        return _rates(self.gradients.parts("get_lr").optimizer)

    def get_mom(self) -> list[Any]:
        """Momentum, or betas, of every param group."""
        return [g.get("betas", g.get("momentum")) for g in self.gradients.parts("get_mom").optimizer.param_groups]

    @property
    def training_progress(self) -> Progress:
        """Training progress, for training features."""
        accumulation_steps = self.settings.accumulation_steps
        is_training = self.module.training  # a program may have set the mode on the model itself
        micro_step = self.gradients.micro_batches.in_update
        return Progress(self.global_steps, micro_step, accumulation_steps, is_training, self.groups.data.rank)

    @property
    def skipped_steps(self) -> int:
        """Number of updates skipped because of non-finite gradients. Waits for the device."""
        self.gradients.wait_for_outcome()
        return self._num_skipped

    @skipped_steps.setter
    def skipped_steps(self, number: int) -> None:
        self._num_skipped = number

    @property
    def micro_steps(self) -> int:
        """Number of micro-batches that were followed by a `step`."""
        return self.gradients.micro_batches.stepped

    @micro_steps.setter
    def micro_steps(self, number: int) -> None:
        self.gradients.continue_from(number)

    # Module surface

    def train(self, mode: bool = True) -> ZeroEngine:
        """Set training mode of the model and the engine; `engine.eval()` is `train(False)`. Returns the engine."""
        self.module.train(mode)
        self.training = mode
        return self

    def to(self, *args: Any, **kwargs: Any) -> ZeroEngine:
        """Return the engine if its weights are already on that device and of that dtype: it never moves or casts them.

        Raises:
            RuntimeError: for another device or dtype.
        """
        self.module_view.to(*args, **kwargs)
        return self

    def compile(
        self,
        backend: Any = None,
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile the wrapped model in place with torch.compile.

        Args:
            backend: torch.compile's.
            compile_kwargs: further arguments of torch.compile.
            schedule, compiled_autograd_enabled: no effect (a warning).

        Raises:
            ValueError: at stage 3, for a mode that records graphs of kernels.
        """
        mode = (compile_kwargs or {}).get("mode")
        if mode in ("reduce-overhead", "max-autotune") and self.settings.resolved.zero.stage == 3:
            raise ValueError(
                f"compile(mode={mode!r}): recorded graphs replay kernels on the memory of their recording, and "
                'stage 3 gathers weights into other memory for each use. Use mode "default", or stage 2'
            )
        for name, value in (("schedule", schedule), ("compiled_autograd_enabled", compiled_autograd_enabled)):
            if value:
                logger.warning("engine.compile(%s=...) has no effect: only forward is compiled, by torch.compile", name)
        self.module.compile(**{**(compile_kwargs or {}), **({} if backend is None else {"backend": backend})})

    def __getattr__(self, name: str) -> Any:
        """Look up attributes of the wrapped model."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_modules" not in self.__dict__ or "module" not in self._modules:
                raise
        return getattr(self._modules["module"], name)

    def destroy(self) -> None:
        """Release hooks, buffers and optimizer state, after waiting for asynchronous saves. The model keeps its weights
        (at stage 3 in shards) and can be given to `initialize` again; the engine is of no further use."""
        if self._saves is not None:
            self._saves.background.close()
        assembly, store = self.gradients.assembly, self.module_view.store
        self.gradients.end()
        if store is not None:
            store.release()
        if assembly is not None:
            assembly.placements.close()
        self.module_view.store = None
        self.training_features.close()
        if self._resume_collector is not None:
            self._resume_collector()
        self.is_destroyed = True
        self.optimizer = self.client_optimizer = self.lr_scheduler = None

    # Checkpoints

    def preempted(self) -> bool:
        """Whether a scheduler has asked any rank to end, by SIGTERM or SIGUSR1. Collective.

        From the first call on, these signals no longer end the process. Call it after every update; if it returns True,
        save a checkpoint and leave the loop, on all ranks at the same step.

            engine.step()
            if engine.preempted():
                engine.save_checkpoint("checkpoints")
                break

        Raises:
            WrongMoment: if the first call is not in the main thread.
        """
        from hf_zero.api import preemption

        preemption.watch()
        return any(self.groups.world.gather_objects(preemption.is_requested()))

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write a checkpoint of everything that training needs, in DeepSpeed's format. Collective.

        Without an optimizer it only holds the model, in its own dtype.

        Args:
            save_dir: the folder of all checkpoints, on a file system that all ranks share; created if missing.
            tag: folder inside `save_dir`; default global_step{N}.
            client_state: plain values that `load_checkpoint` returns: numbers, text, lists, dicts, tensors.
            save_latest: write the tag to `latest`, so that this checkpoint is loaded by default.
            exclude_frozen_parameters: leave out parameters that do not require gradients.

        Returns:
            True. With hf_zero.checkpoint.async, files are complete only later; a failure is an error of the next step.

        Raises:
            CheckpointError: on every rank, if any rank could not write; earlier checkpoints are unchanged.
            WrongArgument: if the folder has no name.
        """
        self._checkpoints().save(save_dir, tag, client_state, save_latest, exclude_frozen_parameters)
        return True

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load a checkpoint of any stage and world size, written by hf_zero or DeepSpeed. Collective.

        Args:
            load_dir: the folder that `save_checkpoint` was given.
            tag: folder of the checkpoint; default: the one that `latest` names.
            load_module_strict: raise an error if the checkpoint lacks weights of the model or has others.
            load_optimizer_states: False loads weights (from the fp32 masters) but no optimizer states.
            load_lr_scheduler_states: False keeps the schedule of this engine as it is.
            load_module_only: load weights only: no optimizer, schedule or counters.

        Returns:
            (folder, client state), or (None, None) with a warning if there is no checkpoint.

        Raises:
            CheckpointError: if a file is missing, damaged or does not fit; nothing has changed.
            NotImplementedError: for a `custom_load_fn`.
        """
        if custom_load_fn is not None:
            raise NotImplementedError("load_checkpoint(custom_load_fn=...): weights are matched by name; leave it out")
        everything = not load_module_only
        return self._checkpoints().load(
            load_dir,
            tag,
            strict=load_module_strict,
            with_optimizer=load_optimizer_states and everything,
            with_run=everything,
            with_schedule=load_lr_scheduler_states,
        )

    def _checkpoints(self) -> EngineCheckpoints:
        """Saving and loading; created and imported on first use."""
        if self._saves is None:
            from hf_zero.api.engine_checkpoints import EngineCheckpoints

            self._saves = EngineCheckpoints(self)
        return self._saves

    def _report(self) -> None:
        every = self.settings.resolved.config.steps_per_print
        if every and self.global_steps % every == 0:
            counts = self.global_steps, self._num_skipped  # as known so far, to avoid a wait for a log line
            logger.info("step=%d, skipped=%d, lr=%s, mom=%s", *counts, self.get_lr(), self.get_mom())


def _rates(optimizer: ZeroOptimizer) -> list[float | None]:
    rates = [group["lr"] for group in optimizer.param_groups]
    return [None if rate is None else float(rate) for rate in rates]


def _report_skip(optimizer: ZeroOptimizer, number: int, outcome: StepOutcome, scale: float) -> None:
    if optimizer.rules.loss_scale is None:
        first = outcome.origin and f"; the first gradients in backward that are not finite are of {outcome.origin}"
        logger.warning("step %d skipped on all ranks: the gradient norm is %s%s", number, outcome.computed_norm, first)
        return
    after = optimizer.loss_scale
    then = f"now {after:g}" if after != scale else "which stays"
    logger.info("step %d skipped on all ranks: overflow at loss scale %g, %s", number, scale, then)
