"""When units are gathered and released, on one rank that never waits for others."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_zero.offload.vector import StorageError
from hf_zero.params.gather_plan import GatherPlan, Use, plan_gathers
from hf_zero.params.unit import UnitState
from tests.support.units import Telling, Units, cut

NOTHING: frozenset[int] = frozenset()
VALUES = torch.linspace(-1, 1, 8).view(2, 4)


class Stack(nn.Module):
    """A sequence of layers."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Telling() for _ in range(depth)])

    def forward(self, values: Tensor) -> Tensor:
        for layer in self.layers:
            values = layer(values)
        return values


def keeps(*positions: int, num: int = 3, ahead: bool = True, inference: Sequence[int] = ()) -> GatherPlan:
    """The plan that keeps these positions gathered for backward."""
    return GatherPlan(frozenset(positions), frozenset(inference), frozenset(range(num)), int(ahead), 0)


def limited(**limits: int) -> Callable[[Sequence[Use]], GatherPlan]:
    wide = {"max_live_numel": 1 << 20, "max_reuse_numel": 1 << 20, "prefetch_numel": 1}
    return functools.partial(plan_gathers, **{**wide, **limits})


def train(of: Units, values: Tensor = VALUES) -> Tensor:
    """Forward and backward of the partitioned and of the unpartitioned model; their gradients must be equal."""
    outcome = of.model(values)
    outcome.sum().backward()
    of.coordinator.end_backward()
    expected = of.whole(values)
    expected.sum().backward()
    assert torch.equal(outcome, expected)
    for (name, ours), theirs in zip(of.model.named_parameters(), of.whole.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None and torch.equal(ours.grad, theirs.grad), name
    return outcome


def train_again(of: Units, values: Tensor = VALUES) -> None:
    of.model.zero_grad()
    of.whole.zero_grad()
    train(of, values)


def asked(of: Units) -> list[str]:
    """The units that have been asked for since the last `drain`, in order."""
    return [event.removeprefix("ask ") for event in of.drain() if event.startswith("ask")]


def asked_in_backward(of: Units) -> list[str]:
    events = of.drain()
    return [event.removeprefix("ask ") for event in events[events.index("end forward") :] if event.startswith("ask")]


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


# Forward


def test_forward_asks_for_the_next_unit_before_this_one_runs() -> None:
    of = cut(Stack(), keeps())
    with torch.no_grad():
        assert torch.equal(of.model(VALUES), of.whole(VALUES))
    a, b, c = (f"layers.{index}" for index in range(3))
    assert of.drain() == [
        *(f"ask {a}", f"take {a}", f"ask {b}", f"run {a}"),
        *(f"take {b}", f"ask {c}", f"run {b}"),
        *(f"take {c}", f"run {c}", "end forward"),
    ]
    assert of.negotiation.orders == [0, 1, 2]


def test_without_prefetch_a_unit_is_asked_for_when_it_is_entered() -> None:
    of = cut(Stack(2), keeps(ahead=False))
    with torch.no_grad():
        of.model(VALUES)
    assert of.drain() == [
        *("ask layers.0", "take layers.0", "run layers.0"),
        *("ask layers.1", "take layers.1", "run layers.1", "end forward"),
    ]


def test_a_unit_is_whole_while_its_module_runs_and_no_longer() -> None:
    of = cut(Stack(), keeps())
    seen: list[list[str]] = []
    for layer in of.model.layers:
        layer.register_forward_hook(lambda *_: seen.append(of.gathered), prepend=True)
    with torch.no_grad():
        of.model(VALUES)
    assert seen == [["layers.0"], ["layers.1"], ["layers.2"]] and of.gathered == []
    assert all(parameter.isnan().all() for parameter in (member.stand_in for u in of.units for member in u.members))


def test_parameters_show_what_the_ranks_hold_together() -> None:
    of = cut(Stack(1), keeps(0))
    of.model(VALUES)
    assert torch.equal(of.model.layers[0].weight, of.whole.layers[0].weight)


def test_a_unit_that_is_used_twice_in_one_forward_is_gathered_twice_unless_it_is_kept() -> None:
    class Twice(Stack):
        def forward(self, values: Tensor) -> Tensor:
            return self.layers[0](super().forward(values))

    def num_gathers(plan: GatherPlan) -> int:
        of = cut(Twice(2), plan)
        train(of)
        forward = of.coordinator.forward
        assert forward.seen == [0, 1] and not forward.is_out_of_order, "only the first use counts"
        return of.drain().count("ask layers.0")

    assert num_gathers(keeps(num=2)) == 4  # twice in forward, twice in backward
    assert num_gathers(keeps(0, num=2)) == 2  # backward releases it when it reaches what lies between


def test_an_abandoned_prefetch_is_given_back_at_the_end_of_the_pass() -> None:
    class Early(Stack):
        def forward(self, values: Tensor) -> Tensor:
            return self.layers[0](values)

    of = cut(Early(), keeps())
    with torch.no_grad():
        of.model(VALUES)
    assert of.drain()[-3:] == ["run layers.0", "take layers.1", "end forward"]
    assert of.gathered == [] and not any(unit.state is UnitState.IN_FLIGHT for unit in of.units)


def test_a_forward_that_raises_leaves_nothing_behind() -> None:
    class Broken(Telling):
        def forward(self, values: Tensor) -> Tensor:
            raise ValueError("broken")

    stack = Stack(2)
    stack.layers[1] = Broken()
    of = cut(stack, keeps())
    with pytest.raises(ValueError, match="broken"):
        of.model(VALUES)
    assert of.gathered == [] and not of.coordinator.is_running
    assert of.drain()[-1] == "end forward"


@pytest.mark.parametrize("trains", [True, False], ids=["training", "inference"])
def test_a_forward_that_ctrl_c_ends_is_forgotten_when_the_next_one_begins(trains: bool) -> None:
    """torch runs no hook on KeyboardInterrupt. What the forward was using counted as in use for good: it was not
    released at the next update, and an embedding, which backward does not gather, kept its old values from then on."""
    of = cut(Stack(), keeps())
    handle = of.model.layers[1].register_forward_pre_hook(interrupt)
    with torch.set_grad_enabled(trains), pytest.raises(KeyboardInterrupt):
        of.model(VALUES)
    handle.remove()
    assert of.gathered == ["layers.1"]
    of.drain()
    train(of)
    assert of.drain()[:2] == ["take layers.2", "ask layers.0"], "what was asked for ahead is given back first"
    assert of.gathered == [] and not of.coordinator.is_running


def test_a_step_releases_what_a_forward_was_using_that_ctrl_c_has_ended() -> None:
    of = cut(Stack(), keeps())
    of.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        of.model(VALUES)
    of.coordinator.prepare_update()
    assert of.drain()[-1] == "step" and of.gathered == [] and not of.coordinator.is_running


def test_a_module_that_calls_itself_is_in_use_until_its_first_call_returns() -> None:
    """Its second call is no sign that the first one has been interrupted."""

    class Twice(Telling):
        def forward(self, values: Tensor, again: bool = True) -> Tensor:
            values = super().forward(values)
            return self(values, False) + self.weight.sum() if again else values

    stack = Stack(2)
    stack.layers[0] = Twice()
    of = cut(stack, keeps(num=2))
    assert torch.equal(of.model.layers[0](VALUES), of.whole.layers[0](VALUES))
    train(of)


# Limits


def test_max_live_parameters_says_what_is_still_there_after_forward() -> None:
    of = cut(Stack(), limited(max_live_numel=32))  # a layer has 16
    of.model(VALUES)
    assert of.gathered == ["layers.1", "layers.2"]
    of = cut(Stack(), limited(max_live_numel=32))
    with torch.no_grad():
        of.model(VALUES)
    assert of.gathered == ["layers.0", "layers.1"]  # the next forward starts with them


def test_what_inference_has_kept_is_not_gathered_again_until_training() -> None:
    of = cut(Stack(), limited(max_live_numel=32))
    for _ in range(2):
        with torch.no_grad():
            of.model(VALUES)
    assert asked(of) == ["layers.0", "layers.1", "layers.2", "layers.2"]
    of.model(VALUES)
    assert of.told == ["kept", "kept", "given up"] and of.drain()[0] == "ask layers.0"


def test_persistent_units_are_never_asked_for_and_never_released() -> None:
    of = cut(Stack(), limited(), persistent=["layers.1.weight"])
    (persistent,) = of.gathered
    train(of)
    assert not any(persistent in event or "ask layers.1" in event for event in of.drain())
    of.coordinator.release_all()
    assert of.gathered == [persistent]
    assert torch.equal(of.model.layers[1].weight, of.whole.layers[1].weight)


# Reads


class Reader(nn.Module):
    """Its second half reads a parameter of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Telling(), Reading()])
        self.layers[1].__dict__["other"] = self.layers[0]

    def forward(self, values: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](values))


class Reading(Telling):
    def forward(self, values: Tensor) -> Tensor:
        return super().forward(values) + values @ self.other.weight


def test_a_read_across_modules_gathers_for_the_reader() -> None:
    of = cut(Reader(), keeps(num=2), reads=True)
    train(of)
    events = of.drain()
    assert events[: events.index("end forward")] == [
        *("ask layers.0", "take layers.0", "ask layers.1", "run layers.0"),
        *("take layers.1", "run layers.1", "ask layers.0", "take layers.0"),
    ]
    assert of.gathered == []


def test_what_was_read_across_modules_is_released_with_its_reader() -> None:
    """Although its own module would keep it."""
    of = cut(Reader(), keeps(num=2, inference=[0, 1]), reads=True)
    with torch.no_grad():
        assert torch.equal(of.model.layers[1](VALUES), of.whole.layers[1](VALUES))
    assert of.gathered == ["layers.1"]


def test_a_read_outside_of_forward_and_backward_is_no_business_of_the_coordinator() -> None:
    of = cut(Reader(), keeps(num=2), reads=True)
    assert not of.coordinator.is_running
    _ = of.model.layers[0].weight
    assert of.drain() == [] and of.gathered == []


def test_what_backward_reads_outside_of_modules_stays_until_its_end() -> None:
    of = cut(Stack(), keeps(ahead=False), reads=True)
    seen: list[list[str]] = []
    first, second, third = of.model.layers

    def read(_: Tensor) -> None:
        first.weight.sum()

    third.weight.register_post_accumulate_grad_hook(read)
    second.weight.register_post_accumulate_grad_hook(lambda _: seen.append(of.gathered))
    train(of)
    assert seen == [["layers.0", "layers.1"]] and of.gathered == []


# Backward


def test_backward_goes_down_one_ahead_and_releases_what_is_used_up() -> None:
    of = cut(Stack(), keeps())
    loss = of.model(VALUES).sum()
    of.drain()
    seen: list[list[str]] = []
    for unit in of.units:
        for member in unit.members:
            member.parameter.register_post_accumulate_grad_hook(lambda _: seen.append(of.gathered))
    loss.backward()
    assert of.drain() == [
        *("ask layers.2", "take layers.2", "ask layers.1"),
        *("take layers.1", "ask layers.0"),
        "take layers.0",
    ]
    assert of.negotiation.orders[-3:] == [-2, -1, 0]
    assert seen == [["layers.2"], ["layers.1"], ["layers.0"]]
    for ended in (["end backward"], []):  # ranks do not meet for the end of a backward that was none
        of.coordinator.end_backward()
        assert of.drain() == ended and of.gathered == []
    of.model(VALUES)
    assert of.negotiation.orders[-3:] == [0, 1, 2], "requests of a forward again"


def test_backward_uses_what_forward_has_kept() -> None:
    of = cut(Stack(), keeps(2))
    train(of)
    assert asked(of) == ["layers.0", "layers.1", "layers.2", "layers.1", "layers.0"]


def test_backward_tells_how_far_it_has_come() -> None:
    of = cut(Stack(), keeps())
    train(of)
    assert of.cursors == [3, 2, 1, 0]
    loss = of.model(VALUES).sum() + of.model(VALUES).sum()
    loss.backward()
    assert set(of.cursors[4:]) == {None}, "of two passes, the first one is not the last to come by"
    of.coordinator.end_backward()
    of.cursors.clear()
    train_again(of)
    assert of.cursors == [3, 2, 1, 0]


def test_positions_that_backward_does_not_need_are_not_fetched_ahead() -> None:
    stack = Stack()
    stack.layers[0].requires_grad_(False)
    of = cut(stack, limited(max_live_numel=0))
    of.model(VALUES).sum().backward()
    of.coordinator.end_backward()
    assert asked(of)[3:] == ["layers.2", "layers.1"]


def test_an_embedding_is_not_gathered_for_backward() -> None:
    stack = Stack(2)
    stack.layers[0] = nn.Embedding(8, 4)
    of = cut(stack, limited(max_live_numel=0))
    train(of, torch.tensor([[0, 3, 3]]))
    assert asked_in_backward(of) == ["layers.1"]


def test_a_backward_without_end_is_ended_by_the_next_forward() -> None:
    of = cut(Stack(1), keeps(num=1))
    of.model(VALUES).sum().backward()
    assert of.gathered == ["layers.0"]
    of.drain()
    of.model(VALUES)
    assert of.drain()[:2] == ["end backward", "ask layers.0"]


class Passing(Telling):
    """Also returns its input."""

    def forward(self, values: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(values), values


class Through(Stack):
    def __init__(self) -> None:
        super().__init__(1)
        self.layers.append(Passing())

    def forward(self, values: Tensor) -> Tensor:
        new, old = self.layers[1](self.layers[0](values))
        return new + old


def test_an_output_that_was_only_passed_through_is_the_business_of_the_module_that_made_it() -> None:
    of = cut(Through(), keeps(num=2))
    train(of)
    assert asked_in_backward(of) == ["layers.1", "layers.0"]


# Containers, checkpoints


class Nested(nn.Module):
    """Nested containers with parameters of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), 1.5))
        self.inner = Scaled()
        self.head = Telling()

    def forward(self, values: Tensor) -> Tensor:
        return self.head(self.inner(values * self.scale)) * self.scale


