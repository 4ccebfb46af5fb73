"""`accelerate launch --use_hf_zero`, or with accelerate's own flag: all flags and config fields reach the workers."""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

import hf_zero

hf_zero.install()

from accelerate.commands import launch as cli  # noqa: E402
from accelerate.commands.config import cluster  # noqa: E402

from hf_zero.config import ConfigError  # noqa: E402
from tests.integration.sites import Site  # noqa: E402
from tests.support.launch import Finished, a_port, accelerate, launch  # noqa: E402

SCRIPT = Path(__file__).with_name("launched_script.py")
FOLDER = "{folder}"
TIMEOUT_S = 250


@dataclass(frozen=True)
class Row:
    """A flag, or a field of the config file, and the expected value in a worker."""

    name: str
    value: object
    place: str  # in the worker's report
    expected: object


@dataclass(frozen=True)
class Case:
    """One launch with several rows."""

    name: str
    rows: tuple[Row, ...]
    more: tuple[str, ...] = ()  # flags that are not DeepSpeed's
    machine: tuple[tuple[str, object], ...] = ()  # top level of the config file; if set, rows are its fields
    ds: tuple[tuple[str, object], ...] = ()  # a DeepSpeed config file
    reports: tuple[tuple[str, object], ...] = ()  # other expected values in workers
    slow: bool = True


