"""`explain` shows the traffic of a config, in models or on given links, compared with other keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hf_zero.__main__ import main
from hf_zero.config import ConfigError, Views, examine
from hf_zero.explain.views import THIS, Links, Sent, number_of, traffic_rows

EVERYTHING = {"zero_quantized_weights": True, "zero_quantized_gradients": True}


def rows(zero: dict[str, Any], world: int = 16, per_host: int | None = 8, **more: Any) -> dict[str, Sent]:
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": zero, **more}
    findings = examine(config, Views(world_size=world), complete=False)
    return {sent.name: sent for sent in traffic_rows(findings, per_host, 1e9, Links(1e9, 1e8))}


def test_plain_stage_3_on_two_hosts() -> None:
    found = rows({"stage": 3, "stage3_max_live_parameters": 0})
    plain = found[THIS]
    assert plain.across == pytest.approx(3 * 2e9 * 8 / 16) and plain.within == pytest.approx(3 * 2e9 * 7 / 16)
    assert plain.seconds == pytest.approx(plain.within / 1e9 + plain.across / 1e8)
    assert found["zero_hpz_partition_size 8"].across == pytest.approx(plain.across * (1 + 1 / 8) / 3)
    assert found["hybrid, shards over 8 ranks"].across == pytest.approx(2 * 2e9 / 8 * 8 / 16, rel=0.2)
    assert found["all of ZeRO++"].across < plain.across / 4
    assert "plain stage 3" not in found


def test_what_the_config_has_comes_first() -> None:
    found = rows({"stage": 3, "stage3_max_live_parameters": 0, **EVERYTHING}, gradient_accumulation_steps=2)
    assert list(found)[:2] == [THIS, "plain stage 3"]
    assert found["plain stage 3"].across == pytest.approx(6 * 2e9 * 8 / 16)
    assert found[THIS].across == pytest.approx((4 * 0.508 + 2 * 0.258 / 8) * 2e9 * 8 / 16, rel=0.01)
    finer = rows({"stage": 3, **EVERYTHING}, hf_zero={"quantized_gradient_bits": 8})
    assert finer[THIS].within > found[THIS].within / 2


def test_stages_below_three_and_small_worlds() -> None:
    assert list(rows({"stage": 2}, per_host=None)) == [THIS]
    assert list(rows({"stage": 2})) == [THIS, "hybrid, shards over 8 ranks"]
    assert rows({"stage": 3}, world=1, per_host=None) == {}
    with pytest.raises(ConfigError, match="16 ranks do not fill hosts of 5"):
        rows({"stage": 3}, per_host=5)
    with pytest.raises(ConfigError, match="must be a number, like 7b"):
        number_of("seven", "--parameters")
    assert number_of("1.5e9", "") == number_of("1.5B", "") == 1.5e9


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}')
    words = ["explain", str(path), "--world-size", "8", "--gpus-per-node", "4"]
    assert main(words) == 0
    assert "per update (models" in capsys.readouterr().out
    assert main([*words, "--parameters", "7b", "--network", "10G", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["traffic"]
    assert told[0]["name"] == THIS and told[0]["across"] == pytest.approx(7e9 * 4 * (3 - 1 / 14) * 4 / 8, rel=0.01)


def test_groups_and_parts_of_matrices() -> None:
    plain = rows({"stage": 2})[THIS]
    hybrid = rows({"stage": 2}, hf_zero={"shard_group": "host"})
    assert hybrid[THIS].across == hybrid["hybrid, shards over 8 ranks"].across < plain.across
    halves = rows({"stage": 2}, tensor_parallel={"autotp_size": 2})[THIS]  # 8 ranks of 4 per host hold the same half
    assert halves.across == pytest.approx(plain.across / 2) and halves.within < plain.within / 2
