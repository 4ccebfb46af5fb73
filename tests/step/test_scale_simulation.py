"""A 70B model on 1,024 ranks, simulated on one rank: shards, padding, memory and traffic match the formulas, and
messages between hosts match docs/performance.md."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from hf_zero.comm import ledger
from tests.support.ranks import run_ranks
from tests.support.simulation import META, live_bytes, simulated_world
from tests.support.traffic import calls_and_bytes

pytestmark = pytest.mark.lengthy

WORLD = 1024
LAYERS, HIDDEN, VOCABULARY = 80, 8192, 32000
FEW_LAYERS = 6  # by default: blocks are alike, and every figure is a formula of their number
EMBEDDING_NUMEL = VOCABULARY * HIDDEN
NUM_PARAMETERS = {FEW_LAYERS: 5_658_222_592, LAYERS: 68_976_648_192}
BESIDE_BLOCKS = 3  # units: embedding, last norm, head
TOKENS = 2
MESSAGE_BYTES = 8 * 13  # of one rank, in a message among hosts
PAGE = Path(__file__).parents[2] / "docs" / "performance.md"

RELEASED = {"stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0}


def build_llama(layers: int) -> LlamaForCausalLM:
    """Llama 2 70B, or as many of its layers."""
    with META:
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCABULARY,
                hidden_size=HIDDEN,
                intermediate_size=28672,
                num_hidden_layers=layers,
                num_attention_heads=64,
                num_key_value_heads=8,
                use_cache=False,
            )
        )


def config_for(settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, **settings},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }


def train_step(engine: Any) -> None:
    tokens = torch.zeros(1, TOKENS, dtype=torch.long, device=META)
    mask = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool, device=META)
    engine.backward(engine(input_ids=tokens, labels=tokens, attention_mask=mask).loss)
    engine.step()


@dataclass
class Seen:
    """Observations of rank 511 in one step."""

    layers: int
    num_parameters: int
    numels: list[int]
    shard_numel: int  # including padding
    num_units: int
    built: int  # bytes after initialize()
    resting: int = 0  # after the step, without buffer pools
    within: dict[int, int] = field(default_factory=dict)  # bytes above `built` in the first forward, by layer
    traffic: dict[str, tuple[int, int]] = field(default_factory=dict)


def shard_numel(engine: Any) -> int:
    return sum(part.kept.numel for unit in engine.module_view.store.units for part in unit.parts)


def idle_buffers(engine: Any) -> int:
    """Bytes in send and receive buffers that are kept between steps."""
    kept = engine.module_view.store.coordinator.prefetcher.rows.buffers._free
    buffers = [buffer for pool in kept.values() for buffer, _ in pool]
    buffers += engine.gradients.assembly.step._collectives.buffers()
    return sum(buffer.untyped_storage().nbytes() for buffer in buffers)


@pytest.fixture(scope="module", params=[FEW_LAYERS, pytest.param(LAYERS, marks=pytest.mark.slow)])
def seen(request: pytest.FixtureRequest) -> Iterator[Seen]:
    layers: int = request.param
    before = live_bytes()
    with simulated_world(rank=511, world=WORLD, negotiates=True) as world:
        model = build_llama(layers)
        numels = [parameter.numel() for parameter in model.parameters()]
        engine = world.engine(model, config_for(RELEASED))
        num_units = len(engine.module_view.store.units)
        found = Seen(layers, sum(numels), numels, shard_numel(engine), num_units, live_bytes() - before)
        for layer in (1, layers - 2):
            model.model.layers[layer].mlp.register_forward_hook(_note(found, layer, before))
        ledger.reset()
        train_step(engine)
        found.traffic = calls_and_bytes()
        found.resting = live_bytes() - before - idle_buffers(engine)
        yield found
        engine.destroy()


def _note(found: Seen, layer: int, before: int) -> Any:
    def hook(*_: Any) -> None:
        found.within[layer] = live_bytes() - before - found.built

    return hook


def test_the_model_is_the_one_meant(seen: Seen) -> None:
    assert seen.num_parameters == NUM_PARAMETERS[seen.layers]
    assert seen.num_units == seen.layers + BESIDE_BLOCKS


def test_padding_is_at_most_a_few_elements_per_parameter(seen: Seen) -> None:
    """Every chunk is rounded up to whole elements, then to 8 of them."""
    exact = seen.num_parameters / WORLD
    assert exact <= seen.shard_numel <= exact + 8 * len(seen.numels)
    assert seen.shard_numel == exact  # all of this model's sizes are multiples of 8 * 1024


def test_a_rank_holds_its_share_of_fourteen_bytes_per_parameter(seen: Seen) -> None:
    """ZeRO paper, section 3: 2 bytes of weight, 4 of master and, after a step, 8 of moments, divided by the world size.
    The gradient's 2 bytes exist from backward to the step."""
    assert seen.built == pytest.approx((2 + 4) * seen.shard_numel, rel=1e-3)
    assert seen.resting == pytest.approx((2 + 4 + 8) * seen.shard_numel, rel=1e-3)
    assert seen.resting < 0.95 * 2**30 * seen.num_parameters / NUM_PARAMETERS[LAYERS]  # of 900 GiB