STAGE_3_ON_DRIVES = (
    Row("zero_stage", 3, "stage", 3),
    Row("offload_optimizer_device", "nvme", "optimizer_device", "nvme"),
    Row("offload_optimizer_nvme_path", f"{FOLDER}/States", "optimizer_path", f"{FOLDER}/States"),
    Row("offload_param_device", "nvme", "parameter_device", "nvme"),
    Row("offload_param_nvme_path", f"{FOLDER}/Weights", "parameter_path", f"{FOLDER}/Weights"),
    Row("gradient_accumulation_steps", 4, "accumulation", 4),
    Row("gradient_clipping", 0.25, "clipping", 0.25),
    Row("zero3_init_flag", "false", "zero_init", False),
    Row("zero3_save_16bit_model", "true", "saves_16bit", True),
    Row("deepspeed_moe_layer_cls_names", "Block", "leaves", ["Block"]),
)
ENGINE = "hf_zero.integration.engine.engine"
OURS = (("type", "DEEPSPEED"), ("HF_ZERO", "1"), ("engine", ENGINE))
ON_CPU = (("ranks", 2), ("batches", 8), ("device", "cpu"), ("backend", "gloo"))
AUTOS = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": "auto",
        "offload_optimizer": {"device": "auto", "nvme_path": "auto"},
        "offload_param": {"device": "auto", "nvme_path": "auto"},
        "stage3_gather_16bit_weights_on_model_save": "auto",
    },
}
CASES = (
    Case(
        "flags",
        STAGE_3_ON_DRIVES,
        more=("--use_hf_zero", "--cpu", "--num_processes=2", "--mixed_precision=bf16"),
        reports=(*OURS, *ON_CPU, ("precision", "bfloat16"), ("updates", 2), ("files_of_optimizer", True),
                 ("files_of_parameters", True)),
        slow=False,
    ),
    Case(
        "fields of a file that asks for us",
        STAGE_3_ON_DRIVES,
        machine=(("use_hf_zero", True), ("num_processes", 2), ("use_cpu", True), ("mixed_precision", "bf16"),
                 ("debug", True)),
        reports=(*OURS, *ON_CPU, ("precision", "bfloat16"), ("updates", 2), ("debug", "true")),
    ),
    Case(
        "a file of accelerate's for DeepSpeed, without any flag",
        (
            Row("zero_stage", 1, "stage", 1),
            Row("offload_optimizer_device", "cpu", "optimizer_device", "cpu"),
            Row("offload_param_device", "none", "parameter_device", "none"),
            Row("gradient_accumulation_steps", "auto", "accumulation", 1),
            Row("gradient_clipping", "auto", "clipping", 1.0),
            Row("zero3_init_flag", "false", "zero_init", False),
        ),
        machine=(("distributed_type", "DEEPSPEED"), ("num_processes", 2), ("machine_rank", 0), ("num_machines", 1),
                 ("main_training_function", "main"), ("downcast_bf16", "no"), ("rdzv_backend", "static"),
                 ("same_network", True), ("enable_cpu_affinity", False)),
        # By default test_launch_scenarios.py tests such files.
        reports=(("type", "DEEPSPEED"), ("HF_ZERO", ""), ("engine", ENGINE), *ON_CPU, ("updates", 8)),
    ),
    Case(
        "a file of accelerate's for several GPUs, and the flag",
        (Row("zero_stage", 2, "stage", 2),),
        more=("--use_hf_zero", "--cpu"),
        machine=(("distributed_type", "MULTI_GPU"), ("num_processes", 2), ("mixed_precision", "no")),
        reports=(*OURS, *ON_CPU, ("precision", "float32")),
    ),
    Case(
        "flags that fill the autos of a DeepSpeed config file",
        (Row("deepspeed_config_file", f"{FOLDER}/ds.json", "stage", 3), *STAGE_3_ON_DRIVES),
        more=("--use_hf_zero", "--cpu", "--num_processes=2", "--mixed_precision=bf16"),
        ds=tuple(AUTOS.items()),
        reports=(*OURS, *ON_CPU, ("precision", "bfloat16"), ("files_of_optimizer", True)),
    ),
    Case(
        "hyphens, and what the script says",
        (
            Row("gradient-accumulation-steps", "auto", "accumulation", 1),
            Row("gradient-clipping", "auto", "clipping", 1.0),
            Row("zero-stage", 0, "stage", 0),
        ),
        more=("--use-hf-zero", "--cpu", "--num-processes=2", "--num_cpu_threads_per_process=3"),
        reports=(*OURS, *ON_CPU, ("threads", "3"), ("updates", 8)),
    ),
    Case(
        "accelerate's flag for DeepSpeed",
        (
            Row("zero_stage", 2, "stage", 2),
            Row("gradient_accumulation_steps", 2, "accumulation", 2),
            Row("gradient_clipping", 0.5, "clipping", 0.5),
        ),
        more=("--use_deepspeed", "--num_processes=1", "--mixed_precision=no"),
        reports=(("type", "DEEPSPEED"), ("HF_ZERO", ""), ("engine", ENGINE), ("ranks", 1), ("updates", 8)),
    ),
    Case("nothing else at all", (), more=("--use_hf_zero",),
         reports=(*OURS, ("ranks", 1), ("stage", 2), ("accumulation", 1))),
)  # fmt: skip
# They set where ranks run, and are used by the launcher, not by a worker: see the tests of several machines.
MULTI_MACHINE = {
    "deepspeed_hostfile", "deepspeed_exclusion_filter", "deepspeed_inclusion_filter", "deepspeed_multinode_launcher",
}  # fmt: skip


def parameters() -> list[Any]:
    return [pytest.param(case, id=case.name, marks=[pytest.mark.slow] if case.slow else []) for case in CASES]


@pytest.mark.parametrize("case", parameters())
def test_what_arrives_in_the_workers(case: Case, tmp_path: Path) -> None:
    def there(value: object) -> object:
        return value.replace(FOLDER, str(tmp_path)) if isinstance(value, str) else value

    for name in ("States", "Weights"):
        (tmp_path / name).mkdir()
    (tmp_path / "ds.json").write_text(json.dumps(dict(case.ds)))
    words = [*case.more]
    if case.machine:
        (tmp_path / "machine.yaml").write_text(
            yaml.safe_dump(
                {**dict(case.machine), "deepspeed_config": {row.name: there(row.value) for row in case.rows}}
            )
        )
        words += ["--config_file", str(tmp_path / "machine.yaml")]
    else:
        words += [f"--{row.name}={there(row.value)}" for row in case.rows]
    expected = {**dict(case.reports), **{row.place: there(row.expected) for row in case.rows}}
    found = reports(
        launch(
            SCRIPT, ["--own", 1], launcher=accelerate(*words), environment=home(tmp_path), timeout_s=TIMEOUT_S
        ).check()
    )
    assert sorted(report["rank"] for report in found) == list(range(int(expected["ranks"])))  # type: ignore[call-overload]
    for report in found:
        shown = {name: bool(report[name]) if name.startswith("files_of") else report[name] for name in expected}
        assert shown == expected
        assert report["arguments"] == ["--own", "1"]


