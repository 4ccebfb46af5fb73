"""`plan --longest`: memory that grows with the tokens, its placement, and the sums."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import MixtralConfig

from hf_zero.__main__ import main
from hf_zero.config import ConfigError, TrainingView, resolve
from hf_zero.planning.candidates import Candidate, Training
from hf_zero.planning.estimate import traced
from hf_zero.planning.longest import Line, Reach, longest_sequences, most_sharing, sums
from hf_zero.planning.machine import hardware
from hf_zero.planning.model import PlannedModel, TilingChoice, load_model, trace
from hf_zero.planning.trace import ModelTrace
from tests.planning.material import config_folder

pytestmark = pytest.mark.lengthy
ROOT = Path(__file__).resolve().parents[2]

MACHINE = {"gpu": "h100", "gpus_per_node": 1, "device_memory": "8G", "host_memory": "64G", "disk": "1T"}


_TRACES: dict[str, ModelTrace] = {}


@pytest.fixture(autouse=True)
def traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces are cached: tracing takes seconds, and most tests need the same model and samples."""

    def kept(model: PlannedModel, training: Training, **options: Any) -> ModelTrace:
        run = training.micro_batch, training.length, training.sequence_parallel
        config = {name: value for name, value in model.config.to_dict().items() if not name.startswith("_")}
        key = repr((config, model.dtype, model.num_parameters, run, sorted(options.items())))
        if key not in _TRACES:
            _TRACES[key] = traced(model, training, **options)
        return _TRACES[key]

    for module in ("longest", "estimate"):
        monkeypatch.setattr(f"hf_zero.planning.{module}.traced", kept)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PlannedModel:
    return load_model(config_folder(tmp_path_factory.mktemp("model")))


def by_name(found: list[Reach]) -> dict[str, Reach]:
    return {each.name: each for each in found}


def test_inputs_on_the_host_make_room_on_the_device(model: PlannedModel) -> None:
    found = longest_sequences(model, hardware(MACHINE), Training())
    reaches = by_name(found)
    here, there = reaches["stage 0, checkpointing"], reaches["stage 0, checkpointing, inputs on host"]
    kept = (model.layers - 2) * model.hidden * 2  # bf16, for each token
    assert here.device.per_token - there.device.per_token == pytest.approx(kept)
    assert there.host.per_token == kept and here.host.per_token == 0
    assert there.length > here.length and found[0].length == max(each.length for each in found)
    for each in found:
        assert each.device.at(each.length) <= hardware(MACHINE).limit
        assert each.host.at(each.length) <= 64e9 and each.length % 1024 == 0


def test_streaming_leaves_more_of_the_host_to_inputs(model: PlannedModel) -> None:
    machine = hardware({**MACHINE, "host_memory": "3.3G"})
    reaches = by_name(longest_sequences(model, machine, Training()))
    plain, streamed = (
        reaches[f"stage 3, optimizer cpu, parameters cpu{more}, checkpointing, inputs on host"]
        for more in ("", ", streaming")
    )
    saved = 2 * model.num_parameters  # of 16 bytes
    joined = 4 * max(parameter.numel() for parameter in model.module.parameters())  # masters of one update
    assert plain.host.fixed - streamed.host.fixed == pytest.approx(saved - joined, rel=0.05)
    assert plain.bound == streamed.bound == "host memory" and streamed.length >= plain.length
    assert "hf_zero" in streamed.config and streamed.config["hf_zero"]["streaming"] == {"enabled": True}
    assert streamed.config["hf_zero"]["tiled_loss"] and streamed.config["activation_checkpointing"]["cpu_checkpointing"]


@pytest.mark.slow
def test_the_line_is_that_of_longer_traces(model: PlannedModel) -> None:
    tiling = TilingChoice.that_fits(model.module)
    assert tiling == TilingChoice(mlp=True, loss=True)
    lengths = (2**14, 2**15, 2**17)
    peaks = {n: trace(model, micro_batch=1, length=n, checkpointing=True, tiling=tiling).peak for n in lengths}
    per_token = (peaks[2**15] - peaks[2**14]) / 2**14
    assert peaks[2**17] == pytest.approx(peaks[2**15] + per_token * (2**17 - 2**15), rel=0.01)
    plain = trace(model, micro_batch=1, length=2**15, checkpointing=True).peak
    assert peaks[2**15] < plain / 2


