"""One case of the parity tests: its command line, its run, and the same mathematics in plain PyTorch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file

from tests.end_to_end import trainer_script
from tests.support.launch import alone_is_not_distributed
from tests.support.models import stack, tiny_llama, token_rows
from tests.support.ranks import run_ranks
from tests.support.reference import Recipe, Trace, assert_same_numbers, assert_same_weights, train

SCRIPT = Path(__file__).parent / "trainer_script.py"
STEPS, SHORT = 20, 6
GLOBAL_BATCH = 48  # divisible by every number of processes (1 to 4) times every accumulation (1, 4)
LEARNING_RATE = 5e-3
WEIGHT_DECAY = 0.1
CLIP_NORM = 0.5  # smaller than the gradients of these steps, so that clipping has an effect
# Adam divides by the gradient's own size: with the usual 1e-8 a gradient that is zero except for rounding moves its
# weight by a whole step in a random direction, and two correct programs differ by more than the tolerance.
EPS = 1e-6
TOLERANCE = 1e-5


@dataclass(frozen=True, kw_only=True)
class Case:
    """One point of the cross product."""

    stage: int | None = 2  # None: no ZeRO engine at all
    processes: int = 1
    accumulation: int = 1
    clip: bool = True
    bf16: bool = False
    optimizer: bool = False  # an optimizer section in ds.json
    one_group: bool = False  # with DeepSpeed's single param group for it
    scheduler: bool = False  # a scheduler section in ds.json
    tied: bool = False
    checkpointing: Literal["", "reentrant", "not_reentrant"] = ""  # of activations
    evaluates: bool = False  # in the middle of the training
    offload: Literal["", "cpu", "nvme"] = ""  # of the optimizer, at stage 3 also of the parameters
    steps: int = STEPS
    preset: bool = False  # stage 3 with the sizes that Trainer fills in, with which a small model is never released

    def __str__(self) -> str:
        flags = [
            name
            for name in ("clip", "bf16", "optimizer", "one_group", "scheduler", "tied", "evaluates", "preset")
            if getattr(self, name)
        ]
        numbers = [f"stage{self.stage}", f"{self.processes}p", f"acc{self.accumulation}"]
        return "-".join([*numbers, *flags, *filter(None, [self.checkpointing, self.offload])])

    @property
    def ds_config(self) -> dict[str, Any]:
        """The user's ds.json, with "auto" wherever Trainer can fill it in."""
        config: dict[str, Any] = {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "bf16": {"enabled": "auto"},
            "zero_optimization": {"stage": self.stage, **(self.sizes if self.stage == 3 else {})},
        }
        if self.optimizer:
            adam = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True}
            config["optimizer"] = {"type": "AdamW", "params": adam}
        if self.one_group:
            config["hf_zero"] = {"decay_biases_and_norms": True}
        if self.scheduler:
            warmup = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}
            params = {**warmup, "total_num_steps": "auto", "warmup_type": "linear"}
            config["scheduler"] = {"type": "WarmupDecayLR", "params": params}
        return config

    @property
    def sizes(self) -> dict[str, Any]:
        """Sizes of stage 3; saved files must contain whole weights, which the tests read."""
        sizes: dict[str, Any] = dict.fromkeys(
            ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"), "auto"
        )
        if not self.preset:  # nothing stays gathered, not even between forward and backward
            sizes = {"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0}
        return {**sizes, "stage3_gather_16bit_weights_on_model_save": True}

    def places(self, drive: Path) -> dict[str, Any]:
        """The offload targets, with sub-groups smaller than the model."""
        if not self.offload:
            return {}
        drive.mkdir(exist_ok=True)
        place = {"device": self.offload, "nvme_path": str(drive)}
        found: dict[str, Any] = {"sub_group_size": 1000, "offload_optimizer": place}
        return {**found, "offload_param": {**place, "max_in_cpu": 0}} if self.stage == 3 else found

    @property
    def recipe(self) -> Recipe:
        """The same mathematics for the reference; with Trainer norms have no weight decay."""
        return Recipe(
            learning_rate=LEARNING_RATE,
            weight_decay=WEIGHT_DECAY,
            eps=EPS,
            no_decay=() if self.one_group else ("norm",),
            clip_norm=CLIP_NORM if self.clip else 0.0,
            warmup_steps=2 if self.scheduler else 0,  # WarmupDecayLR warms up for at least two steps
            rate_lag=1 if self.scheduler else 0,
            decay_steps=self.steps,
        )

    def words(self, folder: Path) -> list[str]:
        """The command line; writes the files that it names."""
        prepare(folder, self.tied, self.steps)
        options: dict[str, object] = {
            "model": folder / "model",
            "data": folder / "rows.json",
            "output_dir": folder / "out",
            "max_steps": self.steps,
            "per_device_train_batch_size": GLOBAL_BATCH // self.processes // self.accumulation,
            "per_device_eval_batch_size": 8,
            "gradient_accumulation_steps": self.accumulation,
            "max_grad_norm": CLIP_NORM if self.clip else 0.0,
            "learning_rate": LEARNING_RATE,
            "weight_decay": WEIGHT_DECAY,
            "adam_epsilon": EPS,
            "lr_scheduler_type": "linear",
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "use_cpu": True,
            "bf16": self.bf16,
            "disable_tqdm": True,
        }
        if self.checkpointing:
            options["gradient_checkpointing"] = True
            options["gradient_checkpointing_kwargs"] = json.dumps({"use_reentrant": self.checkpointing == "reentrant"})
        if self.evaluates:
            options |= {"eval_strategy": "steps", "eval_steps": self.steps // 2}
        if self.stage is not None:
            config = self.ds_config
            config["zero_optimization"] |= self.places(folder / "drive")
            (folder / "ds.json").write_text(json.dumps(config))
            options["deepspeed"] = folder / "ds.json"
        return [word for key, value in options.items() for word in (f"--{key}", str(value))]


@dataclass(frozen=True)
class Outcome:
    """The results of a run of the script."""

    losses: list[float]
    norms: list[float | None]
    rates: list[float]
    numbers: dict[str, Any]
    weights: dict[str, torch.Tensor]


def prepare(folder: Path, tied: bool, steps: int) -> None:
    """Writes the initial model and the training rows to disk."""
    folder.mkdir(parents=True, exist_ok=True)
    tiny_llama(tied=tied).save_pretrained(folder / "model")
    (folder / "rows.json").write_text(json.dumps(rows(steps)))


@cache
def rows(steps: int) -> list[dict[str, list[int]]]:
    """As many rows as the steps use, so that the run is one epoch."""
    return token_rows(GLOBAL_BATCH * steps)


@cache
def expected(recipe: Recipe, tied: bool) -> Trace:
    """Plain PyTorch: every step uses its whole global batch at once."""
    all_rows = rows(recipe.decay_steps)
    steps = [[stack(all_rows[start : start + GLOBAL_BATCH])] for start in range(0, len(all_rows), GLOBAL_BATCH)]
    return train(tiny_llama(tied=tied), steps, recipe)


def outcome(folder: Path) -> Outcome:
    """Reads what the script wrote."""
    numbers = json.loads((folder / "out" / "numbers.json").read_text())
    steps = [entry for entry in numbers["log"] if "loss" in entry]
    return Outcome(
        losses=[entry["loss"] for entry in steps],
        norms=[entry.get("grad_norm") for entry in steps],
        rates=[entry["learning_rate"] for entry in steps],
        numbers=numbers,
        weights=load_file(folder / "out" / "model.safetensors"),
    )


def run_script(rank: int, words: list[str]) -> None:
    """Runs a rank as a launcher would, without the time for imports."""
    alone_is_not_distributed()
    trainer_script.main(words)


def run_case(case: Case, folder: Path) -> Outcome:
    """Run the script on the case's number of ranks."""
    run_ranks(run_script, case.processes, case.words(folder), init=False)
    return outcome(folder)


def assert_parity(case: Case, result: Outcome) -> None:
    """The losses, the gradient norms and every final weight equal those of plain PyTorch."""
    trace = expected(case.recipe, case.tied)
    assert_same_numbers(result.losses, trace.losses, TOLERANCE, "losses")
    assert [norm for norm in result.norms if norm is not None], "no gradient norm was logged"
    norms = [norm if norm is not None else wanted for norm, wanted in zip(result.norms, trace.norms)]
    assert_same_numbers(norms, trace.norms, TOLERANCE, "gradient norms")
    # A tied weight is saved under one of its two names.
    weights = {**{name: trace.weights[name] for name in trace.weights.keys() - result.weights.keys()}, **result.weights}
    missing = trace.weights.keys() - result.weights.keys()
    assert missing <= ({"lm_head.weight"} if case.tied else set()), f"not saved: {missing}"
    assert_same_weights(weights, trace.weights, TOLERANCE)