def home(folder: Path) -> dict[str, str]:
    """An environment without the user's default config file."""
    return {"HF_HOME": str(folder / "home"), "HF_ZERO": ""}


def reports(done: Finished) -> list[dict[str, Any]]:
    """The workers' reports. They may share a line, because ranks write concurrently."""
    decoder = json.JSONDecoder()
    return [decoder.raw_decode(done.output, match.end())[0] for match in re.finditer(r"REPORT (?=\{)", done.output)]


def test_every_documented_flag_and_field_is_in_the_table() -> None:
    """accelerate's own lists: its parser's group, and the output of its questionnaire."""
    rows = {row.name for case in CASES for row in case.rows}
    group = next(g for g in cli.launch_command_parser()._action_groups if g.title == "DeepSpeed Arguments")
    assert {action.dest for action in group._group_actions} - MULTI_MACHINE <= rows
    fields = set(re.findall(r'deepspeed_config\["(\w+)"\]', inspect.getsource(cluster)))
    assert len(fields) > 10
    of_files = {row.name for case in CASES if case.machine for row in case.rows} | {"deepspeed_config_file"}
    assert fields - MULTI_MACHINE <= of_files


@pytest.fixture
def validated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """accelerate's result for a command line, before it starts anything."""
    monkeypatch.setenv("HF_ZERO", "")
    monkeypatch.setattr(cli, "default_config_file", str(tmp_path / "none.yaml"))

    def arguments(*words: str) -> Any:
        return cli._validate_launch_command(cli.launch_command_parser().parse_args([*words, "script.py"]))[0]

    return arguments


@pytest.mark.parametrize("help_for", [(), ("--use_hf_zero",), ("--use_deepspeed",)])
def test_the_flag_is_in_the_help(
    help_for: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["accelerate", "launch", *help_for, "--help"])
    with pytest.raises(SystemExit):
        cli.launch_command_parser().parse_args([*help_for, "--help"])
    text = capsys.readouterr().out
    group = text[text.index("\nhf_zero Arguments:") :]
    assert "--use_hf_zero" in group and "ZeRO stages 0 to 3 without" in group
    assert "\nDeepSpeed Arguments:" in text
    if help_for:
        assert "\nFSDP Arguments:" not in text


def test_everything_that_is_wrong_is_named_at_once(validated: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError) as raised:
        validated(
            "--use_hf_zero", "--use_fsdp", "--use_megatron_lm", "--multi_gpu", "--tpu", "--use_parallelism_config",
            "--zero_stage=7", "--offload_optimizer_device=disk", "--offload_param_device=nvme",
            "--gradient_accumulation_steps=0", "--gradient_clipping=-1", "--zero3_init_flag=maybe",
        )  # fmt: skip
    assert {problem.path for problem in raised.value.problems} == {
        "--use_fsdp", "--use_megatron_lm", "--multi_gpu", "--tpu", "--use_parallelism_config", "--zero_stage",
        "--offload_optimizer_device", "--offload_param_device", "--gradient_accumulation_steps",
        "--gradient_clipping", "--zero3_init_flag",
    }  # fmt: skip
    assert "add --offload_param_nvme_path" in str(raised.value)