def test_within_a_first_forward_one_block_is_there(seen: Seen) -> None:
    """The block in use, gathered without a buffer; the same in any layer. The next one is gathered once all hosts have
    asked for it; these answer when they are waited for."""
    block = 2 * (seen.num_parameters - 2 * EMBEDDING_NUMEL - HIDDEN) // seen.layers
    activations = 2**20 * seen.layers  # of two tokens
    for above in seen.within.values():
        assert block <= above <= 1.01 * block + activations
    assert max(seen.within.values()) - min(seen.within.values()) < activations


def test_a_step_moves_what_the_zero_paper_says(seen: Seen) -> None:
    """Two gathers and one reduction of everything, except for what backward does not need to gather again."""
    everything = 2 * seen.num_parameters
    kept = 2 * EMBEDDING_NUMEL  # the head, used last and then first
    unread = 2 * EMBEDDING_NUMEL  # a plain embedding's backward reads no weights
    gathers = seen.num_units, seen.num_units - 2
    # Each unit, the ends of forward and backward, the update, and one before the first wait for a reduction at the end
    # of backward, for which ranks have gathered nothing since it started.
    messages = sum(gathers) + 4
    assert seen.traffic == {
        "forward all_gather": (gathers[0], everything),
        "backward all_gather": (gathers[1], everything - kept - unread),
        "backward reduce_scatter": (seen.num_units, everything),
        "control all_gather": (messages, messages * MESSAGE_BYTES * WORLD),
        "control all_reduce": (1, 8 * 2),  # squares of gradients, and how many are not finite
    }


def shards_of(rank: int, layers: int) -> tuple[int, int]:
    """(elements in its shards, bytes after initialize())."""
    with simulated_world(rank, WORLD) as world:
        before = live_bytes()
        engine = world.engine(build_llama(layers), config_for(RELEASED))
        found = shard_numel(engine), live_bytes() - before
        engine.destroy()
        return found


def run_shards(_: int, layers: int) -> list[tuple[int, int]]:
    return [shards_of(rank, layers) for rank in (0, 511, WORLD - 1)]


@pytest.mark.parametrize("layers", [FEW_LAYERS, pytest.param(LAYERS, marks=pytest.mark.slow)])
def test_every_rank_is_like_the_others(layers: int) -> None:
    """In a process of its own, where no tensor of another test is freed between two sums."""
    (found,) = run_ranks(run_shards, 1, layers, init=False)
    assert found == [found[0]] * 3
    assert found[0][1] == pytest.approx((2 + 4) * found[0][0], abs=4000)  # buffers


@pytest.mark.parametrize("layers", [FEW_LAYERS, pytest.param(LAYERS, marks=pytest.mark.slow)])
def test_small_parameters_persist_by_default(layers: int) -> None:
    with simulated_world(7, WORLD) as world:
        engine = world.engine(build_llama(layers), config_for({}))
        persistent = [unit for unit in engine.module_view.store.units if unit.is_persistent]
        assert [unit.numel for unit in persistent] == [(2 * layers + 1) * HIDDEN]
        # The last norm has no unit of its own.
        assert len(engine.module_view.store.units) == layers + BESIDE_BLOCKS
        engine.destroy()


