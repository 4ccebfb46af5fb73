"""Which unit is gathered for which module, step by step, without collectives."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from hf_zero.params.coordinator import Backward, Forward
from hf_zero.params.gather_plan import GatherPlan
from hf_zero.params.hooked_modules import ExecutionOrder, HookedModule
from hf_zero.params.unit import Unit, UnitState

NAMES = ("a", "b", "c")


class Recorder:
    """Replaces the prefetcher: every unit is available at once.

    Attributes:
        ahead: the positions after each gather, nearest first.
        ended: the passes.
    """

    def __init__(self) -> None:
        self.in_backward = False
        self.ahead: list[list[int]] = []
        self.ended: list[str] = []

    def gather(self, unit: Unit) -> None:
        unit.state = UnitState.GATHERED

    def prefetch(self, positions: Iterable[int]) -> None:
        self.ahead.append(list(positions))

    def end_pass(self, *, in_backward: bool) -> None:
        assert not self.in_backward, "what is asked for from now on is of another pass"
        self.ended.append("backward" if in_backward else "forward")


class Chain:
    """Three modules in sequence, with one unit each."""

    def __init__(self, *, kept: Sequence[int] = (), kept_for_inference: Sequence[int] = ()) -> None:
        self.units = [Unit(index, name, ()) for index, name in enumerate(NAMES)]
        self.hooked = [self._hooked(index) for index in range(len(NAMES))]
        every = frozenset(range(len(NAMES)))
        self.plan = GatherPlan(frozenset(kept), frozenset(kept_for_inference), every, 1, 0)
        self.order = ExecutionOrder(self.hooked, lambda _uses: self.plan)
        self.prefetcher: Any = Recorder()
        self.told: list[int | None] = []
        self.forward = Forward(self.order, self.prefetcher)
        self.backward = Backward(self.order, self.prefetcher, self.told.append)

    def _hooked(self, index: int) -> HookedModule:
        module = nn.Linear(1, 1)
        return HookedModule(
            name=NAMES[index],
            module=module,
            units=(self.units[index],),
            position=index,
            subtree=tuple(range(len(NAMES))),
            inside=frozenset((id(module),)),
            reads_in_backward=True,
            is_container=False,
        )

    @property
    def gathered(self) -> str:
        return "".join(unit.name for unit in self.units if unit.is_gathered)

    def pass_through(self, *indices: int, trains: bool = True) -> None:
        self.forward.begin(self.hooked[indices[0]], trains=trains)
        for index in indices:
            self.forward.enter(self.hooked[index])
            self.forward.leave(self.hooked[index])
        self.forward.end()


def test_forward_gathers_what_is_entered_and_looks_at_what_comes_after_it() -> None:
    chain = Chain()
    chain.forward.begin(chain.hooked[0], trains=True)
    chain.forward.enter(chain.hooked[1])
    assert chain.gathered == "b" and chain.prefetcher.ahead == [[2]] and chain.forward.is_running
    assert chain.forward.leave(chain.hooked[1]) == [chain.units[1]]
    assert chain.gathered == "" and not chain.forward.is_running
    chain.forward.end()
    assert chain.prefetcher.ended == ["forward"]


def test_what_stays_after_forward_depends_on_whether_backward_follows() -> None:
    chain = Chain(kept=[2], kept_for_inference=[0])
    chain.pass_through(0, 1, 2, trains=True)
    assert chain.gathered == "c"
    chain.units[2].release()
    chain.pass_through(0, 1, 2, trains=False)
    assert chain.gathered == "a"


def test_what_is_read_is_released_with_its_reader_although_its_own_module_would_keep_it() -> None:
    chain = Chain(kept=[0, 1, 2])
    chain.forward.begin(chain.hooked[1], trains=True)
    chain.forward.enter(chain.hooked[1])
    chain.forward.read(chain.units[0])
    assert chain.gathered == "ab" and chain.forward.in_use == set(chain.units[:2])
    assert chain.forward.leave(chain.hooked[1]) == [chain.units[1], chain.units[0]]
    assert chain.gathered == "b"


def test_a_unit_stays_while_an_outer_forward_uses_it() -> None:
    chain = Chain()
    chain.forward.begin(chain.hooked[0], trains=True)
    chain.forward.enter(chain.hooked[0])
    chain.forward.enter(chain.hooked[0])
    chain.forward.leave(chain.hooked[0])
    assert chain.gathered == "a"
    chain.forward.leave(chain.hooked[0])
    assert chain.gathered == ""


def test_the_order_of_a_pass_is_that_of_first_entries() -> None:
    chain = Chain()
    chain.pass_through(0, 1, 0, 2)
    assert chain.forward.seen == [0, 1, 2] and not chain.forward.is_out_of_order
    chain.pass_through(1, 0)
    chain.pass_through(0, 1, 2)
    assert chain.forward.is_out_of_order, "until the ranks have met"
    chain.forward.forget_order()
    assert chain.forward.seen == [] and not chain.forward.is_out_of_order


def test_an_order_that_changes_renumbers_modules_and_first_uses() -> None:
    chain = Chain()
    chain.order.change([2, 0, 1])
    assert [hooked.name for hooked in chain.order.by_position] == ["c", "a", "b"]
    assert [hooked.position for hooked in chain.hooked] == [1, 2, 0]
    assert [chain.order.first_use[unit] for unit in chain.units] == [1, 2, 0]


def test_backward_releases_what_it_has_passed_and_tells_how_far_it_is() -> None:
    chain = Chain()
    chain.backward.num_passes = 1
    for hooked in reversed(chain.hooked):
        chain.backward.reach(hooked, hooked.units)
        assert chain.gathered == hooked.name and chain.prefetcher.in_backward
    assert chain.told == [3, 2, 1, 0] and chain.prefetcher.ahead == [[1, 0], [0], []]
    assert chain.backward.end() and chain.prefetcher.ended == ["backward"]
    assert not chain.backward.is_under_way and not chain.backward.end()
    assert chain.prefetcher.ended == ["backward"], "nobody meets for a backward that was none"


def test_what_backward_has_come_to_stays_while_something_else_runs_its_forward_again() -> None:
    chain = Chain()
    chain.backward.reach(chain.hooked[2], chain.hooked[2].units)
    chain.backward.gather(chain.hooked[0], chain.hooked[0].units)
    assert chain.gathered == "ac"
    chain.backward.reach(chain.hooked[1], chain.hooked[1].units)
    assert chain.gathered == "b"


def test_with_two_passes_in_the_graph_nothing_is_done_with_for_good() -> None:
    chain = Chain()
    chain.backward.num_passes = 2
    chain.backward.reach(chain.hooked[2], chain.hooked[2].units)
    assert chain.told == [None, None]


def test_a_read_in_backward_is_for_nobody_and_stays_until_the_end() -> None:
    chain = Chain()
    chain.backward.gather(None, chain.units[:1])
    chain.backward.reach(chain.hooked[2], chain.hooked[2].units)
    assert chain.gathered == "ac"