DROPPED = (
    ("--zero_stage=3", {"zero_optimization": {"stage": 2}}, "zero_optimization.stage = 2"),
    ("--zero_stage=3", {"zero_optimization": True}, "zero_optimization.stage = 1"),
    ("--zero_stage=3", {"zero_optimization": {}}, "zero_optimization.stage = (absent)"),
    ("--offload_optimizer_device=cpu", {"zero_optimization": {"stage": 2}}, "offload_optimizer.device = (absent)"),
    ("--offload_param_device=none", {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}, "'cpu'"),
    (
        "--offload_optimizer_nvme_path=/drive",
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/other"}}},
        "nvme_path = '/other'",
    ),
    ("--gradient_clipping=0.5", {"zero_optimization": {"stage": 2}, "gradient_clipping": 2.0}, "= 2.0"),
    ("--gradient_accumulation_steps=4", {"gradient_accumulation_steps": 2}, "gradient_accumulation_steps = 2"),
    (
        "--zero3_save_16bit_model=true",
        {"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": False}},
        "on_model_save = false",
    ),
)


@pytest.mark.parametrize(("word", "ds", "other"), DROPPED)
def test_a_flag_that_the_config_file_overrides_is_an_error(
    word: str, ds: dict[str, Any], other: str, validated: Callable[..., Any], tmp_path: Path
) -> None:
    """`accelerate launch --zero_stage 3` beside a ds.json with stage 2 trained at stage 2 without a word: accelerate
    takes a flag only where the file has "auto", and drops it otherwise."""
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(ds, indent=1))
    with pytest.raises(ConfigError) as raised:
        validated("--use_hf_zero", f"--deepspeed_config_file={path}", word)
    (problem,) = raised.value.problems
    assert problem.path == word.partition("=")[0]
    assert other in str(problem) and "ds.json" in str(problem)


