"""Small parts behind the alias: device, copies for saving, loaders, flags, logger."""

from __future__ import annotations

import argparse
import logging
from collections import OrderedDict, namedtuple

import pytest
import torch

from hf_zero import initialize
from hf_zero.config import ConfigError
from hf_zero.integration.compat.accelerator import AcceleratorQueries, get_accelerator
from hf_zero.integration.compat.arguments import add_config_arguments
from hf_zero.integration.compat.comms import log_summary
from hf_zero.integration.compat.utils import OnDevice, RepeatingLoader, clone_tensors_for_torch_save
from hf_zero.log import log_dist, logger
from hf_zero.profiling.feature import see_memory_usage

Pair = namedtuple("Pair", "left right")


def test_a_cloned_view_leaves_its_flat_buffer_behind() -> None:
    flat = torch.arange(1000.0)
    copy = clone_tensors_for_torch_save({"weight": flat[10:14].view(2, 2)})["weight"]
    assert copy.tolist() == [[10.0, 11.0], [12.0, 13.0]]
    assert copy.untyped_storage().nbytes() == 4 * 4


def test_clones_of_tied_tensors_are_tied_and_of_others_are_not() -> None:
    flat = torch.arange(8.0)
    item = {"a": flat[:4], "b": [flat[:4].detach()], "c": flat[:3], "d": flat[:4].view(2, 2), "e": torch.empty(0)}
    copy = clone_tensors_for_torch_save(item)
    assert copy["a"] is copy["b"][0]
    assert len({value.data_ptr() for value in (copy["a"], copy["c"], copy["d"])}) == 3


def test_clones_keep_the_containers_and_the_rest() -> None:
    item = OrderedDict(a=[torch.ones(1), "text"], b=(torch.zeros(1), None), c=Pair(torch.ones(2), 3))
    copy = clone_tensors_for_torch_save(item)
    assert type(copy) is OrderedDict and list(copy) == ["a", "b", "c"]
    assert type(copy["b"]) is tuple and type(copy["c"]) is Pair
    assert copy["a"][1] == "text" and copy["b"][1] is None and copy["c"].right == 3
    copy["a"][0].add_(1)
    assert item["a"][0].item() == 1.0


def test_clones_need_no_gradient() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    copy = clone_tensors_for_torch_save([parameter])[0]
    assert not copy.requires_grad and type(copy) is torch.Tensor


def test_a_repeating_loader_starts_over() -> None:
    loader = RepeatingLoader([1, 2])
    assert [next(loader) for _ in range(5)] == [1, 2, 1, 2, 1]
    assert next(iter(loader)) == 2


def test_a_repeating_loader_over_nothing_ends() -> None:
    with pytest.raises(StopIteration):
        next(RepeatingLoader([]))


def test_on_device_builds_without_memory_and_restores_the_dtype() -> None:
    with OnDevice(dtype=torch.bfloat16):
        weight = torch.nn.Linear(2, 2).weight
    assert (weight.device.type, weight.dtype) == ("meta", torch.bfloat16)
    with OnDevice(dtype=torch.bfloat16, enabled=False):
        assert torch.nn.Linear(2, 2).weight.dtype == torch.float32
    assert torch.get_default_dtype() == torch.float32


def test_the_accelerator_answers_on_a_cpu() -> None:
    device = AcceleratorQueries("cpu")
    assert (device.device_name(), device.device_name(1), device.current_device_name()) == ("cpu", "cpu", "cpu")
    assert (device.communication_backend_name(), device.device_count(), device.current_device()) == ("gloo", 1, 0)
    assert device.is_available() and device.is_bf16_supported() and device.memory_allocated() > 0
    device.set_device(3)
    device.synchronize()
    device.empty_cache()
    with device.stream(device.Stream()):
        assert torch.ones(1, device=device.device()).item() == 1.0


def test_the_accelerator_speaks_of_the_device_that_is_there() -> None:
    device = get_accelerator()
    assert device is get_accelerator()
    torch.zeros(1, device=device.current_device_name())
    expected = "cuda:0" if torch.cuda.is_available() else "cpu"
    assert device.current_device_name() == expected


def test_config_arguments_are_added_with_their_old_spellings() -> None:
    parser = argparse.ArgumentParser()
    assert add_config_arguments(parser) is parser
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", "ds.json"])
    assert (args.deepspeed, args.deepspeed_config, args.deepscale, args.deepscale_config) == (
        True, "ds.json", False, None,
    )  # fmt: skip


def test_the_old_spelling_of_the_config_argument_is_read() -> None:
    """A script's `--deepscale_config ds.json` was accepted by the parser, and `initialize(args=args)` had no config."""
    parser = add_config_arguments(argparse.ArgumentParser())
    args, model = parser.parse_args(["--deepscale_config", '{"train_batch_size": 3}']), torch.nn.Linear(2, 2)
    assert initialize(args=args, model=model)[0].train_batch_size() == 3
    args.deepspeed_config = args.deepscale_config
    with pytest.raises(ConfigError, match=r"args\.deepscale_config (?s:.)*old spelling of args.deepspeed_config"):
        initialize(args=args, model=model)


@pytest.mark.parametrize(
    ("rank", "ranks", "heard"),
    [("0", None, True), ("1", None, False), ("1", [1], True), ("0", [1], False), ("3", [-1], True), ("", [0], True)],
)
def test_log_dist_speaks_on_the_chosen_ranks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, rank: str, ranks: list[int] | None, heard: bool
) -> None:
    monkeypatch.setenv("RANK", rank)
    log_dist("hello", ranks)
    assert ("hello" in caplog.text) is heard


@pytest.mark.parametrize(("rank", "heard"), [("0", {"news", "trouble"}), ("1", {"trouble"})])
def test_other_ranks_only_warn(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, rank: str, heard: set[str]
) -> None:
    monkeypatch.setenv("RANK", rank)
    logger.info("news")
    logger.warning("trouble")
    assert set(caplog.messages) == heard


def test_the_logger_has_one_handler_which_yields_to_the_programs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    (handler,) = logger.handlers
    record = logger.makeRecord(logger.name, logging.INFO, "", 0, "x", (), None)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    assert handler.filter(record)
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.NullHandler()])
    assert not handler.filter(record)


def test_memory_is_shown_only_when_forced(caplog: pytest.LogCaptureFixture) -> None:
    see_memory_usage("after backward")
    assert not caplog.records
    see_memory_usage("after backward", force=True)
    assert "after backward | MA " in caplog.text and "this process" in caplog.text


def test_the_summary_lists_what_the_ledger_counted(caplog: pytest.LogCaptureFixture) -> None:
    from hf_zero.comm import ledger

    with ledger.phase("test of the summary"):
        ledger.call("all_reduce", 3 * 1024**2, num_ranks=4, num_beside=2)
    try:
        log_summary()
    finally:
        del ledger.tallies["test of the summary", "all_reduce"]
    (line,) = (line for line in caplog.text.splitlines() if "test of the summary" in line)
    assert "all_reduce                  1 calls         3.00 MiB, of which rank 0 got 1.50 MiB within its host" in line
    assert line.endswith("and 3.00 MiB from others")
