"""Jobs that a scheduler asks to end: all ranks save at the same step, and the resumed run is bitwise identical."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_zero
from tests.support.models import tiny_llama, token_rows
from tests.support.ranks import rendezvous_url, run_ranks

STEPS, AT = 7, 3  # the signal arrives in the step after AT updates
PHASES = ("forward", "backward", "update", "save")


def send(phase: str, engine: Any) -> None:
    """Arranges that this process gets a signal in a phase of the next step: SIGUSR1 as from Slurm, or SIGTERM."""
    has_drives = bool(engine.gradients.assembly.placements.drives)

    def now(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM if has_drives else signal.SIGUSR1)

    if phase == "forward":
        handle = engine.module[1].register_forward_hook(lambda *_: (now(), handle.remove(), None)[-1])
    elif phase == "backward":
        handle = engine.module[1].register_full_backward_hook(lambda *_: (now(), handle.remove(), None)[-1])
    else:
        threading.Timer(0.001, now).start()


def train(engine: Any, rank: int, folder: Path, phase: str = "") -> int:
    """Trains from the engine's step to STEPS, or until the job is to end. Returns the number of updates."""
    while engine.global_steps < STEPS:
        if phase in ("forward", "backward") and engine.global_steps == AT and rank == 1:
            send(phase, engine)
        torch.manual_seed(100 * engine.global_steps + rank)
        engine.backward(engine(torch.randn(4, 8)).square().mean())
        if phase in ("update", "save") and engine.global_steps == AT and rank == 1:
            send(phase, engine)
        engine.step()
        if phase == "save":
            engine.save_checkpoint(str(folder / "regular"))
        if engine.preempted():
            engine.save_checkpoint(str(folder / "last"))
            break
    return engine.global_steps


def own_loop(rank: int, folder: str, stage: int, phase: str, offload: str) -> None:
    def build() -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 0}
        if offload == "nvme":
            zero["offload_optimizer"] = {"device": "nvme", "nvme_path": folder}
        optimizer = {"type": "AdamW", "params": {"lr": 1e-2}}
        config = {"train_micro_batch_size_per_gpu": 4, "optimizer": optimizer, "zero_optimization": zero}
        return hf_zero.initialize(model=model, config=config)[0]

    def weights(engine: Any) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in engine.module_state_dict().items()}

    whole, stopped, resumed = build(), build(), build()
    assert train(whole, rank, Path(folder)) == STEPS
    num_updates = train(stopped, rank, Path(folder), phase)
    assert AT < num_updates < STEPS
    assert stopped.groups.world.gather_objects(num_updates) == [num_updates] * 2
    resumed.load_checkpoint(f"{folder}/last")
    while resumed.global_steps < STEPS:  # `preempted` stays true in this process
        torch.manual_seed(100 * resumed.global_steps + rank)
        resumed.backward(resumed(torch.randn(4, 8)).square().mean())
        resumed.step()
    expected, found = weights(whole), weights(resumed)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    for engine in (whole, stopped, resumed):
        engine.destroy()


CASES = [(2, "save", ""), (3, "backward", ""), (2, "update", "nvme")]
MORE = [(stage, phase, offload) for stage in (2, 3) for phase in PHASES for offload in ("", "nvme")]


@pytest.mark.parametrize(
    ("stage", "phase", "offload"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE if case not in CASES)],
)
def test_a_loop_of_its_own_ends_on_all_ranks_at_one_step(stage: int, phase: str, offload: str, tmp_path: Path) -> None:
    """One of two ranks gets the signal. With an engine that keeps states on a drive, SIGTERM and SIGHUP are handled
    before: its files must stay until the last step."""
    run_ranks(own_loop, 2, str(tmp_path), stage, phase, offload)


def with_trainer(rank: int, folder: str, stage: int) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_jit_checkpoint import JITCheckpointCallback

    torch.distributed.init_process_group("gloo", rendezvous_url(), rank=rank, world_size=2)
    ds_json = {
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "train_micro_batch_size_per_gpu": "auto",
    }

    class Ends(TrainerCallback):
        """Both ranks get SIGTERM, rank 0 two steps later, as if its node heard of it later."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == AT + 2 * (1 - rank):
                os.kill(os.getpid(), signal.SIGTERM)

    def trained(name: str, ends: bool = False, resume: bool = False) -> Any:
        args = TrainingArguments(
            f"{folder}/{name}",
            max_steps=2 * STEPS,
            per_device_train_batch_size=2,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            enable_jit_checkpoint=True,
            disable_tqdm=True,
            deepspeed=ds_json,
        )
        trainer = Trainer(tiny_llama(), args, train_dataset=token_rows(64), callbacks=[Ends()] if ends else [])
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, JITCheckpointCallback):
                callback.jit_manager.kill_wait = 0.0
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = trained("whole").model_wrapped.module_state_dict()
    stopped = trained("stopped", ends=True)
    num_updates = stopped.state.global_step
    assert AT < num_updates < 2 * STEPS
    assert stopped.model_wrapped.groups.world.gather_objects(num_updates) == [num_updates] * 2
    assert sorted(path.name for path in Path(f"{folder}/stopped").iterdir()) == [f"checkpoint-{num_updates}"]
    resumed = trained("stopped", resume=True).model_wrapped.module_state_dict()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_trainer_saves_on_all_ranks_at_one_step(stage: int, tmp_path: Path) -> None:
    """enable_jit_checkpoint: each rank saved when a timer of its own had elapsed, so that ranks were in different
    collectives, or saved different steps."""
    run_ranks(with_trainer, 2, str(tmp_path), stage, init=False)