def test_a_flag_that_the_config_file_takes_or_repeats_is_accepted(
    validated: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "ds.json"
    zero = {"stage": 3, "offload_optimizer": {"device": "auto"}, "stage3_gather_16bit_weights_on_model_save": "true"}
    path.write_text(json.dumps({"zero_optimization": zero}))
    arguments = validated(
        "--use_hf_zero", f"--deepspeed_config_file={path}", "--zero_stage=3", "--offload_optimizer_device=CPU",
        "--offload_param_device=none", "--offload_param_nvme_path=none", "--gradient_clipping=0.5",
        "--gradient_accumulation_steps=auto", "--zero3_save_16bit_model=true",
    )  # fmt: skip
    assert arguments.zero_stage == 3


def test_a_folder_that_no_device_uses_is_said(validated: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    """`--offload_optimizer_nvme_path /drive` with `--offload_optimizer_device cpu` was dropped without a word."""
    validated("--use_hf_zero", "--offload_optimizer_device=cpu", "--offload_optimizer_nvme_path=/drive")
    assert "--offload_optimizer_nvme_path /drive has no effect with --offload_optimizer_device cpu" in caplog.text


def test_a_config_file_that_is_not_there_is_named_before_anything_starts(validated: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"there is no such file"):
        validated("--use_hf_zero", "--deepspeed_config_file=nowhere/ds.json")


def test_a_number_that_is_none_says_what_is_allowed(
    validated: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        validated("--use_hf_zero", "--gradient_accumulation_steps=some")
    assert "invalid int or auto value: 'some'" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["FSDP", "MEGATRON_LM"])
def test_a_file_that_wants_two_ways_to_train_is_refused(
    kind: str, validated: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "machine.yaml"
    path.write_text(f"use_hf_zero: true\ndistributed_type: {kind}\nnum_processes: 2\n")
    with pytest.raises(ConfigError, match=f"distributed_type = '{kind}'"):
        validated("--config_file", str(path))


def test_a_file_that_says_no_is_as_one_without(validated: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "machine.yaml"
    path.write_text("use_hf_zero: false\ndistributed_type: 'NO'\nnum_processes: 1\n")
    assert not validated("--config_file", str(path)).use_deepspeed


def test_without_the_flag_accelerate_is_as_it_was(validated: Callable[..., Any]) -> None:
    arguments = validated("--cpu", "--num_processes=2")
    assert arguments.cpu and not arguments.use_deepspeed
    with pytest.raises(ValueError, match="You can only use one of"):
        validated("--cpu", "--use_deepspeed")


@pytest.mark.parametrize("words", [("--deepspeed_exclusion_filter=b:1",), ("--deepspeed_inclusion_filter=a:0@b",), ()])
@pytest.mark.parametrize("launcher", ["pdsh", "openmpi", "mvapich", "mpich", "slurm", "nossh"])
def test_several_machines_are_left_to_our_own_launcher(
    launcher: str, words: tuple[str, ...], validated: Callable[..., Any]
) -> None:
    arguments = validated(
        "--use_hf_zero", "--num_machines=2", "--num_processes=4", "--machine_rank=0", "--deepspeed_hostfile=hosts",
        f"--deepspeed_multinode_launcher={launcher}", "--main_process_ip=a", "--main_process_port=29507", *words,
    )  # fmt: skip
    arguments.deepspeed_fields_from_accelerate_config = ""
    command, environment = cli.prepare_deepspeed_cmd_env(arguments)
    assert command[:6] == [sys.executable, "-m", "hf_zero", "launch", "--hostfile", "hosts"]
    how = ["--node_rank", "0", "--no_ssh"] if launcher == "nossh" else ["--no_local_rank", "--launcher", launcher]
    where = re.sub(r".*_(\w\w\wlu)sion_filter=", r"--\1de ", words[0]).split() if words else ["--num_gpus", "2"]
    expected = [*how, *where, "--master_addr", "a", "--master_port", "29507", "script.py"]
    assert command[6:] == expected
    assert environment["HF_ZERO"] == "1"


def test_the_flag_wins_over_a_real_deepspeed(wheel: Path, tmp_path: Path) -> None:
    """Both ways of starting the launcher; `python -m` runs a module's code without importing it."""
    site = Site.empty(tmp_path / "site").unpack(wheel).borrow_libraries().add_real_deepspeed()
    script = tmp_path / "who.py"
    script.write_text("import deepspeed\nprint('WHO', deepspeed.__file__)\n")
    words = (
        "-m",
        "accelerate.commands.launch",
        "--use_hf_zero",
        "--num_processes=1",
        f"--main_process_port={a_port()}",
    )
    done = site.run_args(*words, str(script), cwd=tmp_path, HF_HOME=str(tmp_path))
    assert re.search(r"WHO .*hf_zero/integration/deepspeed", done.stdout), done.stdout + done.stderr


@pytest.mark.slow
def test_the_other_commands_of_accelerate_go_on(tmp_path: Path) -> None:
    path = tmp_path / "machine.yaml"
    path.write_text("use_hf_zero: true\nnum_processes: 2\nuse_cpu: true\ndeepspeed_config:\n  zero_stage: 1\n")
    program = accelerate()[:2]
    environment = home(tmp_path)
    shown = launch(Path("env"), ["--config_file", path], launcher=program, environment=environment).check()
    assert "'use_hf_zero': True" in shown.output and "distributed_type: DEEPSPEED" in shown.output
    launch(Path("config"), ["update", "--config_file", path], launcher=program, environment=environment).check()
    assert yaml.safe_load(path.read_text())["deepspeed_config"]["use_hf_zero"] is True
    written = tmp_path / "default.yaml"
    launch(Path("config"), ["default", "--config_file", written], launcher=program, environment=environment).check()
    assert yaml.safe_load(written.read_text())["distributed_type"] == "NO"


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_accelerates_own_test_passes(stage: int, tmp_path: Path) -> None:
    """`accelerate test` starts `accelerate-launch` on this script."""
    from accelerate import test_utils

    script = Path(inspect.getfile(test_utils)).parent / "scripts" / "test_script.py"
    path = tmp_path / "machine.yaml"
    path.write_text(f"use_hf_zero: true\nnum_processes: 2\nuse_cpu: true\ndeepspeed_config:\n  zero_stage: {stage}\n")
    launcher = accelerate("--config_file", path)
    done = launch(script, [], launcher=launcher, environment=home(tmp_path), timeout_s=TIMEOUT_S).check()
    assert "Shuffled central dataloader passing." in done.output