class Scaled(Stack):
    def __init__(self) -> None:
        super().__init__(2)
        self.shift = nn.Parameter(torch.full((4,), 0.25))

    def forward(self, values: Tensor) -> Tensor:
        return super().forward(values + self.shift) * self.shift


def test_a_container_keeps_its_own_parameters_while_anything_in_it_runs() -> None:
    of = cut(Nested(), keeps(num=5))
    names = [hooked.name for hooked in of.order.by_position]
    assert names == ["Nested", "inner", "inner.layers.0", "inner.layers.1", "head"]
    assert [hooked.subtree for hooked in of.hooked_modules] == [(0, 1, 2, 3, 4), (1, 2, 3), (2,), (3,), (4,)]
    seen: dict[str, list[str]] = {}
    for name, module in of.model.named_modules():
        if isinstance(module, Telling):
            module.register_forward_pre_hook(lambda *_, name=name: seen.update({name: of.gathered}))
    train(of)
    assert seen == {
        "inner.layers.0": ["Nested", "inner", "inner.layers.0"],
        "inner.layers.1": ["Nested", "inner", "inner.layers.1"],
        "head": ["Nested", "head"],
    }
    assert of.gathered == []


def test_backward_keeps_a_container_s_parameters_until_it_is_through_with_it() -> None:
    of = cut(Nested(), keeps(num=5))
    seen: dict[str, list[str]] = {}
    for name, parameter in of.model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.update({name: of.gathered}))
    train(of)
    assert {name: seen[name] for name in ("inner.layers.0.weight", "inner.layers.1.weight")} == {
        "inner.layers.1.weight": ["Nested", "inner", "inner.layers.1"],
        "inner.layers.0.weight": ["Nested", "inner", "inner.layers.0"],
    }
    assert of.cursors == [5, 4, 3, 2], "with a container backward is done only at its end"


