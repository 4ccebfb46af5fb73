"""Alternatives to DeepSpeed's modules that hf_zero lacks; the longest path that matches is the answer."""

from __future__ import annotations

_INFERENCE = (
    "kernel-injected inference is not part of hf_zero: call model.generate() under a stage 3 engine, or serve the "
    "saved weights with an inference server (vLLM, transformers serve)"
)
_PIPELINE = "there is no pipeline parallelism: stage 3, with offload_param where memory is short, trains the same model"
_EXPERTS = (
    "expert_parallel in the config spreads transformers' packed experts over ranks (docs/experts.md); there are no "
    "other expert-parallel layers"
)
_SEQUENCE = (
    "ranks share sequences by runtime.sequence_parallel.ulysses_sp.UlyssesSPAttentionHF, or around an attention of the "
    "model's own by sequence.layer.DistributedAttention"
)
_TENSOR = (
    "tensor_parallel.autotp_size in the config, or deepspeed.tp_model_init(model, tp_size, dtype), cuts a model of "
    "transformers by its tp_plan"
)
_COMPILER = "graph passes of DeepCompile are not supported: engine.compile() runs the model under torch.compile"
_DRIVE = "no compiled operators: zero_optimization.offload_optimizer and offload_param with device nvme use the drive"
_QUANTISED = "no quantizing operators: load the model with transformers' BitsAndBytesConfig or TorchAoConfig"
_CHECKPOINT_TOOLS = (
    "tools for Megatron checkpoints are not supported: load_checkpoint takes checkpoints of any stage and number of "
    "ranks, and `python -m hf_zero.zero_to_fp32` writes whole weights"
)
_DATA = "curricula, samplers and random-LTD work from ds.json alone: docs/data_efficiency.md"
_SWAPPING = "how states move to a drive is decided by zero_optimization.offload_optimizer, offload_param and aio"
# By module path.
MODULES = {
    "": "",
    "DeepSpeedInferenceConfig": _INFERENCE,
    "default_inference_config": _INFERENCE,
    "init_inference": _INFERENCE,
    "resolve_per_head_muon_after_sharding": "Muon works on whole matrices here, at every stage",
    "accelerator": "accelerator.get_accelerator() answers for the device that PyTorch was built for",
    "autotuning": "`hf-zero launch --autotuning tune|run` searches, and `hf-zero plan --measure` (docs/planning.md)",
    "checkpoint": _CHECKPOINT_TOOLS,
    "checkpoint.ds_to_universal": (
        "the conversion is hf_zero.checkpoint.deepspeed.universal.convert_to_universal; nothing else of this module "
        "is needed"
    ),
    "comm": "collectives run through torch.distributed; deepspeed.comm offers its calls under the same names",
    "compile": _COMPILER,
    "compression": "compression is asked for by compression_training in ds.json, see docs/compression.md",
    "elasticity.DSElasticAgent": (
        "torchrun restarts ranks itself: torchrun --nnodes 1:4 --max-restarts 100 (docs/elasticity.md)"
    ),
    "datastates": 'asynchronous checkpoints are the key "hf_zero": {"checkpoint": {"async": true}}',
    "inference": _INFERENCE,
    "io": _DRIVE,
    "launcher": "`hf-zero launch` starts the ranks, with the same options",
    "linear": "LoRA and quantised layers come from PEFT: LoraConfig, get_peft_model, at every stage",
    "model_implementations": _INFERENCE,
    "module_inject": _INFERENCE,
    "module_inject.auto_ep": _EXPERTS,
    "module_inject.auto_tp": _TENSOR,
    "module_inject.layers": _TENSOR,
    "module_inject.tp_plan_converter": _TENSOR,
    "module_inject.tp_shard": _TENSOR,
    "moe": _EXPERTS,
    "monitor": "the sections tensorboard, csv_monitor, wandb and comet of ds.json, or monitor.monitor.MonitorMaster",
    "nvme": _DRIVE,
    "ops": "no compiled operators: models run on PyTorch's own kernels and transformers' attn_implementation",
    "ops.aio": _DRIVE,
    "ops.fp_quantizer": _QUANTISED,
    "ops.gds": _DRIVE,
    "ops.quantizer": _QUANTISED,
    "ops.random_ltd": _DATA,
    "pipe": _PIPELINE,
    "profiling": "profiling.flops_profiler has FlopsProfiler and get_model_profile; ds.json the section flops_profiler",
    "runtime": "this is an internal of DeepSpeed's engine; hf_zero's differs",
    "runtime.activation_checkpointing": (
        "deepspeed.checkpointing.checkpoint, or model.gradient_checkpointing_enable(), whose layers the section "
        "activation_checkpointing reaches"
    ),
    "runtime.compiler": _COMPILER,
    "runtime.checkpoint_engine": 'asynchronous checkpoints are the key "hf_zero": {"checkpoint": {"async": true}}',
    "runtime.data_pipeline": _DATA,
    "runtime.domino": _TENSOR,
    "runtime.hybrid_engine": "generate with deepspeed.zero.unwrap_model_for_generation(engine), as TRL does",
    "runtime.pipe": _PIPELINE,
    "runtime.rollout": "generate with deepspeed.zero.unwrap_model_for_generation(engine), as TRL does",
    "runtime.sequence_parallel": _SEQUENCE,
    "runtime.sparse_tensor": "gradients of embeddings are reduced dense",
    "runtime.superoffload": "zero_optimization.offload_optimizer with device cpu, without super_offload",
    "runtime.swap_tensor": _SWAPPING,
    "runtime.tensor_parallel": _TENSOR,
    "runtime.weight_quantizer": _QUANTISED,
    "runtime.zenflow": "zero_optimization.offload_optimizer with device cpu, without zenflow",
    "sequence": _SEQUENCE,
}


def alternative(path: str) -> str:
    """Return what to use instead of `path` (without `deepspeed.`), or "" if there is no alternative."""
    while path:
        if path in MODULES:
            return MODULES[path]
        path = path.rpartition(".")[0]
    return ""
