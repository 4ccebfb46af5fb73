"""The command `plan`."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from hf_zero.config import ConfigDict, ConfigError, Problem, load_config
from hf_zero.config.extras import ExtraMissing, service
from hf_zero.planning.candidates import Training, check_sizes, training_of, with_batch
from hf_zero.planning.choose import plan as make_plan
from hf_zero.planning.longest import longest_sequences, most_sharing, reaches_as_dict, show_longest
from hf_zero.planning.machine import Hardware, calibrated, count, hardware
from hf_zero.planning.model import PlannedModel, load_model
from hf_zero.planning.packed import PackedBase
from hf_zero.planning.page import as_html
from hf_zero.planning.show import as_dict, config_text, show


def run(arguments: argparse.Namespace) -> int:
    """Print the plan; 1 if nothing fits, 2 if it cannot be made."""
    try:
        if arguments.longest:
            return _longest(arguments)
        plan = make_plan(*_asked(arguments))
        measured = None
        if arguments.measure:
            measured = service("measure")(plan, arguments.measure, Path(arguments.measure_dir))
            plan = measured.plan
        if arguments.html:
            _write(arguments.html, as_html(plan), "--html")
        if arguments.write and plan.chosen is not None:
            _write(arguments.write, config_text(plan.chosen.config) + "\n", "--write")
    except (ConfigError, ExtraMissing) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if arguments.json:
        result = as_dict(plan) | ({} if measured is None else {"measured": measured.as_list()})
        sys.stdout.write(json.dumps(result, indent=2) + "\n")
    else:
        show(plan, everything=arguments.all)
        if measured is not None:
            measured.show()
    return 0 if plan.chosen is not None else 1


def _longest(arguments: argparse.Namespace) -> int:
    model, machine, training, given = _asked(arguments)
    if given is not None:
        rule, fix = "--longest tries all candidates and uses no ds.json", "leave out one of the two"
        raise ConfigError(Problem("--config", arguments.config, rule, fix))
    training = replace(training, searches=False)
    if arguments.sequence_parallel is None:
        training = most_sharing(model, machine, training)
    reaches = longest_sequences(model, machine, training)
    if arguments.json:
        sys.stdout.write(json.dumps(reaches_as_dict(reaches), indent=2) + "\n")
    else:
        show_longest(reaches, model, machine, training)
    if arguments.write and reaches:
        _write(arguments.write, config_text(reaches[0].config) + "\n", "--write")
    return 0 if reaches else 1


def _asked(arguments: argparse.Namespace) -> tuple[PlannedModel, Hardware, Training, ConfigDict | None]:
    options = vars(arguments)
    sizes_of_groups = ("tensor_parallel", "sequence_parallel", "expert_parallel")
    for key in ("seq_length", "micro_batch", "accumulation", "global_batch", *sizes_of_groups):
        count(options, key)
    for key in ("lora_rank", "measure"):
        count(options, key, least=0)
    training = Training(
        length=arguments.seq_length,
        precision=arguments.precision,
        checkpointing={"auto": None, "on": True, "off": False}[arguments.gradient_checkpointing],
        optimizer=arguments.optimizer,
        nvme_path=arguments.nvme_path,
        tensor_parallel=arguments.tensor_parallel,
        sequence_parallel=arguments.sequence_parallel or 1,
        expert_parallel=arguments.expert_parallel,
    )
    machine = hardware(options)
    batch = arguments.micro_batch, arguments.accumulation, arguments.global_batch
    training = with_batch(training, *batch, machine.ranks)
    given = None if arguments.config is None else load_config(arguments.config)
    if given is not None:
        training = training_of(given, training, machine.ranks)
    check_sizes(training, machine.ranks)
    if arguments.calibrate:
        machine = calibrated(machine, training.precision)
    sizes = training.tensor_parallel, training.expert_parallel
    base = PackedBase(arguments.base_bits, arguments.double_quant) if arguments.base_bits else None
    model = load_model(arguments.model, training.precision, arguments.lora_rank, *sizes, base)
    return model, machine, training, given


def _write(name: str, text: str, flag: str) -> None:
    try:
        Path(name).write_text(text, encoding="utf-8")
    except OSError as error:
        rule = f"it cannot be written: {error.strerror}"
        raise ConfigError(Problem(flag, name, rule, "name another file")) from None
    sys.stderr.write(f"Wrote {name}\n")  # standard output may be read as JSON
