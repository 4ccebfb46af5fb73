"""Tests of the late device: it detects missing synchronization, and accepts correct programs."""

from __future__ import annotations

import pytest
import torch

from tests.support.late import Late, LateError


@pytest.fixture
def device() -> Late:
    return Late(early=0.0)


def test_a_copy_in_is_there_when_the_compute_stream_has_waited(device: Late) -> None:
    home, buffer = torch.ones(8), torch.zeros(8)
    arrived = device.copy_in(home, buffer)
    assert buffer.isnan().all(), "poison until somebody waits"
    device.wait(arrived)
    assert buffer.eq(1).all() and device.num_host_waits == 0


def test_a_copy_out_is_there_when_the_host_has_waited(device: Late) -> None:
    buffer, home = torch.ones(8), torch.zeros(8)
    arrived = device.copy_out(buffer, home)
    device.wait(arrived)
    assert home.isnan().all(), "the host does not know what streams wait for"
    device.host_wait(arrived)
    assert home.eq(1).all() and device.num_host_waits == 1


def test_waiting_for_the_last_of_a_lane_brings_those_before(device: Late) -> None:
    buffers = [torch.zeros(4) for _ in range(3)]
    homes = [torch.full((4,), float(i)) for i in range(3)]
    events = [device.copy_in(home, buffer) for home, buffer in zip(homes, buffers, strict=True)]
    device.wait(events[-1])
    assert [float(buffer[0]) for buffer in buffers] == [0.0, 1.0, 2.0]


def test_a_source_that_changes_too_early(device: Late) -> None:
    home, buffer = torch.ones(8), torch.zeros(8)
    device.wait(device.copy_in(home, buffer))
    home.zero_()  # the compute stream has waited, the host has not
    with pytest.raises(LateError, match="source .* has changed"):
        device.synchronize()


def test_a_source_that_changes_in_time(device: Late) -> None:
    home, buffer = torch.ones(8), torch.zeros(8)
    device.host_wait(device.copy_in(home, buffer))
    home.zero_()
    device.synchronize()
    assert buffer.eq(1).all()


def test_knowledge_travels_with_events(device: Late) -> None:
    """A host that waits for the compute stream knows of every copy that the stream had waited for."""
    home, buffer = torch.ones(8), torch.zeros(8)
    device.wait(device.copy_in(home, buffer))
    device.host_wait(device.record())
    home.zero_()
    device.synchronize()


def test_memory_given_back_too_early(device: Late) -> None:
    home, buffer = torch.zeros(8), torch.ones(8)
    event = device.copy_out(buffer, home)
    device.keep_until(event, buffer)
    del buffer
    device.host_wait(event)
    assert home.eq(1).all()
    event = device.copy_out(torch.ones(8), home)
    with pytest.raises(LateError, match="given back"):
        device.host_wait(event)


def test_a_buffer_that_is_still_read(device: Late) -> None:
    home, buffer = torch.ones(8), torch.zeros(8)
    device.wait(device.copy_in(home, buffer))
    done = device.record(buffer)
    device.copy_in(home, buffer, after=done)
    device.copy_in(home, buffer)
    fresh = device.record()
    device.record(buffer)
    with pytest.raises(LateError, match="may still read"):
        device.copy_in(home, buffer, after=fresh)


def test_copies_that_do_not_know_of_one_another(device: Late) -> None:
    home, buffer, other = torch.ones(8), torch.zeros(8), torch.ones(8)
    out = device.copy_out(buffer, home)
    with pytest.raises(LateError, match="touches"):
        device.copy_in(home, other)
    device.wait(device.copy_in(home, other, after=out))
    assert other.eq(0).all(), "what it depends on is carried out first"


def test_an_old_event_is_no_wait(device: Late) -> None:
    values, event = device.copy_to_host(torch.ones(2))
    for name in ("forward", "backward"):
        assert not device.has_passed(event)
        with device.range(name):
            pass
    device.host_wait(event)
    assert device.num_host_waits == 0 and values.tolist() == [1.0, 1.0]


def test_some_copies_come_early() -> None:
    device = Late(early=1.0)
    home, buffer = torch.ones(8), torch.zeros(8)
    device.copy_in(home, buffer)
    assert buffer.eq(1).all()


def test_a_skipped_wait_is_a_wait_that_never_was() -> None:
    class Deaf(Late):
        def skips(self, site: str) -> bool:
            return "test_late.py" in site

    device, buffer, home = Deaf(early=0.0), torch.zeros(8), torch.ones(8)
    device.wait(device.copy_in(home, buffer))
    assert buffer.isnan().all()