def test_every_config_is_one_that_the_resolver_takes(model: PlannedModel, tmp_path: Path) -> None:
    found = longest_sequences(model, hardware(MACHINE), Training(nvme_path=str(tmp_path)))
    for each in found:
        answers = resolve(each.config, TrainingView(bf16=True), world_size=1)
        assert answers.config.hf_zero.tiled_mlp and answers.config.hf_zero.tiled_loss
        if each.candidate.optimizer == "nvme":
            assert answers.zero.sub_group_numel == 100_000_000


@pytest.mark.slow
def test_ranks_that_share_sequences_reach_as_many_times_as_far(model: PlannedModel) -> None:
    machine = hardware({**MACHINE, "gpus_per_node": 4})
    assert most_sharing(model, machine, Training()).sequence_parallel == 4
    assert most_sharing(model, machine, Training(tensor_parallel=2)).sequence_parallel == 1
    alone, shared, quartered = (
        by_name(longest_sequences(model, machine, Training(sequence_parallel=n))) for n in (1, 2, 4)
    )
    for name, reach in shared.items():
        assert reach.length == pytest.approx(2 * alone[name].length, rel=0.01)
        assert reach.config["sequence_parallel_size"] == 2
        resolve(reach.config, TrainingView(bf16=True), world_size=4)
    four = quartered["stage 3, checkpointing"]
    copied = 2 * 2 * model.heads[2] * 2  # keys and values of two more heads, in bf16
    assert four.device.per_token - alone["stage 3, checkpointing"].device.per_token == pytest.approx(copied)
    with pytest.raises(ConfigError, match="world size = data ranks x ranks per sequence does not hold: 4 != n x 3"):
        longest_sequences(model, machine, Training(sequence_parallel=3))


def test_a_head_in_parts_has_no_tiles(model: PlannedModel) -> None:
    """Its logits are gathered before the loss; the MLPs' tiles are unchanged."""
    assert TilingChoice.that_fits(model.cut(2).module) == TilingChoice(mlp=True)


def test_experts_are_not_tiled(tmp_path: Path) -> None:
    config = MixtralConfig(
        vocab_size=500, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=2, architectures=["MixtralForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    experts = load_model(str(tmp_path))
    assert TilingChoice.that_fits(experts.module) == TilingChoice(loss=True)


def test_sums_in_words() -> None:
    reach = Reach(Candidate(3), True, {}, 4096, 2, Line(1e9, 1e5), Line(2e9, 5e4), "host memory")
    assert list(sums(reach, hardware(MACHINE))) == [
        "a device: 1.0 GB + 2,048 tokens x 100.0 KB = 1.2 GB of 6.2 GB",
        "a host: 2.0 GB + 2,048 tokens x 50.0 KB = 2.1 GB of 57.8 GB",
    ]
    assert Line(2.0, 1.0).tokens(1.0) == 0.0


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", config_folder(tmp_path), "--gpu", "h100", "--gpus-per-node", "1", "--longest"]
    assert main([*words, "--json", "--write", str(tmp_path / "ds.json")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found[0]["longest"] >= found[-1]["longest"] > 0
    assert json.loads((tmp_path / "ds.json").read_text()) == found[0]["config"]
    assert main(words) == 0
    assert "tokens x" in capsys.readouterr().out
    assert main([*words, "--device-memory", "1G"]) == 1
    assert "nothing fits" in capsys.readouterr().out


def test_the_sums_on_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Follows the recipe of docs/planning.md."""
    page = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    recipe = page.split("## A mixture of experts with long samples\n")[1].split("\n## ")[0]
    (tmp_path / "moe").mkdir()
    (tmp_path / "moe" / "config.json").write_text(re.findall(r"```json\n(.*?)```", recipe, re.DOTALL)[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)  # it is set in the workers of pytest-xdist
    (words,) = re.findall(r"python -m hf_zero (plan .*)", recipe)
    fits, longest = (block.splitlines() for block in re.findall(r"```text\n(.*?)```", recipe, re.DOTALL))
    assert main(words.split()) == 0
    assert len(fits) == 3 and set(fits) <= set(capsys.readouterr().out.splitlines())
    assert main([*words.split(), "--longest"]) == 0
    said = capsys.readouterr().out
    assert len(longest) == 1 and set(longest) <= set(said.splitlines())
    for name, tokens in (("stage 3, checkpointing", "221,184"), (r"stage 3, .*, inputs on host", "1,728,512")):
        assert tokens in recipe and re.search(rf"^\W*{name}\W+{tokens}\W", said, re.MULTILINE)
