"""Names of DeepSpeed that hf_zero does not have: importable, because others import them, and an error on use.

names.json lists DeepSpeed's modules with the classes, errors, functions and constants that each defines, and with what
each borrows from others: by name (`borrowed` where a rule cannot say from whom: `with_homes`) or (`stars`) all of it.
Modules that we have nothing for are made of it, and modules of ours take from it what they lack. No name does anything.

ALTERNATIVES says what to use instead: by module path, longest match first.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from hf_zero.integration.names.homes import homes_of

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
_KERNELS = "no compiled operators: models run on PyTorch's own kernels and transformers' attn_implementation"
_QUANTISED = "no quantising operators: load the model with transformers' BitsAndBytesConfig or TorchAoConfig"
_CHECKPOINT_TOOLS = (
    "tools for Megatron checkpoints are not supported: load_checkpoint takes checkpoints of any stage and number of "
    "ranks, and `python -m hf_zero.zero_to_fp32` writes whole weights"
)
_DATA = "curricula, samplers and random-LTD work from ds.json alone: docs/data_efficiency.md"
_SWAPPING = "how states move to a drive is decided by zero_optimization.offload_optimizer, offload_param and aio"
_MONITORS = "the sections tensorboard, csv_monitor, wandb and comet of ds.json, or monitor.monitor.MonitorMaster"
_LORA = "LoRA and quantised layers come from PEFT: LoraConfig, get_peft_model, at every stage"

ALTERNATIVES = {
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
    "linear": _LORA,
    "model_implementations": _INFERENCE,
    "module_inject": _INFERENCE,
    "module_inject.auto_ep": _EXPERTS,
    "module_inject.auto_tp": _TENSOR,
    "module_inject.layers": _TENSOR,
    "module_inject.tp_plan_converter": _TENSOR,
    "module_inject.tp_shard": _TENSOR,
    "moe": _EXPERTS,
    "monitor": _MONITORS,
    "nvme": _DRIVE,
    "ops": _KERNELS,
    "ops.aio": _DRIVE,
    "ops.fp_quantizer": _QUANTISED,
    "ops.gds": _DRIVE,
    "ops.quantizer": _QUANTISED,
    "ops.random_ltd": _DATA,
    "pipe": _PIPELINE,
    "profiling": "profiling.flops_profiler has FlopsProfiler and get_model_profile; ds.json the section flops_profiler",
    "runtime": "this is the inside of DeepSpeed's engine; hf_zero's is another one",
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
    """What to use instead of `path` (without `deepspeed.`); empty where there is nothing to say."""
    while path:
        if path in ALTERNATIVES:
            return ALTERNATIVES[path]
        path = path.rpartition(".")[0]
    return ""


ROOT = "deepspeed"
# Gone from DeepSpeed 0.19.8, and still imported by programs.
REMOVED: dict[str, dict[str, Any]] = {
    "compression.compress": {"functions": "init_compression redundancy_clean student_initialization"},
    "compression.scheduler": {"classes": "compression_scheduler"},
    "elasticity": {"package": True, "classes": "DSElasticAgent"},
    "elasticity.config": {"errors": ""},
    "elasticity.elasticity": {"functions": ""},
    "ops.muon": {"package": True},
    "ops.sparse_attention": {"package": True},
    "ops.sparse_attention.sparsity_config": {"classes": ""},
}
# Imported by functions of these modules only; programs look for them there.
_INSIDE_FUNCTIONS = {
    "utils.z3_leaf_module": {
        "borrowed": dict.fromkeys(
            ("DEFAULT_LEAF_MODULE_CLASSES", "DEFAULT_LEAF_MODULE_NAMES", "DEFAULT_LEAF_MODULE_NAME_SUFFIXES"),
            "runtime.zero.leaf_module_config",
        )
    }
}
FEATURES = "docs/features.md in the hf_zero repository lists what exists"


@functools.cache
def known_modules() -> Mapping[str, Mapping[str, Any]]:
    """names.json: by module path without `deepspeed.`; read when a name is asked for that has no home of ours."""
    table = with_homes(json.loads(Path(__file__).with_name("names.json").read_text(encoding="utf-8")))
    return {**table, **REMOVED, **{module: {**table[module], **more} for module, more in _INSIDE_FUNCTIONS.items()}}


def with_homes(table: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The table with the module that defines it for every borrowed name, instead of `uses`: names, separated by blanks,
    that one module alone defines."""
    homes = {name: found[0] for name, found in definers(table).items()}
    rows = {}
    for module, row in table.items():
        borrowed = {name: source for source, names in row.get("borrowed", {}).items() for name in names.split()}
        borrowed.update((name, homes[name]) for name in row.get("uses", "").split())
        rest = {kind: value for kind, value in row.items() if kind not in ("uses", "borrowed")}
        rows[module] = {**rest, "borrowed": dict(sorted(borrowed.items()))} if borrowed else rest
    return rows


