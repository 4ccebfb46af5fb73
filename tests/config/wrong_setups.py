"""Setups that DeepSpeed rejects: the arguments of `initialize`, the type of the error, and words of its message."""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]


def _with(**sections: Any) -> Config:
    return {"train_micro_batch_size_per_gpu": 1, **sections}


def _zero(**keys: Any) -> Config:
    return _with(zero_optimization={"stage": 1, **keys}, optimizer={"type": "SGD", "params": {"lr": 1e-3}})


def _optimizer(kind: str, **params: Any) -> Config:
    return _with(optimizer={"type": kind, "params": params})


def _scheduler(kind: str, **params: Any) -> Config:
    return {**_optimizer("SGD", lr=1e-3), "scheduler": {"type": kind, "params": params}}


NO_MODEL = "no model"
SETUPS: dict[str, Any] = {
    "no batch size": {"zero_optimization": {"stage": 1}},
    "batch sizes that do not fit": {"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2},
    "batch size 0": {"train_batch_size": 0},
    "batch size nobody fills": {"train_batch_size": "auto"},
    "fp16 and bf16": _with(fp16={"enabled": True}, bf16={"enabled": True}),
    "negative loss scale": _with(fp16={"enabled": True, "loss_scale": -1}),
    "a stage that does not exist": _zero(stage=7),
    "a bucket size in words": _zero(reduce_bucket_size="many"),
    "an unknown key of zero_optimization": _zero(stagee=1),
    "an unknown key of fp16": _with(fp16={"enabled": False, "los_scale": 0}),
    "an unknown key of bf16": _with(bf16={"enabled": True, "loss_scale": 0}),
    "an unknown device": _zero(offload_optimizer={"device": "disk"}),
    "a ratio above 1": _zero(stage=3, offload_optimizer={"device": "cpu", "ratio": 2.0}),
    "an unknown optimizer": _optimizer("AdamWW", lr=1e-3),
    "an optimizer in lower case": _optimizer("sgd", lr=1e-3),
    "max_grad_norm in the optimizer": _optimizer("SGD", lr=1e-3, max_grad_norm=1.0),
    "an unknown argument of the optimizer": _optimizer("SGD", lr=1e-3, speed=1),
    "an unknown scheduler": _scheduler("WarmupLRR"),
    "a scheduler in lower case": _scheduler("warmuplr"),
    "an unknown argument of the scheduler": _scheduler("WarmupLR", speed=1),
    "a scheduler without its total": _scheduler("WarmupDecayLR", warmup_num_steps=2),
    "a negative warm-up": _scheduler("WarmupLR", warmup_num_steps=-2),
    "a cycle without rates": _scheduler("OneCycle"),
    "an unknown communication dtype": _with(communication_data_type="float32"),
    "an unknown reduction": _with(gradient_allreduce_op="max"),
    "an unknown tag rule": _with(checkpoint={"tag_validation": "maybe"}),
    "a parallel write in words": _with(checkpoint={"parallel_write": {"pipeline_stage": "x"}}),
    "an unknown accumulation dtype": {**_optimizer("SGD", lr=1e-3), "data_types": {"grad_accum_dtype": "int8"}},
    "masters without bf16 masters": _zero() | {"bf16": {"enabled": True, "bf16_optimizer_states": True}},
    "an unknown log level": _with(log_level="loud"),
    "a compression technique without its shared parameters": _with(
        compression_training={"weight_quantization": {"enabled": True}}
    ),
    "an elastic batch": _with(elasticity={"enabled": True, "micro_batch_sizes": [1]}),
    "groups of MiCS": _zero(stage=3, mics_shard_size=2),
    "no config": None,
    "a config that is a number": 7,
    "a file that is not there": "no/such/ds.json",
    "text that is no config": "bm90IGpzb24",
    NO_MODEL: _with(),
}

# As raised by DeepSpeed 0.19.8; a test checks them again. No class can also inherit from pydantic's ValidationError.
RAISED: dict[str, str] = {
    "no batch size": "AssertionError",
    "batch sizes that do not fit": "AssertionError",
    "batch size 0": "AssertionError",
    "batch size nobody fills": "TypeError",
    "fp16 and bf16": "AssertionError",
    "negative loss scale": "ValidationError",
    "a stage that does not exist": "ValidationError",
    "a bucket size in words": "ValidationError",
    "an unknown key of zero_optimization": "ValidationError",
    "an unknown key of fp16": "ValidationError",
    "an unknown key of bf16": "ValidationError",
    "an unknown device": "ValidationError",
    "a ratio above 1": "ValidationError",
    "an unknown optimizer": "AssertionError",
    "an optimizer in lower case": "AssertionError",
    "max_grad_norm in the optimizer": "ValueError",
    "an unknown argument of the optimizer": "TypeError",
    "an unknown scheduler": "AssertionError",
    "a scheduler in lower case": "AssertionError",
    "an unknown argument of the scheduler": "TypeError",
    "a scheduler without its total": "TypeError",
    "a negative warm-up": "ValueError",
    "a cycle without rates": "TypeError",
    "an unknown communication dtype": "ValueError",
    "an unknown reduction": "ValueError",
    "an unknown tag rule": "DeepSpeedConfigError",
    "a parallel write in words": "DeepSpeedConfigError",
    "an unknown accumulation dtype": "NotImplementedError",
    "masters without bf16 masters": "AssertionError",
    "an unknown log level": "ValueError",
    "a compression technique without its shared parameters": "DeepSpeedConfigError",
    "an elastic batch": "DeepSpeedConfigError",
    "groups of MiCS": "DeepSpeedConfigError",
    "no config": "AssertionError",
    "a config that is a number": "ValueError",
    "a file that is not there": "ValueError",
    "text that is no config": "ValueError",
    NO_MODEL: "AssertionError",
}

# Words (a regex) that are in both DeepSpeed's and hf_zero's message, for others' `pytest.raises(..., match=...)`. If
# the message comes from pydantic ("Input should be ...") or is about former features of DeepSpeed ("... has been
# removed"), it is the key.
_EQUATION = r"train_batch_size is not equal to micro_batch_per_gpu \* gradient_acc_step \* world_size"
_EXTRA = "Extra inputs are not permitted"
_SOURCE = "Expected a string path to an existing deepspeed config"
WORDS: dict[str, str] = {
    "no batch size": "train_batch_size or train_micro_batch_size_per_gpu needs to be provided",
    "batch sizes that do not fit": _EQUATION,
    "batch size 0": "has to be greater than 0",
    "fp16 and bf16": "modes cannot be simultaneously enabled",
    "negative loss scale": "fp16.loss_scale must be >= 0",
    "a stage that does not exist": "stage",
    "a bucket size in words": "reduce_bucket_size",
    "an unknown key of zero_optimization": f"(?s)stagee.*{_EXTRA}",
    "an unknown key of fp16": f"(?s)los_scale.*{_EXTRA}",
    "an unknown key of bf16": f"(?s)loss_scale.*{_EXTRA}",
    "an unknown device": "offload_optimizer.device",
    "a ratio above 1": "offload_optimizer.ratio",
    "an unknown optimizer": "(?s)AdamWW.* is not a supported DeepSpeed Optimizer",
    "an optimizer in lower case": "(?s)sgd.* is not a supported DeepSpeed Optimizer",
    "max_grad_norm in the optimizer": "'max_grad_norm' is not supported as an optimizer parameter",
    "an unknown argument of the optimizer": "got an unexpected keyword argument 'speed'",
    "an unknown scheduler": "does not recognize LR scheduler '?WarmupLRR",
    "a scheduler in lower case": "does not recognize LR scheduler '?warmuplr",
    "an unknown argument of the scheduler": "got an unexpected keyword argument 'speed'",
    "a scheduler without its total": "missing 1 required positional argument: 'total_num_steps'",
    "a negative warm-up": "warmup_num_steps must be a positive integer",
    "a cycle without rates": r"missing \d required positional arguments?: 'cycle_min_lr'",
    "an unknown communication dtype": "Invalid communication_data_type",
    "an unknown reduction": "Invalid gradient_allreduce_op",
    "an unknown tag rule": "invalid tag_validation value",
    "a parallel write in words": "pipeline_stage value of 'x' is invalid",
    "an unknown accumulation dtype": "unsupported mix of model_dtype",
    "masters without bf16 masters": "bf16_optimizer_states requires bf16_master_weights_and_grads",
    "an unknown log level": "is not one of the valid logging levels",
    "a compression technique without its shared parameters": "compression_training",
    "an elastic batch": "elasticity",
    "groups of MiCS": "zero_optimization.mics_shard_size",
    "no config": "requires --deepspeed_config to specify configuration file",
    "a config that is a number": _SOURCE,
    "a file that is not there": _SOURCE,
    "text that is no config": _SOURCE,
    NO_MODEL: "initialize requires a model",
}
WITHOUT_WORDS = {"batch size nobody fills": "Python's own complaint, of text that DeepSpeed computes with"}
