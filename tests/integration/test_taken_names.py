"""All names exist that transformers, accelerate, peft, trl, datasets, lightning, diffusers and others use."""

from __future__ import annotations

import importlib
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import hf_zero
from tests.support.taken_names import TABLE, sources, taken

INSTALLED = ("accelerate", "datasets", "peft", "transformers", "trl")


def resolve(name: str) -> Any:
    """Resolves by import or attribute; raises AttributeError otherwise. Unsupported names count as existing."""
    first, *rest = name.split(".")
    found, path = importlib.import_module(first), first
    for part in rest:
        path = f"{path}.{part}"
        try:
            # Before the attribute: deepspeed.utils.z3_leaf_module is a function as well as a module of that name.
            found = importlib.import_module(path)
        except ImportError:
            found = getattr(found, part)
    return found


def missing(names: set[str]) -> list[str]:
    lost = []
    for name in sorted(names):
        try:
            resolve(name)
        except AttributeError:
            lost.append(name)
    return lost


def test_nothing_is_missing_that_the_libraries_and_their_tests_take() -> None:
    """transformers' tests of this integration import deepspeed.ops.aio.AsyncIOBuilder in a decorator, and look it up in
    deepspeed.ops.__compatible_ops__. It did not exist, so that the whole test file failed at import."""
    hf_zero.install()
    assert not missing(set(json.loads(TABLE.read_text(encoding="utf-8"))))
    assert not missing({name for who in INSTALLED for name in installed(who, everything=False)})


@pytest.mark.slow
@pytest.mark.parametrize("who", INSTALLED)
def test_nothing_is_missing_that_this_version_takes(who: str) -> None:
    hf_zero.install()
    assert not missing(installed(who, everything=True))


def installed(who: str, *, everything: bool) -> set[str]:
    """Names that the installed version uses; without `everything` only from the files known to use some, for speed."""
    spec = find_spec(who)
    assert spec is not None and spec.submodule_search_locations
    home = Path(spec.submodule_search_locations[0])
    places = [home] if everything else [folder for part in _KNOWN.get(who, ()) if (folder := home / part).is_dir()]
    return {name for place in places for text in sources(place) for name in taken(text)}


_KNOWN = {
    "accelerate": ("utils", "test_utils", "commands"),
    "peft": ("utils",),
    "transformers": ("integrations", "generation"),
    "trl": ("models", "trainer"),
}


def test_what_works_without_an_operator_says_so() -> None:
    """Tests that require `async_io` or `cpu_adam` were skipped, although hf_zero implements both differently."""
    ops = importlib.import_module("deepspeed.ops")
    builders = importlib.import_module("deepspeed.ops.op_builder")
    aio = importlib.import_module("deepspeed.ops.aio")
    assert aio.AsyncIOBuilder is builders.AsyncIOBuilder
    works = {"AsyncIO", "CPUAdam", "CPUAdagrad", "CPULion", "FusedAdam", "FusedLamb", "FusedLion"}
    for name in works:
        assert ops.__compatible_ops__[getattr(builders, f"{name}Builder").NAME] is True
    for name in ("Inference", "Transformer", "EvoformerAttn", "FPQuantizer", "GDS"):
        assert ops.__compatible_ops__[getattr(builders, f"{name}Builder").NAME] is False


def test_names_of_checkpoint_files() -> None:
    utils = importlib.import_module("deepspeed.checkpoint.utils")
    assert utils.get_model_ckpt_name_for_rank("a", "00") == "a/mp_rank_00_model_states.pt"
    assert utils.get_zero_ckpt_name_for_rank("a", 3, 0) == "a/zero_pp_rank_3_mp_rank_00_optim_states.pt"
    assert utils.get_layer_ckpt_name_for_rank("a", "layer_01", 2) == "a/layer_01-model_02_model_states.pt"


def test_imports_and_chains_are_found_wherever_they_stand() -> None:
    text = """
import deepspeed.comm as dist
def f():
    from deepspeed.ops.adam import DeepSpeedCPUAdam as Adam
    import deepspeed
    dist.barrier(); Adam.step; deepspeed.zero.Init(); deepspeed.zero.Init = None
    from .deepspeed import other
"""
    assert taken(text) == {"deepspeed", "deepspeed.comm.barrier", "deepspeed.ops.adam.DeepSpeedCPUAdam.step",
                           "deepspeed.zero.Init"}  # fmt: skip
    assert taken("print 'deepspeed'") == set()
