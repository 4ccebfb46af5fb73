"""Rules that involve several keys."""

from __future__ import annotations

from collections.abc import Iterator

from hf_zero.config.choices.sections import stage_problem
from hf_zero.config.errors import Edit, Problem, Remark
from hf_zero.config.policies import AutocastPolicy, DtypeName
from hf_zero.config.schema import Root
from hf_zero.config.schema.training import Amp, Bf16, DataTypes, Fp16, TorchAutocast
from hf_zero.config.schema.zero import OffloadOptimizer, OffloadParam, Zero

MAX_SCALE_POWER = 127
SEQUENCE = "sequence_parallel_size"


def contradictions(config: Root, world_size: int, sequence_size: int = 1) -> Iterator[Problem]:
    """Yield a problem for every rule that the config violates."""
    yield from _zero_problems(config.zero_optimization or Zero())
    yield from _precision_problems(config)
    yield from _top_problems(config, world_size, sequence_size)
    wrong_stage = stage_problem(config.optimizer, (config.zero_optimization or Zero()).stage)
    if wrong_stage is not None:
        yield wrong_stage


def model_dtype(config: Root) -> DtypeName:
    """Return the dtype of the parameters; "fp32" means that they keep their own."""
    if (config.bf16 or Bf16()).enabled:
        return "bf16"
    return "fp16" if (config.fp16 or Fp16()).enabled else "fp32"


def autocast_of(config: Root) -> AutocastPolicy | None:
    """Return the autocast policy, or None if forward runs without torch.autocast."""
    autocast, amp = config.torch_autocast or TorchAutocast(), config.amp or Amp()
    if amp.enabled and amp.opt_level != "O0":
        return AutocastPolicy(dtype="fp16")
    return AutocastPolicy(dtype=autocast.dtype) if autocast.enabled else None


def _zero_problems(zero: Zero) -> Iterator[Problem]:
    path = "zero_optimization.stage"
    if zero.stage not in (0, 1, 2, 3):
        yield Problem(path, zero.stage, "must be 0, 1, 2 or 3", "choose 1, 2 or 3; 0 is plain data parallelism")
    if zero.sub_group_size == 0 and zero.stage != 3:
        # Published stage-3 configs use 0, which in DeepSpeed gives every parameter its own sub-group.
        path, fix = "zero_optimization.sub_group_size", "remove it (1_000_000_000), or write 10 to 50 million"
        yield Problem(path, 0, "must be at least 1 below stage 3", fix)
    yield from _offload_problems("offload_optimizer", zero.offload_optimizer, zero.stage)
    yield from _offload_problems("offload_param", zero.offload_param, zero.stage)
    yield from _loco_problems(zero)


def _loco_problems(zero: Zero) -> Iterator[Problem]:
    loco = zero.zeropp_loco_param
    if zero.stage == 3 and loco is not None and loco.err_beta >= 1:
        rule = "must be below 1: at 1 the average of errors stays zero"
        yield Problem("zero_optimization.zeropp_loco_param.err_beta", loco.err_beta, rule, "use less, such as 0.8")


def _offload_problems(name: str, offload: OffloadOptimizer | OffloadParam | None, stage: int) -> Iterator[Problem]:
    if offload is None or offload.device in (None, "none") or (name == "offload_param" and stage in (0, 1, 2)):
        return  # it has no effect, which gives a remark
    path = f"zero_optimization.{name}.device"
    if offload.device == "nvme" and stage < 1:
        rule = "at stage 0 every rank would write all states to the drive"
        yield Problem(path, offload.device, rule, 'set zero_optimization.stage to 1, 2 or 3, or the device to "cpu"')
    elif offload.device == "nvme" and offload.nvme_path in (None, "", "none"):
        rule = "offload to NVMe needs a folder on the drive"
        yield Problem(f"zero_optimization.{name}.nvme_path", offload.nvme_path, rule, "give an existing folder")


def _precision_problems(config: Root) -> Iterator[Problem]:
    fp16, bf16, types = config.fp16 or Fp16(), config.bf16 or Bf16(), config.data_types or DataTypes()
    if fp16.enabled and bf16.enabled:
        rule = "fp16 and bf16 cannot both be enabled"
        yield Problem("fp16.enabled, bf16.enabled", True, rule, "keep bf16 and set fp16.enabled to false")
    if types.param_dtype not in (None, model_dtype(config)):
        rule = f"fp16.enabled and bf16.enabled make the parameters {model_dtype(config)}"
        yield Problem("data_types.param_dtype", types.param_dtype, rule, "remove it; those two keys decide")
    yield from _master_problems(config, fp16, bf16)
    yield from _loss_scale_problems(fp16)
    yield from _amp_problems(config)


def _master_problems(config: Root, fp16: Fp16, bf16: Bf16) -> Iterator[Problem]:
    """Check that keys about 16-bit masters have the keys that they require."""
    own = config.hf_zero is not None and config.hf_zero.stochastic_rounding
    masters = "bf16.bf16_master_weights_and_grads"
    for path, is_set, needed, is_there in (
        ("fp16.fp16_master_weights_and_grads", fp16.fp16_master_weights_and_grads, "fp16.enabled", fp16.enabled),
        (masters, bf16.bf16_master_weights_and_grads, "bf16.enabled", bf16.enabled),
        ("bf16.bf16_optimizer_states", bf16.bf16_optimizer_states, masters, bf16.bf16_master_weights_and_grads),
        ("hf_zero.stochastic_rounding", own, masters, bf16.bf16_master_weights_and_grads),
    ):
        if is_set and not is_there:
            yield Problem(path, True, f"needs {needed}", f"set {needed} to true, or remove {path}")


