"""The command `plan`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from hf_zero.config import ConfigDict, ConfigError, Problem, load_config
from hf_zero.config.extras import ExtraMissing, service
from hf_zero.planning.candidates import Training, check_sizes, training_of
from hf_zero.planning.choose import Plan
from hf_zero.planning.choose import plan as make_plan
from hf_zero.planning.longest import longest_sequences, most_sharing, reaches_as_dict, show_longest
from hf_zero.planning.machine import Hardware, calibrated, hardware
from hf_zero.planning.model import PlannedModel, load_model
from hf_zero.planning.page import as_html
from hf_zero.planning.show import as_dict, config_text, show


def run(arguments: argparse.Namespace) -> int:
    """Print the plan; 1 if nothing fits, 2 if it cannot be made."""
    try:
        if arguments.longest:
            return _longest(arguments)
        found = plan_of(arguments)
        measured = None
        if arguments.measure:
            measured = service("measure")(found, arguments.measure, Path(arguments.measure_dir))
            found = measured.plan
        if arguments.html:
            _write(arguments.html, as_html(found), "--html")
        if arguments.write and found.chosen is not None:
            _write(arguments.write, config_text(found.chosen.config) + "\n", "--write")
    except (ConfigError, ExtraMissing) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if arguments.json:
        result = as_dict(found) | ({} if measured is None else {"measured": measured.as_list()})
        sys.stdout.write(json.dumps(result, indent=2) + "\n")
    else:
        show(found, everything=arguments.all)
        if measured is not None:
            measured.show()
    return 0 if found.chosen is not None else 1


def plan_of(arguments: argparse.Namespace) -> Plan:
    """Return the plan for the arguments.

    Raises:
        ConfigError: for invalid arguments.
    """
    model, machine, training, given = _asked(arguments)
    return make_plan(model, machine, training, given)


def _longest(arguments: argparse.Namespace) -> int:
    model, machine, training, given = _asked(arguments)
    if given is not None:
        rule, fix = "--longest tries all candidates and uses no ds.json", "leave out one of the two"
        raise ConfigError(Problem("--config", arguments.config, rule, fix))
    if arguments.sequence_parallel is None:
        training = most_sharing(model, machine, training)
    found = longest_sequences(model, machine, training)
    if arguments.json:
        sys.stdout.write(json.dumps(reaches_as_dict(found), indent=2) + "\n")
    else:
        show_longest(found, model, machine, training)
    if arguments.write and found:
        _write(arguments.write, config_text(found[0].config) + "\n", "--write")
    return 0 if found else 1


def _asked(arguments: argparse.Namespace) -> tuple[PlannedModel, Hardware, Training, ConfigDict | None]:
    """Return model, machine, training and ds.json for the arguments."""
    names = "seq_length micro_batch accumulation tensor_parallel sequence_parallel expert_parallel"
    least = dict.fromkeys(names.split(), 1)
    for key, smallest in (least | {"lora_rank": 0, "measure": 0}).items():
        value = getattr(arguments, key)
        if value is not None and value < smallest:
            flag, rule = f"--{key.replace('_', '-')}", f"must be at least {smallest}"
            raise ConfigError(Problem(flag, value, rule, "give another number"))
    training = Training(
        length=arguments.seq_length,
        micro_batch=arguments.micro_batch,
        accumulation=arguments.accumulation,
        precision=arguments.precision,
        checkpointing={"auto": None, "on": True, "off": False}[arguments.gradient_checkpointing],
        optimizer=arguments.optimizer,
        nvme_path=arguments.nvme_path,
        tensor_parallel=arguments.tensor_parallel,
        sequence_parallel=arguments.sequence_parallel or 1,
        expert_parallel=arguments.expert_parallel,
    )
    machine = hardware(vars(arguments))
    given = None if arguments.config is None else load_config(arguments.config)
    if given is not None:
        training = training_of(given, training, machine.ranks)
    check_sizes(training, machine.ranks)
    if arguments.calibrate:
        machine = calibrated(machine, training.precision)
    sizes = training.tensor_parallel, training.expert_parallel
    model = load_model(arguments.model, training.precision, arguments.lora_rank, *sizes)
    return model, machine, training, given


def _write(name: str, text: str, flag: str) -> None:
    try:
        Path(name).write_text(text, encoding="utf-8")
    except OSError as error:
        rule = f"it cannot be written: {error.strerror}"
        raise ConfigError(Problem(flag, name, rule, "name another file")) from None
    sys.stderr.write(f"Wrote {name}\n")  # standard output may be read as JSON
