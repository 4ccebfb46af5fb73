"""The command `plan`: its arguments, and the order in which things happen."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from hf_zero.config import ConfigDict, ConfigError, Problem, load_config
from hf_zero.config.extras import ExtraMissing, service
from hf_zero.planning.calibrate import calibrated
from hf_zero.planning.candidates import Training, check_sizes, training_of
from hf_zero.planning.choose import Plan
from hf_zero.planning.choose import plan as make_plan
from hf_zero.planning.longest import longest_sequences, most_sharing, reaches_as_dict, show_longest
from hf_zero.planning.machine import GPUS, Hardware, hardware
from hf_zero.planning.model import PlannedModel, load_model
from hf_zero.planning.page import as_html
from hf_zero.planning.show import as_dict, config_text, show

_SIZES = "a number of bytes: 80G, 1.5T, 24GiB"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `plan` takes."""
    parser.add_argument("model", help="folder, config.json, hub name, or a number of parameters (7b, 350M, 1.5e9)")
    machine = parser.add_argument_group("the machine (what is not said is found on this one)")
    machine.add_argument("--gpu", metavar="NAME", help=f"one of {', '.join(GPUS)}, cpu; or any, with --device-memory")
    machine.add_argument("--gpus-per-node", type=int, metavar="N", help="devices (on a CPU, ranks) of one host")
    machine.add_argument("--nodes", type=int, metavar="N", help="hosts (default: 1)")
    machine.add_argument("--device-memory", metavar="SIZE", help=f"of one device, {_SIZES}")
    machine.add_argument("--host-memory", metavar="SIZE", help="of one host")
    machine.add_argument("--disk", metavar="SIZE", help="of one host, with --nvme-path; found where the path is here")
    machine.add_argument("--nvme-path", metavar="DIR", help="where states may go: without it no drive is used")
    machine.add_argument("--link", metavar="SIZE", help="bytes per second between the devices of a host, one direction")
    machine.add_argument("--calibrate", action="store_true", help="measure this machine's speeds first, in a second")
    machine.add_argument("--network", metavar="SIZE", help="bytes per second to other hosts, for one device")
    training = parser.add_argument_group("the training")
    training.add_argument("--seq-length", type=int, default=2048, metavar="N", help="tokens of a sample (2048)")
    training.add_argument("--micro-batch", type=int, default=1, metavar="N", help="samples of a forward (1)")
    training.add_argument("--accumulation", type=int, default=1, metavar="N", help="forwards of an update (1)")
    training.add_argument("--precision", choices=["bf16", "fp16", "fp32"], default="bf16")
    training.add_argument(
        "--gradient-checkpointing", choices=["auto", "on", "off"], default="auto", help="auto: both, and the better one"
    )
    training.add_argument("--lora-rank", type=int, default=0, metavar="R", help="adapters on all linear layers (none)")
    training.add_argument("--optimizer", default="AdamW", metavar="TYPE", help="optimizer.type of ds.json (AdamW)")
    training.add_argument(
        "--tensor-parallel", type=int, default=1, metavar="N", help="ranks that hold parts of the same matrices (1)"
    )
    training.add_argument(
        *("--sequence-parallel", "--sequence-ranks"),
        type=int,
        metavar="N",
        help="ranks that hold parts of the same sequences (1; of --longest a host's, as heads divide)",
    )
    training.add_argument(
        "--config", metavar="DS.JSON", help="yours: what it says goes before the above, and it gets a row of its own"
    )
    output = parser.add_argument_group("what comes out")
    output.add_argument("--measure", type=int, default=0, metavar="N", help="run the N most promising for a few steps")
    output.add_argument("--measure-dir", default="plan_results", metavar="DIR", help="for their files (plan_results)")
    output.add_argument(
        "--longest", action="store_true", help="instead: the longest sequence that fits, with MLPs and loss in tiles"
    )
    output.add_argument("--json", action="store_true", help="JSON instead of a table")
    output.add_argument("--html", metavar="FILE", help="also a page of its own, with bars")
    output.add_argument("--write", metavar="FILE", help="also the chosen ds.json")
    output.add_argument("--all", action="store_true", help="also what does not fit")


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
            _write(arguments.write, config_text(found.chosen) + "\n", "--write")
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
    """The plan that the arguments ask for.

    Raises:
        ConfigError: for arguments that cannot be.
    """
    model, machine, training, given = _asked(arguments)
    return make_plan(model, machine, training, given)


def _longest(arguments: argparse.Namespace) -> int:
    model, machine, training, given = _asked(arguments)
    if given is not None:
        rule, fix = "--longest tries all ways to train, and no ds.json", "leave out one of the two"
        raise ConfigError(Problem("--config", arguments.config, rule, fix))
    if arguments.sequence_parallel is None:
        training = most_sharing(model, machine, training)
    found = longest_sequences(model, machine, training)
    if arguments.json:
        sys.stdout.write(json.dumps(reaches_as_dict(found), indent=2) + "\n")
    else:
        show_longest(found, model, machine, training)
    if arguments.write and found:
        _write(arguments.write, config_text(found[0]) + "\n", "--write")
    return 0 if found else 1


def _asked(arguments: argparse.Namespace) -> tuple[PlannedModel, Hardware, Training, ConfigDict | None]:
    """Model, machine, training and ds.json of the arguments."""
    least = dict.fromkeys(("seq_length", "micro_batch", "accumulation", "tensor_parallel", "sequence_parallel"), 1)
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
    )
    machine = hardware(vars(arguments))
    given = None if arguments.config is None else load_config(arguments.config)
    if given is not None:
        training = training_of(given, training, machine.ranks)
    check_sizes(training, machine.ranks)
    if arguments.calibrate:
        machine = calibrated(machine, training.precision)
    model = load_model(arguments.model, training.precision, arguments.lora_rank, training.tensor_parallel)
    return model, machine, training, given


def _write(name: str, text: str, flag: str) -> None:
    try:
        Path(name).write_text(text, encoding="utf-8")
    except OSError as error:
        rule = f"it cannot be written: {error.strerror}"
        raise ConfigError(Problem(flag, name, rule, "name another file")) from None
