"""accelerate.commands: --use_hf_zero, or `use_hf_zero: true` in a file, is DeepSpeed's integration with our engine."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hf_zero.config import ConfigError, Other, Problem, load_config
from hf_zero.config.errors import ABSENT
from hf_zero.config.hosts import normalise
from hf_zero.config.sources import source_in
from hf_zero.integration.huggingface.views import LAUNCHED, dropped
from hf_zero.integration.patches import Function, Patches
from hf_zero.integration.startup import FINDER
from hf_zero.log import logger

LAUNCH = Patches("accelerate.commands.launch")
_NO_FLAG = "`accelerate launch` may lack --use_hf_zero"
_NO_NEED = "accelerate lets packages add a flag of their own to its launcher"

_KEY = "use_hf_zero"
_GROUP = "hf_zero Arguments"
_HELP = (
    "Train with hf_zero: ZeRO stages 0 to 3 without DeepSpeed. Takes all flags and config files of --use_deepspeed and "
    "wins over an installed DeepSpeed. With --cpu, ranks train on CPUs. In a config file: `use_hf_zero: true`."
)
_OTHERS = ("use_fsdp", "use_megatron_lm", "use_parallelism_config", "tpu", "tpu_use_cluster", "multi_gpu")
_OFFLOADS = ("offload_optimizer", "offload_param")
_DEVICES = ("none", "cpu", "nvme")
# Flags that the script may also set.
_MAY_BE_AUTO = {"gradient_accumulation_steps": int, "gradient_clipping": float}


@LAUNCH.add("launch_command_parser(subparsers)", without=_NO_FLAG, until=_NO_NEED)
def around_parser(original: Callable[..., argparse.ArgumentParser], subparsers: Any = None) -> argparse.ArgumentParser:
    """Add the flag, its group in --help, and "auto" for values that Trainer or the script may set."""
    parser = original(subparsers)
    group = parser.add_argument_group(_GROUP, "Arguments of ZeRO training without DeepSpeed.")
    group.add_argument(f"--{_KEY}", default=False, action="store_true", help=_HELP)
    launch = sys.modules[original.__module__]
    launch.options_to_group[_KEY] = launch.options_to_group["use_deepspeed"]  # whose flags --help then shows
    parser.formatter_class = _showing_our_group(parser.formatter_class)
    for action in parser._actions:
        if action.dest in _MAY_BE_AUTO:
            action.type = _or_auto(_MAY_BE_AUTO[action.dest])
    return parser


def _showing_our_group(formatter: Any) -> Any:
    def with_our_group(*args: Any, **kwargs: Any) -> Any:
        help_formatter = formatter(*args, **kwargs)
        help_formatter.titles.append(_GROUP)
        return help_formatter

    return with_our_group


def _or_auto(kind: type) -> Callable[[str], Any]:
    def value(text: str) -> Any:
        return text if text == "auto" else kind(text)

    value.__name__ = f"{kind.__name__} or auto"  # argparse's errors show it
    return value


@LAUNCH.add("_validate_launch_command(args)", without=_NO_FLAG, until=_NO_NEED)
def around_validation(original: Function, args: Any) -> Any:
    """--use_hf_zero is --use_deepspeed with HF_ZERO=1; report all wrong values before ranks start."""
    typed = {name: value for name, value in vars(args).items() if value is not None}  # `original` adds the config file
    if not _asked_for(args, sys.modules[original.__module__]):
        validated = original(args)
        if args.use_deepspeed and FINDER.answers():
            _accept(args, typed, [])
        return validated
    os.environ["HF_ZERO"] = "1"  # for this process and its children
    problems = [
        Problem(f"--{name}", True, "this is another way to train", f"drop it, or drop --{_KEY}")
        for name in _OTHERS
        if getattr(args, name, False)
    ]
    for name in _OTHERS:
        setattr(args, name, False)
    on_cpu, args.cpu, args.use_deepspeed = args.cpu, False, True
    if on_cpu:
        args.use_cpu = True
        if args.num_processes is None and args.config_file is None:
            args.num_processes = 1
    validated = original(args)
    _accept(args, typed, problems)
    return validated


def _asked_for(args: Any, launch: Any) -> bool:
    """Whether the flag or the config file, which upstream will read, requests hf_zero."""
    if args.use_hf_zero:
        return True
    if args.config_file is None and (args.cpu or not os.path.isfile(launch.default_config_file)):
        return False
    settings = getattr(launch.load_config_from_file(args.config_file), "deepspeed_config", None) or {}
    return _is_true(settings.get(_KEY, False))


def _accept(args: Any, typed: Mapping[str, Any], problems: list[Problem]) -> None:
    """Check the flags, merged with accelerate's config file: report all problems, then fill in open values.

    Args:
        typed: the flags alone. accelerate itself refuses entries of its file beside a DeepSpeed config file.
    """
    problems = [*problems, *_wrong_values(args, typed)]
    if problems:
        raise ConfigError(problems, headline="accelerate launch cannot start this")
    for name in _MAY_BE_AUTO:
        if getattr(args, name) == "auto":
            setattr(args, name, None)
    for name in _OFFLOADS if args.deepspeed_config_file is None else ():
        path, device = getattr(args, f"{name}_nvme_path"), getattr(args, f"{name}_device")
        if path not in (None, "none") and str(device).lower() != "nvme":
            text = "--%s_nvme_path %s has no effect with --%s_device %s (used with nvme)"
            logger.warning(text, name, path, name, device or "none")
    if str(args.zero_stage) == "3" and args.deepspeed_config_file is None and args.zero3_save_16bit_model is None:
        args.zero3_save_16bit_model = "true"  # save_model writes a whole model by default
    if not args.num_processes:
        logger.info("no accelerator is there: 1 process trains on the CPU (--num_processes says how many)")
        args.num_processes = 1


def _wrong_values(args: Any, typed: Mapping[str, Any]) -> Iterator[Problem]:
    if str(args.zero_stage) not in ("None", "0", "1", "2", "3"):
        yield Problem("--zero_stage", args.zero_stage, "there are stages 0, 1, 2, 3", "give one of them")
    for name in ("zero3_init_flag", "zero3_save_16bit_model"):
        if str(getattr(args, name)).lower() not in ("none", "true", "false"):
            yield Problem(f"--{name}", getattr(args, name), "this is true or false", "give one of the two")
    for name, kind in _MAY_BE_AUTO.items():
        value = getattr(args, name)
        if value not in (None, "auto") and not _at_least(value, kind):
            yield Problem(f"--{name}", value, f"a number from {kind(kind is int)} on, or auto", "correct it")
    for name in _OFFLOADS:
        yield from _wrong_offload(name, getattr(args, f"{name}_device"), getattr(args, f"{name}_nvme_path"), args)
    if args.deepspeed_config_file is not None:
        try:
            config = load_config(args.deepspeed_config_file)
            normalise(config)
        except ConfigError as error:
            yield from error.problems
            return
        for path, written, given in dropped(config, typed):
            name = LAUNCHED[path][0]
            source = source_in(config, path)
            place = config.name if written is ABSENT or source.kind == "dict" else str(source)
            yield Problem(
                f"--{name}",
                given,
                "it is dropped: the DeepSpeed config file decides",
                f'write {path}: "auto" in the file so that the flag decides, or drop --{name}',
                other=Other(path, written, place),
            )


def _wrong_offload(name: str, device: object, path: object, args: Any) -> Iterator[Problem]:
    if str(device).lower() not in (*_DEVICES, "auto"):  # None reads as none
        yield Problem(f"--{name}_device", device, f"this is one of {', '.join(_DEVICES)}", "give one of them")
    if str(device).lower() == "nvme" and path in (None, "none") and args.deepspeed_config_file is None:
        rule = "offload to a drive needs a folder on it"
        yield Problem(f"--{name}_device", device, rule, f"add --{name}_nvme_path /path/on/the/drive")


def _at_least(value: object, kind: type) -> bool:
    try:
        return bool(kind(str(value)) >= (kind is int))
    except ValueError:
        return False


@LAUNCH.add(
    "prepare_deepspeed_cmd_env(args)",
    without="folders for NVMe offload, and training on CPUs, may not reach the ranks of `accelerate launch`",
    until="accelerate hands these settings on with DeepSpeed, too",
)
def around_environment(original: Function, args: Any) -> tuple[Any, dict[str, str]]:
    """Add the variables that accelerate omits, and start several machines with hf_zero's launcher."""
    command, environment = original(args)
    if FINDER.answers():
        environment.update(_left_out(args))
        if command and command[0] == "deepspeed":
            command[:1] = [sys.executable, "-m", "hf_zero", "launch"]
    return command, environment