class Tied(nn.Module):
    """Shares its own parameter with a layer in it, and reads it after the layer has run."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Telling()])
        self.weight = self.layers[0].weight

    def forward(self, values: Tensor) -> Tensor:
        return self.layers[0](values) @ self.weight


def test_a_unit_stays_while_a_module_around_uses_it_too() -> None:
    of = cut(Tied(), keeps(num=2))
    train(of)
    assert asked(of) == ["Tied", "Tied"]


def test_a_part_called_by_itself_asks_for_nothing_beside_it() -> None:
    of = cut(Nested(), keeps(num=5))
    with torch.no_grad():
        of.model.inner(VALUES)
    assert asked(of) == ["inner", "inner.layers.0", "inner.layers.1"]


class Checkpointed(Stack):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__(3)
        self.use_reentrant = use_reentrant

    def forward(self, values: Tensor) -> Tensor:
        for layer in self.layers:
            values = checkpoint(layer, values, use_reentrant=self.use_reentrant)
        return values


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpointed_layer_is_gathered_once_for_both_of_its_turns_in_backward(use_reentrant: bool) -> None:
    of = cut(Checkpointed(use_reentrant), keeps())
    train(of, VALUES.clone().requires_grad_())
    events = of.drain()
    assert events[events.index("end forward") + 1 :] == [
        *("ask layers.2", "take layers.2", "ask layers.1", "run layers.2"),
        *("take layers.1", "ask layers.0", "run layers.1"),
        *("take layers.0", "run layers.0", "end backward"),
    ]
    assert of.gathered == []


class CheckpointedTogether(Stack):
    def forward(self, values: Tensor) -> Tensor:
        return checkpoint(super().forward, values, use_reentrant=False)


def test_what_backward_has_come_to_stays_while_layers_before_it_run_again() -> None:
    of = cut(CheckpointedTogether(2), keeps(num=2, ahead=False))
    train(of, VALUES.clone().requires_grad_())
    events = of.drain()
    assert events[events.index("end forward") + 1 :] == [
        *("ask layers.1", "take layers.1"),  # its output's gradient has arrived
        *("ask layers.0", "take layers.0", "run layers.0", "run layers.1"),
        *("ask layers.0", "take layers.0", "end backward"),
    ]


# Order


class Ordered(Stack):
    """Runs its layers in this order."""

    order: Sequence[int] = (2, 1, 0)

    def forward(self, values: Tensor) -> Tensor:
        for index in self.order:
            values = self.layers[index](values)
        return values


def test_another_order_than_the_registered_one_is_noticed_and_taken_over() -> None:
    of = cut(Ordered(), keeps())
    train(of)
    assert of.coordinator.forward.is_out_of_order and of.coordinator.forward.seen == [2, 1, 0]
    of.model.order = of.whole.order = (0, 1, 2)
    train_again(of)
    assert of.coordinator.forward.is_out_of_order, "until the ranks have met"
    of.model.order = of.whole.order = (2, 1, 0)
    of.coordinator.reorder([2, 1, 0])
    assert [of.order.first_use[unit] for unit in of.units] == [2, 1, 0]
    assert [hooked.name for hooked in of.order.by_position] == ["layers.2", "layers.1", "layers.0"]
    assert [hooked.position for hooked in of.hooked_modules] == [None, 2, 1, 0]
    assert not of.coordinator.forward.is_out_of_order
    of.drain()
    train_again(of)
    assert asked(of) == [f"layers.{index}" for index in (2, 1, 0, 0, 1, 2)]
    assert not of.coordinator.forward.is_out_of_order
    with torch.no_grad():
        of.model.layers[2](VALUES)
    assert of.drain() == ["ask layers.2", "take layers.2", "run layers.2", "end forward"], "alone, it has nothing ahead"


def test_the_order_does_not_change_under_a_pass() -> None:
    of = cut(Stack(), keeps())
    of.model(VALUES).sum().backward()
    with pytest.raises(AssertionError, match="a pass is running"):
        of.coordinator.reorder([2, 1, 0])


# Between passes


def test_a_step_ends_what_is_under_way() -> None:
    of = cut(Stack(), keeps(2))
    of.model(VALUES).sum().backward()
    of.drain()
    of.coordinator.prepare_update()
    assert of.drain() == ["end backward", "step"] and of.gathered == []
    assert of.negotiation.version == 1


def test_the_end_of_a_pass_says_whether_some_rank_could_not_read() -> None:
    of = cut(Stack(1), keeps(num=1))
    of.channel.problem = "the drive is gone"
    of.model(VALUES)
    of.negotiation.some_rank_failed = True
    with pytest.raises(StorageError, match="rank 1: the drive is gone"):
        of.model(VALUES)


def test_release_all_leaves_what_a_running_forward_uses() -> None:
    of = cut(Stack(1), keeps(0, num=1))
    seen: list[list[str]] = []

    def release(*_: object) -> None:
        of.coordinator.release_all()
        seen.append(of.gathered)

    of.model.layers[0].register_forward_pre_hook(release)
    of.model(VALUES)
    of.coordinator.release_all()
    assert seen == [["layers.0"]] and of.gathered == []


def test_an_unwatched_model_gathers_nothing_until_it_is_watched_again() -> None:
    of = cut(Stack(1), keeps(0, num=1))
    of.model(VALUES)
    of.coordinator.unwatch()
    assert of.gathered == [] and of.drain()[-1] == "end forward"
    with pytest.raises(RuntimeError, match=r"layers\.0\.weight"):
        of.model(VALUES)
    assert of.drain() == ["run layers.0"]
    of.coordinator.watch()
    assert torch.equal(of.model(VALUES), of.whole(VALUES))


def test_all_gathers_go_through_one_buffer() -> None:
    of = cut(Stack(), keeps())
    for _ in range(3):
        train_again(of)
    free = of.coordinator.prefetcher.rows.buffers._free[torch.float32]
    assert len(free) == 1, "rows have been read when the next ones are asked for"
