"""The package named `deepspeed`: detected by Hugging Face, complete for supported parts, with errors for the rest."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from hf_zero.integration.names import SAME_MODULE, all_homes, with_homes
from tests.integration.sites import ROOT, Site
from tests.support import deepspeed_names
from tests.support.ranks import run_ranks

FRANK = "hf_zero answers as deepspeed here and has no {name!r}: docs/features.md"


def test_every_way_of_asking_whether_deepspeed_is_installed(full: Site) -> None:
    code = """
        import importlib.metadata as metadata, importlib.util as util
        import sys
        from packaging.version import Version
        from transformers.integrations.deepspeed import is_deepspeed_available as by_transformers
        from accelerate.utils import is_deepspeed_available as by_accelerate
        from accelerate.utils.versions import compare_versions
        from transformers.dependency_versions_check import dep_version_check
        dep_version_check("deepspeed")
        answer = {
            "transformers": by_transformers(), "accelerate": by_accelerate(),
            "spec": util.find_spec("deepspeed").name, "name": metadata.metadata("deepspeed")["Name"],
            "new enough": compare_versions("deepspeed", ">=", "0.18.2"),
            "by package": metadata.packages_distributions()["deepspeed"],
            "by scan": [d.version for d in metadata.distributions() if d.metadata["Name"] == "deepspeed"],
            "spelled": metadata.version("DeepSpeed") == str(Version(metadata.version("deepspeed"))),
            "asking loads": "deepspeed" in sys.modules,
        }
    """
    assert full.ask(code) == {
        "transformers": True,
        "accelerate": True,
        "spec": "deepspeed",
        "name": "deepspeed",
        "new enough": True,
        "by package": ["deepspeed"],
        "by scan": ["0.19.8+hf.zero"],
        "spelled": True,
        "asking loads": False,
    }


def test_pip_does_not_see_what_libraries_see() -> None:
    """`pip freeze` printed deepspeed==0.19.8+hf.zero, which is on no index, so that requirements files and images based
    on it could not be installed. `pip install deepspeed` was already satisfied "in <memory>", and `pip uninstall
    deepspeed` found something that it could not remove."""

    def pip(*words: str) -> str:
        command = [sys.executable, "-m", "pip", *words, "--disable-pip-version-check"]
        done = subprocess.run(command, capture_output=True, text=True)
        return (done.stdout + done.stderr).lower()

    frozen = pip("freeze")
    assert "accelerate==" in frozen
    assert "deepspeed" not in frozen
    assert "no matching distribution found for deepspeed" in pip("install", "--no-index", "--dry-run", "deepspeed")
    assert "skipping deepspeed as it is not installed" in pip("uninstall", "-y", "deepspeed")


def test_modules_live_under_the_name_deepspeed(bare: Site) -> None:
    code = """
        import importlib.util, sys
        import deepspeed, deepspeed.runtime.lr_schedules
        answer = [sorted(name for name in sys.modules if name.startswith("hf_zero.integration.deepspeed")),
                  deepspeed.runtime.lr_schedules.__name__, deepspeed.__spec__.name,
                  importlib.util.find_spec("deepspeed") is deepspeed.__spec__]
    """
    assert bare.ask(code) == [[], "deepspeed.runtime.lr_schedules", "deepspeed", True]


MODULES = deepspeed_names.MODULES.read_text(encoding="utf-8").split()


def test_every_module_of_deepspeed_imports_at_once_and_loads_nothing(bare: Site) -> None:
    """All 750 in one process, without torch, and without touching a GPU, compiler or process group."""
    code = f"""
        import importlib, importlib.util, sys
        wanted = open({str(deepspeed_names.MODULES)!r}).read().split()
        broken = [name for name in wanted if importlib.import_module("deepspeed." + name) is None]
        specs = [name for name in wanted if importlib.util.find_spec("deepspeed." + name) is None]
        answer = [len(wanted) > 700, broken, specs, "torch" in sys.modules, "json" in sys.modules]
    """
    assert bare.ask(code) == [True, [], [], False, True]


def run_walk(rank: int) -> tuple[int, list[str]]:
    """(number of names, names that cannot be resolved)."""
    names, broken = 0, []
    for module in [
        importlib.import_module(f"deepspeed.{n}".rstrip(".")) for n in {*MODULES, *all_homes(), *SAME_MODULE}
    ]:
        for name in dir(module):
            names += 1
            try:
                getattr(module, name)
            except Exception as error:  # noqa: BLE001 (whatever it is, the name is not there)
                broken.append(f"{module.__name__}.{name}: {error!r}")
    return names, broken


def test_every_name_of_the_alias_exists_and_comes_from_its_home() -> None:
    """Walks the alias by `dir`, so that a moved module or a misspelled name in a table fails here."""
    ((names, broken),) = run_ranks(run_walk, 1, init=False)
    assert names > 5000 and broken == []


@pytest.mark.oracle
def test_the_tables_of_names_are_those_of_the_real_package(oracle: str) -> None:
    where = "import importlib.util; print(importlib.util.find_spec('deepspeed').origin)"
    done = subprocess.run([oracle, "-c", where], capture_output=True, text=True, env={"HF_ZERO": "0"}, check=True)
    for path, text in deepspeed_names.texts(Path(done.stdout.strip()).parent).items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run python -m tests.support.deepspeed_names"


def test_the_table_says_of_borrowed_names_only_what_no_rule_does() -> None:
    """A name that one module alone defines comes from there: half of the table repeated this, name by name."""
    text = deepspeed_names.NAMES.read_text(encoding="utf-8")
    table = json.loads(text)
    assert deepspeed_names.write_lines(deepspeed_names.packed(with_homes(table))) == text
    assert with_homes(table)[""]["borrowed"]["DeepSpeedEngine"] == "runtime.engine"
    small = {"a": {"classes": "X Y"}, "b": {"values": {"Y": 1}}, "c": {"uses": "X", "borrowed": {"b": "Y"}}}
    assert with_homes(small)["c"] == {"borrowed": {"X": "a", "Y": "b"}}


def test_names_are_the_objects_of_hf_zero_and_importing_them_starts_no_process(full: Site) -> None:
    code = """
        import sys
        noted = []
        wanted = ("subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "socket.")
        sys.addaudithook(lambda event, args: noted.append(event) if event.startswith(wanted) else None)
        from deepspeed import DeepSpeedEngine, comm
        started = [event for event in noted if event != "socket.gethostname"]
        import deepspeed, hf_zero, hf_zero.comm, hf_zero.api.engine, hf_zero.schedules, torch.distributed
        from deepspeed.utils import logger
        same = [
            deepspeed.initialize is hf_zero.initialize, issubclass(DeepSpeedEngine, hf_zero.ZeroEngine),
            isinstance(DeepSpeedEngine, type), deepspeed.init_distributed is comm.init_distributed,
            comm.all_reduce is torch.distributed.all_reduce, comm.get_rank is hf_zero.comm.get_rank,
            deepspeed.runtime.lr_schedules.VALID_LR_SCHEDULES is hf_zero.schedules.VALID_LR_SCHEDULES,
            logger.name == "hf_zero", comm.is_initialized() is False,
        ]
        answer = [started, same]
    """
    assert full.ask(code) == [[], [True] * 9]


MISSING = ["no_such_thing", "elastic"]


@pytest.mark.parametrize("name", MISSING)
def test_a_missing_name_says_who_answers(bare: Site, name: str) -> None:
    code = f"""
        import deepspeed
        try:
            deepspeed.{name}
        except AttributeError as error:
            by_attribute = str(error)
        try:
            from deepspeed import {name}
        except ImportError as error:
            by_import = str(error)
        answer = [by_attribute, by_import, hasattr(deepspeed, {name!r})]
    """
    by_attribute, by_import, there = bare.ask(code)
    expected = FRANK.format(name=f"deepspeed.{name}")
    assert by_attribute.startswith(expected) and by_import.startswith(expected) and there is False


def run_stage_3_names(rank: int) -> dict[str, Any]:
    import deepspeed
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
    from deepspeed.utils import safe_get_full_fp32_param, set_z3_leaf_modules

    zero, model = deepspeed.zero, nn.Sequential(nn.Linear(2, 2))
    with zero.GatheredParameters(model.parameters(), modifier_rank=0) as nothing, zero.Init(enabled=False):
        model[0].weight.data.fill_(1)  # type: ignore[union-attr, operator]
    return {
        "contexts": [hasattr(kind, "__enter__") for kind in (zero.Init, zero.GatheredParameters)],
        "nothing": nothing,
        "statuses": {status.name: status.value for status in ZeroParamStatus},
        "same": ZeroParamStatus is zero.ZeroParamStatus,
        "leaves": [type(found).__name__ for found in set_z3_leaf_modules(model, [nn.Linear])],
        "untrained": safe_get_full_fp32_param(model[0].weight),
        "external": [callable(zero.register_external_parameter), callable(zero.unregister_external_parameter)],
    }


def test_stage_3_names_are_what_they_are_called() -> None:
    """Imports of transformers, accelerate, trl and peft from these modules, in their forms."""
    (found,) = run_ranks(run_stage_3_names, 1, init=False)
    assert found == {
        "contexts": [True, True],
        "nothing": None,
        "statuses": {"AVAILABLE": 1, "NOT_AVAILABLE": 2, "INFLIGHT": 3},
        "same": True,
        "leaves": ["Linear"],
        "untrained": None,
        "external": [True, True],
    }


@pytest.mark.parametrize("module", ["nothing", "runtime.zero.stage4", "moe.nothing.at_all"])
def test_a_missing_module_says_who_answers(bare: Site, module: str) -> None:
    done = bare.run(f"import deepspeed.{module}")
    missing = module.removesuffix(".at_all")
    assert "ModuleNotFoundError: " + FRANK.format(name=f"deepspeed.{missing}") in done.stderr


def test_errors_are_ordinary_import_errors(bare: Site) -> None:
    code = """
        try:
            import deepspeed.inference.v9
        except ModuleNotFoundError as error:
            answer = error.name
    """
    assert bare.ask(code) == "hf_zero.integration.deepspeed.inference.v9"


def test_a_name_can_be_replaced_by_user_code(bare: Site) -> None:
    code = """
        import deepspeed.utils
        first = deepspeed.utils.logger
        deepspeed.utils.logger = "mine"
        from deepspeed.utils import logger
        answer = [first.name, logger]
    """
    assert bare.ask(code) == ["hf_zero", "mine"]


def test_the_feature_page_that_errors_name_exists() -> None:
    assert Path(ROOT, "docs", "features.md").is_file()