def _left_out(args: Any) -> Iterator[tuple[str, str]]:
    """Settings that upstream parses or reads from the config file, but does not pass on with DeepSpeed."""
    for name in _OFFLOADS:
        path = getattr(args, f"{name}_nvme_path")
        if path not in (None, "none"):
            yield f"ACCELERATE_DEEPSPEED_{name.upper()}_NVME_PATH", str(path)
    if args.use_cpu:
        yield "ACCELERATE_USE_CPU", "true"
        yield "OMP_NUM_THREADS", str(args.num_cpu_threads_per_process)


def _is_true(value: object) -> bool:
    return str(value).lower() in ("true", "1", "yes")


CONFIG_FILE = Patches("accelerate.commands.config.config_args")
_OTHER_TYPES = ("FSDP", "MEGATRON_LM", "XLA", "TP")


@CONFIG_FILE.add("BaseConfig.process_config(config_dict)", without=_NO_FLAG, until=_NO_NEED)
def around_process_config(
    original: Callable[[dict[str, Any]], dict[str, Any]], config_dict: dict[str, Any]
) -> dict[str, Any]:
    """Pass the key on together with accelerate's own settings for DeepSpeed."""
    if _is_true(config_dict.pop(_KEY, False)):
        kind = config_dict.get("distributed_type", "DEEPSPEED")
        if kind in _OTHER_TYPES:
            rule = f"{_KEY}: true is a way to train of its own"
            raise ConfigError(Problem("distributed_type", str(kind), rule, f"write DEEPSPEED, or drop {_KEY}"))
        config_dict["distributed_type"] = "DEEPSPEED"
        config_dict["deepspeed_config"] = {**(config_dict.get("deepspeed_config") or {}), _KEY: True}
    return original(config_dict)
