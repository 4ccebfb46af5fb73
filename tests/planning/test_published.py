"""Published runs of others: sources, held-out set, the table on the page, and the accuracy of predictions."""

from __future__ import annotations

import random
import re
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import Tensor, nn

from bench import published
from bench.allocator import MIB, Allocator, Kept, holes, recording
from bench.published import CLOSE, compared, contents, held_out, orders, page, section, set_of, within
from bench.published_peaks import Peak, metered
from hf_zero.planning import trace
from hf_zero.planning.machine import CONTEXT_BYTES

# By set, of the runs that are not held out.
LEAST_CLOSE = {1: 14, 2: 26, 3: 23, 4: 16}  # of 21, 29, 24 and 16 whose peak has one prediction: within a tenth
MOST_WRONG = {1: 1, 2: 0, 3: 7, 4: 0}  # pairs of rates predicted in the wrong order
NUM_DRAWN = 2
ON_HOST = "deepspeed-7b-7"  # at stage 3 with the optimizer on the host


def test_every_run_has_a_source_and_half_are_held_out() -> None:
    found = contents()
    runs = found["runs"]
    assert len(runs) == len({run["id"] for run in runs}) >= 20
    for run in runs:
        assert run["address"].startswith("https://") and run["model"] in found["models"]
        assert ("peak" in run) or ("rate" in run), run["id"]
        assert run["meter"] in ("allocated", "active", "reserved", "device") and run["program"] in (
            "deepspeed",
            "torch",
            "autocast",
        )
    assert len(held_out(runs)) == len(runs) // 2
    assert held_out(runs) == held_out(runs[::-1]), "the lot does not depend on the order"


def test_meters_count_what_a_plan_leaves_free() -> None:
    peak = Peak(kept=8e9, passing=2e9)
    allocated, active, reserved, device = (
        metered(peak, meter, 0.5e9) for meter in ("allocated", "active", "reserved", "device")
    )
    assert allocated == active == 10e9 and reserved == 10.5e9 and device - reserved == CONTEXT_BYTES


def test_what_the_allocator_may_not_use_yet_counts_up_to_the_card() -> None:
    """FSDP of 2022 requested all units before the first was used. Freed units stayed in the allocator until the device
    had progressed, and were returned when the card was full."""
    peak = Peak(kept=8e9, passing=2e9, waiting=3e9)
    assert metered(peak, "allocated") == 10e9 and metered(peak, "active") == 13e9
    assert metered(peak, "reserved") == 13e9
    assert metered(peak, "reserved", limit=12e9) == 12e9
    assert metered(peak, "reserved", limit=9e9) == 10e9, "what is in use does not go"


def test_room_of_another_stream_counts_where_the_allocator_does() -> None:
    peak = Peak(kept=8e9, passing=2e9, apart=1e9)
    assert metered(peak, "active") == 10e9 and metered(peak, "reserved") == 11e9


def test_the_allocator_rounds_splits_and_joins() -> None:
    allocator = Allocator()
    small, medium, large = allocator.take(100), allocator.take(3 * MIB), allocator.take(18 * MIB)
    assert (small.size, medium.size, large.size) == (512, 3 * MIB, 18 * MIB)
    assert allocator.reserved == (2 + 20 + 18) * MIB and allocator.most == 512 + 21 * MIB
    other = allocator.take(16 * MIB)  # of the 17 MiB that the second segment has left
    assert allocator.reserved == 40 * MIB and other.size == 17 * MIB, "what is left is too little for a block"
    allocator.give(medium, 3 * MIB)
    allocator.give(other, 16 * MIB)
    assert allocator.take(20 * MIB).size == 20 * MIB and allocator.reserved == 40 * MIB, "neighbors are one again"
    allocator.take(11 * MIB)
    assert allocator.reserved == 52 * MIB, "nothing is free: a segment in steps of 2 MiB"