def definers(table: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """Name -> the modules that define it."""
    found: dict[str, list[str]] = {}
    for module, row in table.items():
        for kind in ("classes", "errors", "functions"):
            for name in row.get(kind, "").split():
                found.setdefault(name, []).append(module)
        for name in row.get("values", ()):
            found.setdefault(name, []).append(module)
    return found


def refusal(path: str) -> str:
    """What an error says about a name (`path` without `deepspeed.`)."""
    instead = alternative(path)
    return f"{ROOT}.{path} is not supported by hf_zero{f': {instead}' if instead else ''}. {FEATURES}."


@functools.cache
def known_names(module: str) -> tuple[str, ...]:
    """Every name that DeepSpeed's module has, without submodules."""
    row = known_modules().get(module, {})
    own = [name for kind in ("classes", "errors", "functions") for name in row.get(kind, "").split()]
    starred = [name for star in row.get("stars", "").split() for name in known_names(star)]
    return (*own, *row.get("values", ()), *row.get("borrowed", ()), *starred)


def find(module: str, name: str) -> object:
    """The placeholder for `name` of DeepSpeed's `module`; LookupError if that has no such name."""
    row = known_modules().get(module, {})
    if name in row.get("values", ()):
        value = row["values"][name]
        return list(value) if isinstance(value, list) else value
    path = f"{module}.{name}" if module else name
    for kind, make in (("classes", _refused_class), ("errors", _refused_error), ("functions", _refused_function)):
        if name in row.get(kind, "").split():
            return make(path)
    if name in row.get("borrowed", ()):
        return getattr(import_module(f"{ROOT}.{row['borrowed'][name]}".rstrip(".")), name)
    for star in row.get("stars", "").split():
        if not name.startswith("_") and (name in homes_of(star) or name in known_names(star)):
            return getattr(import_module(f"{ROOT}.{star}"), name)
    raise LookupError(path)


def children(module: str) -> list[str]:
    """Names of the modules right below `module`."""
    return [path.rpartition(".")[2] for path in known_modules() if path and path.rpartition(".")[0] == module]


def is_package(module: str) -> bool:
    return "package" in known_modules().get(module, {})


def _refused_class(path: str) -> type:
    """A class to name, to subclass and to ask isinstance about; making one raises NotImplementedError."""

    def __new__(cls: type, *_args: object, **_kwargs: object) -> NoReturn:
        raise NotImplementedError(refusal(path))

    return type(_last(path), (), {"__new__": __new__, **_signs(path)})


def _refused_error(path: str) -> type:
    """An exception class for `except` clauses; nothing of ours raises it."""
    return type(_last(path), (Exception,), _signs(path))


def _refused_function(path: str) -> Callable[..., NoReturn]:
    def refuse(*_args: object, **_kwargs: object) -> NoReturn:
        raise NotImplementedError(refusal(path))

    signs = _signs(path)
    refuse.__name__ = refuse.__qualname__ = _last(path)
    refuse.__doc__, refuse.__module__ = signs["__doc__"], signs["__module__"]
    return refuse


def _signs(path: str) -> dict[str, str]:
    return {"__module__": f"{ROOT}.{path}".rpartition(".")[0], "__doc__": refusal(path)}


def _last(path: str) -> str:
    return path.rpartition(".")[2]