class Odd(nn.Module):
    """Sizes that no world size divides; two parameters are smaller than the world size."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(37, 61), nn.Linear(61, 5)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize(
    ("rank", "owned"),
    [
        (0, [3, 1, 1, 1]),  # weight 37 * 61 in chunks of 3, bias 61, weight 61 * 5, bias 5 in chunks of 1
        (4, [3, 1, 1, 1]),
        (5, [3, 1, 1, 0]),
        (61, [3, 0, 1, 0]),
        (752, [1, 0, 0, 0]),  # 37 * 61 = 752 * 3 + 1
        (753, [0, 0, 0, 0]),
        (1023, [0, 0, 0, 0]),
    ],
)
def test_ranks_beyond_a_small_parameter_hold_padding_only(rank: int, owned: list[int]) -> None:
    with META:
        model = Odd()
    with simulated_world(rank, WORLD) as world:
        engine = world.engine(model, config_for(RELEASED))
        names = [spec.name for spec in engine.module_view.store.layout.specs]
        held = dict.fromkeys(names, 0)
        for shard in engine.optimizer.sub_groups:
            for piece in shard.pieces:
                held[names[piece.parameter]] += piece.numel
        assert list(held.values()) == owned
        engine.backward(engine(torch.empty(2, 37, dtype=torch.bfloat16, device=META)).float().sum())
        engine.step()
        assert shard_numel(engine) == 4 * 8  # every chunk takes 16 bytes
        engine.destroy()


class Blocks(nn.Module):
    """The given number of units, and nothing else."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(number))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


Messages = tuple[int, int]  # number of messages among hosts, and bytes that a rank receives from all of them


@functools.cache
def messages_of(
    updates: int, *, world: int, layers: int, order: str = "auto", micro_batches: int = 1
) -> dict[str, Messages]:
    """Messages of the last update: in forward, in backward and where weights change."""
    with META:
        model = Blocks(layers)
    config = {**config_for(RELEASED), "gradient_accumulation_steps": micro_batches}
    if order != "auto":
        config["hf_zero"] = {"gather_order": order}
    found: dict[str, Messages] = {}

    def note(where: str) -> None:
        tally = ledger.tally("control", "all_gather")
        calls, num_bytes = found.get(where, (0, 0))
        found[where] = calls + tally.calls, num_bytes + tally.num_bytes
        ledger.reset()

    with simulated_world(world // 2, world, negotiates=True) as simulated:
        engine = simulated.engine(model, config)
        for _ in range(updates):
            found.clear()
            ledger.reset()
            for _ in range(micro_batches):
                loss = engine(torch.empty(1, 8, dtype=torch.bfloat16, device=META)).float().sum()
                note("forward")
                engine.backward(loss)
                note("backward")
                engine.step()
                note("update")
        engine.destroy()
    return found


@pytest.mark.slow  # the next test checks the rule behind these figures
def test_messages_among_hosts_are_those_of_the_page() -> None:
    """The first update creates the plans; in the second, ranks know how a pass continues, but not which one comes."""
    cases = {
        'the first; with `"gather_order": "negotiated"` all': {"updates": 1},
        "the second": {"updates": 2},
        "from the third on": {"updates": 3},
        "from the third on, of 4 micro-batches": {"updates": 3, "micro_batches": 4},
    }
    rows = ["| update | forward | backward | weights change | total | KiB received per rank |", "|" + " --- |" * 6]
    for name, options in cases.items():
        found = messages_of(world=WORLD, layers=LAYERS, **options)  # type: ignore[arg-type]
        calls = [found[where][0] for where in ("forward", "backward", "update")]
        num_bytes = sum(num_bytes for _, num_bytes in found.values())
        rows.append(f"| {name} | {' | '.join(map(str, calls))} | {sum(calls)} | {num_bytes / 2**10:,.0f} |")
    table = "\n".join(rows)
    assert table in PAGE.read_text(encoding="utf-8"), table


def test_a_unit_costs_a_message_in_each_pass_that_follows_no_plan_and_none_in_one_that_does() -> None:
    def per_unit(**options: Any) -> dict[str, float]:
        few, many = (messages_of(world=16, layers=layers, **options) for layers in (10, 20))
        return {where: (many[where][0] - few[where][0]) / 10 for where in many}

    negotiated = {"forward": 1, "backward": 1, "update": 0}
    assert per_unit(updates=1) == per_unit(updates=3, order="negotiated") == negotiated
    assert per_unit(updates=2) == per_unit(updates=3) == dict.fromkeys(negotiated, 0)


@pytest.mark.parametrize(
    ("world", "layers"), [(16, 20), (WORLD, 20), pytest.param(WORLD, LAYERS, marks=pytest.mark.slow)]
)
def test_every_rank_adds_the_same_bytes_to_a_message_whatever_it_says(world: int, layers: int) -> None:
    for updates in (1, 3):
        for calls, num_bytes in messages_of(world=world, layers=layers, updates=updates).values():
            assert num_bytes == calls * world * MESSAGE_BYTES