def test_segments_that_grow() -> None:
    allocator = Allocator(expandable=True)
    first, second = allocator.take(30 * MIB), allocator.take(15 * MIB)
    assert allocator.reserved == 60 * MIB, "40, of which 10 are at the end, and 20 more"
    allocator.give(second, 15 * MIB)
    assert allocator.take(40 * MIB).size == 40 * MIB and allocator.reserved == 80 * MIB
    allocator.give(first, 30 * MIB)
    allocator.take(35 * MIB)
    assert allocator.reserved == 120 * MIB, "the hole of 30 MiB is not at the end"


def test_states_lie_where_activations_were() -> None:
    """Adam's states are made when the first backward is over, in blocks that it has freed: the next step takes others,
    and what states have left of them is of no use."""
    big, state = 20 * MIB, 12 * MIB
    events = [("made", 1, big), ("made", 2, big), ("gone", 1, big), ("gone", 2, big)]
    assert holes(events, Kept([])) == 0
    assert holes(events, Kept([], states=[state] * 2)) == 2 * (big - state)
    assert holes(events, Kept([state] * 2)) == 0, "those that are there before have segments of their own"


def test_what_a_model_makes_is_recorded() -> None:
    layers = nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.Linear(1024, 1024, bias=False)).to("meta")
    with recording() as events:
        trace.trace_step(_WithLoss(layers), {"x": torch.zeros(8, 1024, device="meta")}, {})
    assert sum(kind == "gradient" for kind, _, _ in events) == 2
    made, gone = (Counter(size for kind, _, size in events if kind == each) for each in ("made", "gone"))
    assert made[4 * MIB] == gone[4 * MIB] == 2, "gradients"
    assert holes(events, Kept([4 * MIB] * 2)) >= 0 and trace._Living.__module__ == trace.__name__, "put back"


class _WithLoss(nn.Module):
    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=self.layers(x).sum())


def is_of_these_versions(text: str) -> bool:
    return f"torch {torch.__version__.partition('+')[0]}, transformers {transformers.__version__}" in text


@pytest.mark.lengthy
def test_some_rows_of_the_page_are_what_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few, drawn from the runs that are not held out, and one at stage 3 with states on the host; the slow test
    predicts all of them.

    hf_zero began to gather without buffers and to update beside the next forward, and so did the predictions of runs by
    DeepSpeed and FSDP2, which do neither: 36 rows changed, and fewer peaks were close. No row drawn had stage 3."""
    found, text = contents(), published.PAGE.read_text(encoding="utf-8")
    apart = held_out(found["runs"])
    shown = [run for run in found["runs"] if run["id"] not in apart]
    on_host = next(run for run in shown if run["id"] == ON_HOST)
    runs = [*random.Random(NUM_DRAWN).sample([run for run in shown if run["id"] != ON_HOST], NUM_DRAWN), on_host]
    monkeypatch.setattr(published, "contents", lambda: {**found, "runs": runs})
    monkeypatch.setattr(published, "held_out", lambda _: apart)
    drawn = list(compared())
    rows = [line for line in section(drawn).splitlines() if line.startswith("| [")]
    on_page = {line.split(" | ")[0]: line for line in text.splitlines() if line.startswith("| [")}
    assert len(rows) == NUM_DRAWN + 1 and len(on_page) == len(found["runs"])
    for row, each in zip(rows, drawn, strict=True):
        line = on_page[row.split(" | ")[0]]
        assert line == row or not is_of_these_versions(text), "python -m bench.published --write"
        told = re.search(r"\| ([+-][\d.]+)% \|", line)
        if told is not None and each.peaks[0] == each.peaks[1] and abs(float(told[1])) < 100 * CLOSE:
            assert within([each])[0] == 1, f"no longer as close as the page has it: {line}"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_page_has_what_is_predicted() -> None:
    found = list(compared())
    for number, least in LEAST_CLOSE.items():
        rows = [each for each in found if not each.is_held_out and set_of(each.run) == number]
        assert within(rows)[0] >= least
        assert sum(verdict == "wrong" for _, _, verdict in orders(rows)) <= MOST_WRONG[number]
    text = published.PAGE.read_text(encoding="utf-8")
    if is_of_these_versions(text):
        assert page(text, section(found)) == text, "python -m bench.published --write"
