"""Valid and invalid combinations with expert parallelism, errors with reasons, and the resulting groups."""

from __future__ import annotations

from typing import Any

import deepspeed
import pytest
import torch
from torch import nn

from hf_zero.comm.mesh import Dimension, Hosts, Mesh, consecutive
from hf_zero.config import ConfigError, resolve
from hf_zero.extras.experts import ExpertParallel
from tests.experts.training import engine_of, model_of
from tests.support.ranks import run_ranks

BASE: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}


def _resolved(section: dict[str, Any], world: int = 4, **more: Any) -> Any:
    return resolve({**BASE, "expert_parallel": section, **more}, world_size=world)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"zero_optimization": {"stage": 0}}, "stage 0"),
        ({"hf_zero": {"shard_group": 1}}, "a shard group of 1: .* 1 != n x 2"),
        ({"hf_zero": {"shard_group": 2}, "sequence_parallel_size": 2}, "a shard group of 2: .* 2 != n x 4"),
    ],
)
def test_what_does_not_go_together_is_refused(more: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=f"expert parallelism is not supported with .*{named}"):
        _resolved({"enabled": True, "autoep_size": 2}, **more)
    assert _resolved({"enabled": False, "autoep_size": 2}, **more).section(ExpertParallel).width == 1


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("score_func", "sigmoid"),
        ("score_apply", "pre"),
        ("top_k", 1),
        ("route_norm", True),
        ("route_scale", 2.0),
        ("routed_scaling_factor", 2.5),
        ("num_expert_groups", 2),
        ("num_limited_groups", 1),
        ("load_balance_coeff", 0.1),
        ("comm_backend", "deepep"),
    ],
)
def test_keys_that_would_change_results_are_refused(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=key):
        _resolved({"enabled": True, "autoep_size": 2, key: value})


def _group(autoep: int, cut: int, tensor: int) -> int:
    """Ranks per expert group."""
    section = {"enabled": True, "autoep_size": autoep, "expert_tensor_parallel_size": cut}
    told = _resolved(section, tensor_parallel={"autotp_size": tensor})
    return int(told.section(ExpertParallel).over(told.tensor_size))


def test_ranks_of_tensor_groups_are_among_those_that_hold_all_experts() -> None:
    """As in DeepSpeed: autoep_size x expert_tensor_parallel_size ranks hold all experts, with or without tensor groups
    among them."""
    assert [_group(4, 1, 1), _group(4, 1, 2), _group(2, 2, 2), _group(2, 1, 2), _group(1, 1, 2)] == [4, 2, 2, 1, 1]
    with pytest.raises(ConfigError, match=r"expert_tensor_parallel_size = ranks per tensor group .* 2 != 1"):
        _group(2, 2, 1)
    with pytest.raises(ConfigError, match=r"= n x ranks per tensor group does not hold: 3 != n x 2"):
        _group(3, 1, 2)


def test_a_tensor_group_that_holds_all_experts_sends_no_tokens() -> None:
    told = _resolved({"enabled": True, "autoep_size": 2}, tensor_parallel={"autotp_size": 2})
    assert any("no tokens are sent" in str(warning) for warning in (*told.warnings, *told.notes))


def test_all_other_keys_are_accepted() -> None:
    names = {"preset_model": "mixtral", "moe_layer_pattern": "mlp", "router_pattern": "gate", "expert_w3": None}
    told = _resolved({"enabled": True, "autoep_size": 2, "use_grouped_mm": False, "gate_up_impl": "fused", **names})
    assert told.section(ExpertParallel).width == 2
    with pytest.raises(ConfigError, match="autoep_sise"):
        _resolved({"enabled": True, "autoep_sise": 2})


def test_parts_have_a_mesh_of_their_own() -> None:
    expert = Dimension(name="expert", groups=consecutive(range(8), 4), samples="own", weights="mixed")
    mesh = Mesh.of(Hosts.one(8), dimensions=[expert])
    assert mesh.shard == mesh.data == mesh.same_weights == (tuple(range(8)),)
    inner = mesh.of_parts()
    assert inner is not None and inner.shard == inner.same_weights == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert inner.whole_model == ((0, 1, 2, 3), (4, 5, 6, 7)) and mesh.whole_model == tuple((rank,) for rank in range(8))
    assert Mesh.of(Hosts.one(8)).of_parts() is None


class _Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)


def test_copies_of_states_each_have_all_parts() -> None:
    expert = Dimension(name="expert", groups=consecutive(range(8), 2), samples="own", weights="mixed")
    mesh = Mesh.of(Hosts.one(8), 4, dimensions=[expert])
    inner = mesh.of_parts()
    assert inner is not None and inner.shard == ((0, 2), (4, 6), (1, 3), (5, 7))
    assert set(inner.replicate) == set(mesh.replicate) == {(0, 4), (1, 5), (2, 6), (3, 7)}
    larger = Dimension(name="expert", groups=consecutive(range(8), 8), samples="own", weights="mixed")
    with pytest.raises(ValueError, match=r"ranks \(0, 1, .* not all in the shard group \(0, 1, 2, 3\)"):
        Mesh.of(Hosts.one(8), 4, dimensions=[larger]).of_parts()


def _refused(rank: int) -> list[str]:
    """Errors that depend on the model, the optimizer or the number of ranks."""
    section = {"enabled": True, "autoep_size": 2}
    lamb = {"optimizer": {"type": "Lamb", "params": {"lr": 1e-3}}}
    said = []
    for model, size, more in (
        (_Plain(), 2, {}),
        (model_of("mixtral"), 3, {}),
        (model_of("mixtral"), 2, lamb),
    ):
        config = {**BASE, "zero_optimization": {"stage": 2}, "expert_parallel": section | {"autoep_size": size}, **more}
        options: dict[str, Any] = {} if more else {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
        try:
            deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config, **options)
            said.append("nothing")
        except ValueError as error:
            said.append(str(error))
    engine = engine_of(model_of("mixtral"), 2, 2)
    groups = deepspeed.utils.groups
    told = groups._get_expert_parallel_world_size("ep_size_2"), groups._get_expert_data_parallel_world_size("ep_size_2")
    said.append(f"{told} {engine.module.model.layers[0].mlp.experts.gate_up_proj.allreduce}")
    return said


def test_what_the_model_tells_is_refused() -> None:
    plain, uneven, lamb, groups = run_ranks(_refused, 2)[0]
    assert "has no packed experts" in plain and "modules of single experts are not supported" in plain
    assert "world size = data ranks x expert_parallel.autoep_size does not hold" in uneven
    assert "Lamb" in lamb and "ranks hold shards of different parameters" in lamb
    assert groups == "(2, 1) False"