def _loss_scale_problems(fp16: Fp16) -> Iterator[Problem]:
    if not fp16.enabled or fp16.loss_scale:
        return
    low, path = fp16.min_loss_scale, "fp16.min_loss_scale"
    if low <= 0:
        yield Problem(path, low, "a dynamic scale needs a minimum above 0", "remove it (1), or set fp16.loss_scale")
    elif fp16.initial_scale_power > MAX_SCALE_POWER:
        path, rule = "fp16.initial_scale_power", f"2 to this power must fit into fp32 (at most {MAX_SCALE_POWER})"
        yield Problem(path, fp16.initial_scale_power, rule, "16 is usual")
    elif 2.0**fp16.initial_scale_power < low:
        rule = f"the initial scale, 2 to the power {fp16.initial_scale_power}, is below it"
        yield Problem(path, low, rule, "lower it, or raise fp16.initial_scale_power")


def _amp_problems(config: Root) -> Iterator[Problem]:
    amp, fp16, bf16 = config.amp or Amp(), config.fp16 or Fp16(), config.bf16 or Bf16()
    if not amp.enabled:
        return
    if fp16.enabled or bf16.enabled:
        other = "fp16" if fp16.enabled else "bf16"
        rule = f"amp and {other} cannot both be enabled"
        yield Problem(f"amp.enabled, {other}.enabled", True, rule, "set amp.enabled to false")
    if (config.torch_autocast or TorchAutocast()).enabled:
        rule = "both run forward under torch.autocast"
        yield Problem("amp.enabled, torch_autocast.enabled", True, rule, "set amp.enabled to false")
    if amp.opt_level in ("O2", "O3"):
        rule = f"{amp.opt_level} casts the weights themselves to fp16"
        yield Problem("amp.opt_level", amp.opt_level, rule, 'use "fp16": {"enabled": true} instead of amp, or "O1"')


def _top_problems(config: Root, world_size: int, sequence_size: int) -> Iterator[Problem]:
    if world_size % sequence_size:
        rule = f"world size = data ranks x ranks per sequence does not hold: {world_size} != n x {sequence_size}"
        fix = f"give a divisor of {world_size}, or start a multiple of {sequence_size} ranks"
        yield Problem(SEQUENCE, sequence_size, rule, fix)
    elif config.data_parallel_size not in (None, world_size // sequence_size):
        rule = f"every rank is data parallel, and there are {world_size}"
        if sequence_size > 1:
            rule = f"{world_size} ranks, {sequence_size} per sequence, are {world_size // sequence_size} data ranks"
        yield Problem("data_parallel_size", config.data_parallel_size, rule, "remove it")
    if config.sequence_parallel_size not in (1, sequence_size):
        rule = f"the script asks for {sequence_size} ranks per sequence (mpu, mesh_param, ParallelismConfig(sp_size))"
        fix = f"remove it, or write {sequence_size}"
        yield Problem(SEQUENCE, config.sequence_parallel_size, rule, fix)


def advice(config: Root) -> Iterator[Remark]:
    """Yield remarks on settings that are allowed but could be better."""
    amp = config.amp or Amp()
    if amp.enabled and amp.opt_level == "O1":
        yield Remark("amp", "O1 runs as torch.autocast in fp16, not through Apex; bf16.enabled needs no loss scale")
    zero = config.zero_optimization or Zero()
    parameters = zero.offload_param if zero.stage == 3 else None
    yield from _idle("offload_optimizer", zero.offload_optimizer, _NVME_OPTIMIZER)
    yield from _idle("offload_param", parameters, _NVME_PARAM)
    loco = zero.zeropp_loco_param
    if zero.stage == 3 and loco is not None and not zero.zero_quantized_gradients:
        why = "gradients are not quantized (zero_quantized_gradients is off)"
        yield _idle_key(("zero_optimization", "zeropp_loco_param"), loco.model_dump(exclude_unset=True), why)
    places = [section.device for section in (zero.offload_optimizer, parameters) if section is not None]
    if config.aio is not None and "nvme" not in places:
        yield _idle_key(("aio",), config.aio.model_dump(exclude_unset=True), "nothing is offloaded to NVMe")
    if config.prescale_gradients and config.gradient_predivide_factor != 1.0:
        why = "prescale_gradients divides by the number of ranks"
        yield _idle_key(("gradient_predivide_factor",), config.gradient_predivide_factor, why)
    if set(config.compile or {}) - {"deepcompile"}:
        yield _idle_key(
            ("compile",), config.compile, "the engine compiles nothing; use torch_compile or torch.compile()"
        )
    size = config.vocabulary_size
    if size is not None and size % 8:
        yield Remark("vocabulary_size", f"{size} is not a multiple of 8, which is faster on GPUs")


_NVME_OPTIMIZER = ("nvme_path", "buffer_count", "pipeline_read", "pipeline_write", "fast_init")
_NVME_PARAM = ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu")


def _idle(name: str, section: OffloadOptimizer | OffloadParam | None, keys: tuple[str, ...]) -> Iterator[Remark]:
    if section is None or section.device == "nvme":
        return
    for key in keys:
        value = getattr(section, key, None)
        if key in section.model_fields_set and value not in (None, "none"):
            text = f"no effect with device {section.device or 'none'} (used with nvme)"
            path = ("zero_optimization", name, key)
            asks = section.device == "cpu" and value != type(section).model_fields[key].default
            yield Remark(".".join(path), text, value, ignored=asks, edit=Edit(path))


def _idle_key(path: tuple[str, ...], value: object, why: str) -> Remark:
    return Remark(".".join(path), f"no effect, {why}", value, ignored=True, edit=Edit(path))
