"""1-bit Adam, 0/1 Adam, 1-bit LAMB: against their formulas in float64, on shards, after resuming, and in bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_zero import initialize
from hf_zero.comm import ledger
from hf_zero.comm.collectives import LoneCollectives
from hf_zero.config import ConfigError, resolve
from hf_zero.extras.one_bit.compressing import CompressedMean
from hf_zero.extras.one_bit.lamb import OneBitLamb
from hf_zero.extras.one_bit.zero_one_adam import OneBitAdam, ZeroOneAdam
from hf_zero.layout import Interval
from tests.optim import one_bit
from tests.optim.one_bit import advance, gradients, run_engine, settings, start
from tests.support.models import stack, tiny_llama, token_rows
from tests.support.ranks import run_each, run_ranks

STEPS = 200
ADAM = {"lr": 0.01, "freeze_step": 50, "weight_decay": 0.05}
ZERO_ONE = {
    "lr": 0.01,
    "var_freeze_step": 90,
    "var_update_scaler": 8,
    "local_step_scaler": 30,
    "local_step_clipper": 4,
    "weight_decay": 0.05,
}
LAMB = {"lr": 0.01, "freeze_step": 50, "weight_decay": 0.05, "coeff_beta": 0.8, "factor_threshold": 0.05}
CASES: list[Any] = [
    ("OneBitAdam", ADAM, one_bit.one_bit_adam, 1, 3, 80),
    ("ZeroOneAdam", ZERO_ONE, one_bit.zero_one_adam, 0, 2, 120),
    ("OneBitLamb", LAMB, one_bit.one_bit_lamb, 1, 3, 120),
    *(
        pytest.param(*case, STEPS, marks=pytest.mark.slow)
        for case in (
            ("OneBitAdam", ADAM, one_bit.one_bit_adam, 1, 3),
            ("OneBitAdam", ADAM, one_bit.one_bit_adam, 0, 1),
            ("OneBitAdam", ADAM, one_bit.one_bit_adam, 0, 2),
            ("OneBitAdam", ADAM, one_bit.one_bit_adam, 1, 2),
            ("ZeroOneAdam", ZERO_ONE, one_bit.zero_one_adam, 0, 2),
            ("ZeroOneAdam", ZERO_ONE, one_bit.zero_one_adam, 0, 3),
            ("OneBitLamb", LAMB, one_bit.one_bit_lamb, 0, 1),
            ("OneBitLamb", LAMB, one_bit.one_bit_lamb, 0, 2),
            ("OneBitLamb", LAMB, one_bit.one_bit_lamb, 1, 3),
            ("OneBitLamb", {**LAMB, "weight_decay": 0.0}, one_bit.one_bit_lamb, 1, 2),
        )
    ),
]


@pytest.mark.parametrize(("kind", "params", "formulas", "stage", "world", "steps"), CASES)
def test_many_steps_agree_with_the_formulas(
    kind: str, params: dict[str, Any], formulas: Any, stage: int, world: int, steps: int
) -> None:
    """Shard and chunk boundaries divide tensors; every rank ends with the same weights."""
    results = run_ranks(run_engine, world, kind, params, stage, steps)
    expected = formulas(results[0][1], world, steps, **params)
    synchronised = kind != "ZeroOneAdam" or steps % params["local_step_clipper"] == 0
    for ours, _ in results if synchronised else results[:1]:
        for mine, theirs, begun in zip(ours, expected, one_bit.weights(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-9)
            assert float((mine - begun).norm()) > 0.1


def saved_and_resumed(rank: int, kind: str, params: dict[str, Any], folder: str) -> list[tuple[Tensor, Tensor, Tensor]]:
    """By bucket: the error at the save; momentum plus error one update later, uninterrupted and resumed."""
    steps = list(gradients(rank, 26))
    engine, other = start(settings(kind, params, 1)), start(settings(kind, params, 1))
    advance(engine, steps[:25])
    engine.save_checkpoint(folder)
    owed = [mean.error_feedback() for mean in engine.optimizer.updater._means.values()]
    other.load_checkpoint(folder)
    sums = []
    for candidate in (engine, other):
        advance(candidate, steps[25:])
        updater = candidate.optimizer.updater
        sums.append([updater.moment(sub_group) + mean.error_feedback() for sub_group, mean in updater._means.items()])
    return list(zip(owed, *sums, strict=True))


@pytest.mark.parametrize(
    ("kind", "params"), [("OneBitAdam", {**ADAM, "freeze_step": 10}), ("OneBitLamb", {**LAMB, "freeze_step": 10})]
)
def test_what_is_owed_goes_through_a_checkpoint(kind: str, params: dict[str, Any], tmp_path: Path) -> None:
    """DeepSpeed drops the errors when loading. Here the sum of all ranks' errors is saved, and the first ranks get it.

    A message plus its new error is the exact mean plus the old error, however the ranks round.
    """
    for line in run_ranks(saved_and_resumed, 2, kind, params, str(tmp_path)):
        for owed, uninterrupted, resumed in line:
            assert float(owed.norm()) > 0.01
            torch.testing.assert_close(resumed, uninterrupted, rtol=1e-5, atol=1e-6)


def continued(rank: int, folder: str, stage: int) -> tuple[int, bool, float, list[float]]:
    """(updates, whether gradients stay local, squares of the errors after loading, norms of the weights)."""
    engine = start(settings("OneBitAdam", {**ADAM, "freeze_step": 10}, stage))
    engine.load_checkpoint(folder)
    updater = engine.optimizer.updater
    owed = sum(float(updater.state_of(shard)["error_feedback"].norm() ** 2) for shard in updater.sub_groups)
    advance(engine, list(gradients(rank, 3)))
    weights = [float(tensor.detach().norm()) for tensor in engine.module.tensors]
    return updater.num_updates, updater.takes_local_gradients, owed, weights


def saved(rank: int, folder: str) -> float:
    engine = start(settings("OneBitAdam", {**ADAM, "freeze_step": 10}, 1))
    advance(engine, list(gradients(rank, 20)))
    engine.save_checkpoint(folder)
    return sum(float(mean.error_feedback().norm() ** 2) for mean in engine.optimizer.updater._means.values())


def test_a_resume_on_other_ranks_stays_in_its_phase_and_owes_the_same(tmp_path: Path) -> None:
    owed, _ = run_ranks(saved, 2, str(tmp_path))
    for stage, world in ((0, 2), (1, 3)):
        results = run_ranks(continued, world, str(tmp_path), stage)
        for updates, compresses, _, weights in results:
            assert updates == 23 and compresses and weights == results[0][3]
        found = sum(result[2] for result in results) / (1 if stage else world)
        assert found == pytest.approx(owed)


def counted(rank: int, kind: str, params: dict[str, Any], stage: int) -> list[dict[tuple[str, str], int]]:
    engine = start(settings(kind, params, stage))
    found = []
    for wanted in gradients(rank, 12):
        ledger.reset()
        advance(engine, [wanted])
        found.append({key: tally.num_bytes for key, tally in ledger.tallies.items() if key[0] in ("backward", "step")})
    return found


def test_bytes_on_the_wire() -> None:
    """First exact gradients, then two bits per element and a scale per tensor; stage 1 still gathers weights."""
    numel, params = 192 + 64, {**ADAM, "freeze_step": 6}
    for stage, world in ((0, 2), (1, 2)):
        (steps, _) = run_ranks(counted, world, "OneBitAdam", params, stage)
        reduction = "reduce_scatter" if stage else "all_reduce"
        assert steps[0]["backward", reduction] >= 8 * 111, "fp64, with the padding"
        after = steps[11]
        assert ("backward", reduction) not in after
        signs = after["step", "all_to_all"]
        assert signs < steps[0]["backward", reduction] / 4 and numel / 8 <= signs + 111
        if stage == 0:
            assert sum(after.values()) < sum(steps[0].values()) / 4


def test_zero_one_adam_reduces_ever_more_seldom_and_then_only_synchronises() -> None:
    params = {"var_freeze_step": 8, "var_update_scaler": 2, "local_step_scaler": 1, "local_step_clipper": 2}
    (steps, _) = run_ranks(counted, 2, "ZeroOneAdam", params, 0)
    kinds = [
        "exact" if ("backward", "all_reduce") in s else "bits" if ("step", "all_to_all") in s else "-" for s in steps
    ]
    # Updates 1 and 2 change the variance; then every second one does, twice; then every fourth. 9 to 12 are local.
    assert kinds == ["exact", "exact", "bits", "exact", "bits", "exact", "bits", "exact", "bits", "bits", "-", "bits"]


def some_unused(rank: int, stage: int) -> list[Tensor]:
    """Tensor 4 gets its first gradient after warm-up, tensor 3 none on rank 1, tensor 0 none at all in some steps."""
    engine = start(settings("OneBitAdam", {**ADAM, "freeze_step": 5, "weight_decay": 0.0}, stage))
    for number, wanted in enumerate(gradients(rank, 20)):
        given: list[Tensor | None] = list(wanted)
        given[4] = wanted[4] if number >= 10 else None
        given[3] = None if rank else wanted[3]
        given[0] = None if 7 < number < 12 else wanted[0]
        before = engine.module.tensors[0].detach().clone()
        advance(engine, [given])
        assert torch.equal(before, engine.module.tensors[0].detach()) == (given[0] is None)
    return [tensor.detach().clone() for tensor in engine.module.tensors]


@pytest.mark.parametrize("stage", [0, 1])
def test_unused_parameters_and_elements_without_variance_keep_still(stage: int) -> None:
    """A bit is never 0: divided by the root of a zero variance, it would move the weight by s / eps."""
    results = run_ranks(some_unused, 2, stage)
    for weights in results:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(weights, results[0], strict=True))
        assert torch.equal(weights[4], one_bit.weights()[4])
        assert not torch.equal(weights[3], one_bit.weights()[3])


def norms(rank: int, wrong: bool) -> tuple[float, bool, float]:
    """After warm-up: the norm of the step, whether it was applied, and how far it went."""
    config = settings("OneBitAdam", {"lr": 0.01, "freeze_step": 2}, 0, gradient_clipping=0.5)
    engine = start(config)
    steps = list(gradients(rank, 3))
    advance(engine, steps[:2])
    last = [torch.ones_like(grad) * (rank + 1) for grad in steps[2]]
    last[1][3] = float("nan") if wrong and rank == 1 else 1.0
    before = [tensor.detach().clone() for tensor in engine.module.tensors]
    advance(engine, [last])
    moved = sum(float((new.detach() - old).abs().sum()) for new, old in zip(engine.module.tensors, before, strict=True))
    return engine.get_global_grad_norm(), engine.was_step_applied(), moved


def test_norm_and_skip_without_a_reduced_gradient() -> None:
    numel = sum(weight.numel() for weight in one_bit.weights())
    for norm, applied, moved in run_ranks(norms, 2, False):
        squares = (numel + (4 * (numel - 1) + 1)) / 2
        assert norm == pytest.approx(squares**0.5) and applied and moved > 0
    for norm, applied, moved in run_ranks(norms, 2, True):
        assert norm == float("inf") and not applied and moved == 0


REFUSED: list[tuple[str, dict[str, Any], int, str]] = [
    ("OneBitAdam", {}, 2, "OneBitAdam works at stages 0 and 1, but this config has stage 2"),
    ("onebitlamb", {}, 3, "onebitlamb works at stages 0 and 1"),
    ("ZeroOneAdam", {}, 1, "ZeroOneAdam works at stage 0, but this config has stage 1"),
    ("OneBitAdam", {"freeze_step": -1}, 0, "must be at least 0"),
    ("OneBitAdam", {"bias_correction": True}, 0, "not part of the published algorithm"),
    ("OneBitAdam", {"eps_inside_sqrt": True}, 0, "not part of the published algorithm"),
    ("OneBitAdam", {"var_freeze_step": 3}, 0, "there is no such argument"),
    ("OneBitAdam", {"comm_backend_name": "carrier pigeon"}, 0, "it has no effect"),
    ("ZeroOneAdam", {"local_step_clipper": 0}, 0, "must be at least 1"),
    ("OneBitLamb", {"coeff_beta": 1.0}, 0, "must be at least 0 and below 1"),
    ("OneBitLamb", {"factor_min": 0}, 0, "must be above 0"),
    ("OneBitLamb", {"max_grad_norm": 1.0}, 0, "clipping is not an optimizer argument"),
]


@pytest.mark.parametrize(("kind", "params", "stage", "words"), REFUSED)
def test_refused_by_name(kind: str, params: dict[str, Any], stage: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve(settings(kind, params, stage), world_size=1)


def test_every_key_of_deepspeed_is_taken() -> None:
    common = {"lr": 0.1, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.1, "bias_correction": False}
    common |= {"eps_inside_sqrt": False, "amsgrad": False, "cuda_aware": False, "comm_backend_name": "nccl"}
    for kind, cls, own in (
        ("OneBitAdam", OneBitAdam, {"freeze_step": 7}),
        ("ZeroOneAdam", ZeroOneAdam, {key: value for key, value in ZERO_ONE.items() if "_s" in key}),
        ("OneBitLamb", OneBitLamb, dict.fromkeys(("max_coeff", "min_coeff", "coeff_beta"), 0.5)),
    ):
        engine = start(settings(kind, {**common, **own}, 0))
        optimizer = engine.optimizer.optimizer
        group = optimizer.param_groups[0]
        assert type(optimizer) is cls and group["betas"] == (0.8, 0.9) and group["eps"] == 1e-6
        assert all(getattr(optimizer, key, group.get(key)) == value for key, value in own.items() if key != "lr")
        engine.destroy()


def test_alone_and_with_wrong_arguments() -> None:
    parameters = [nn.Parameter(torch.ones(1))]
    with pytest.raises(RuntimeError, match="OneBitAdam only runs within the engine"):
        OneBitAdam(parameters).step()
    with pytest.raises(ValueError, match="0 < factor_min <= factor_max"):
        OneBitLamb(parameters, factor_min=5.0)
    with pytest.raises(ValueError, match="a group with 'exp_avg_mask' is not supported"):
        OneBitAdam([{"params": parameters, "exp_avg_mask": torch.ones(1)}])


def trained(rank: int, section: dict[str, Any], steps: int) -> tuple[float, int]:
    """(mean loss of the last steps, bytes of the last step) of a tiny Llama."""
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 0}, "optimizer": section}
    engine, _, _, _ = initialize(model=tiny_llama(), config=config)
    rows, losses = token_rows(512), []
    for step in range(steps):
        first = (8 * step + 4 * rank) % len(rows)
        ledger.reset()
        loss = engine(**stack(rows[first : first + 4])).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    phases = [tally.num_bytes for (phase, _), tally in ledger.tallies.items() if phase in ("backward", "step")]
    return sum(losses[-20:]) / 20, sum(phases)


@pytest.mark.slow  # its steps and bytes are compared by default, above
def test_it_learns_like_adam_with_a_fraction_of_the_bytes() -> None:
    adam, one_bit_adam = (
        {"type": "AdamW", "params": {"lr": 2e-3}},
        {"type": "OneBitAdam", "params": {"lr": 2e-3, "freeze_step": 40}},
    )
    (exact, _), (compressed, _) = run_each(trained, 2, [(section, 120) for section in (adam, one_bit_adam)])
    assert exact[0] < 2.0 and compressed[0] <= 1.02 * exact[0], "the untrained model has a loss of 4.9"
    assert compressed[1] * 4 <= exact[1]


def test_the_compressed_mean_keeps_signs_and_owes_the_rest() -> None:
    mean = CompressedMean(LoneCollectives(), torch.empty(16), [Interval(0, 5), Interval(8, 16)])
    flat = torch.zeros(16)
    flat[:5] = torch.tensor([1.0, -2.0, 3.0, -4.0, 5.0])
    flat[8:] = 1.0
    before = flat.clone()
    mean.average(flat, [0])
    assert flat[:5].sign().tolist() == [1, -1, 1, -1, 1] and flat[:5].abs().unique().numel() == 1
    assert not flat[5:8].any() and torch.equal(flat[8:], before[8:]), "padding, and a tensor that was not asked for"
    assert torch.allclose(flat[:5] + mean.error_feedback()[:5], before[:5], atol=1e-6)
    mean.forget()
    assert not mean.error_feedback().any()
