"""`python -m hf_zero plan`: candidates, which ones fit, the choice, and the output."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_zero.__main__ import main
from hf_zero.config import ConfigError, TrainingView, load_config, resolve
from hf_zero.device.kinds import found_accelerators
from hf_zero.explain.views import config_file
from hf_zero.offload import update_speed
from hf_zero.planning import machine
from hf_zero.planning import memory as memory_module
from hf_zero.planning import model as model_module
from hf_zero.planning import show as show_module
from hf_zero.planning.arguments import GPUS
from hf_zero.planning.candidates import PREFERRED, Candidate, Training, candidates, ds_config, training_of
from hf_zero.planning.choose import ALIKE, RankedPlans, choose
from hf_zero.planning.choose import plan as make_plan
from hf_zero.planning.estimate import gigabytes
from hf_zero.planning.machine import calibrated, hardware, parse_bytes
from hf_zero.planning.model import load_model
from hf_zero.planning.page import as_html
from hf_zero.planning.show import as_dict, reasoning, remedies, sums
from tests.planning.material import config_folder, of_size, planned, shown

pytestmark = pytest.mark.lengthy


def test_every_candidate_is_a_config_that_the_resolver_takes(tmp_path: Path) -> None:
    for optimizer in ("AdamW", "Lion", "Adam8bit"):
        for precision in ("bf16", "fp16", "fp32"):
            training = Training(nvme_path=str(tmp_path), optimizer=optimizer, precision=precision)  # type: ignore[arg-type]
            for candidate in PREFERRED:
                if candidate.streams and not training.can_stream:
                    continue
                view = TrainingView(bf16=precision == "bf16", fp16=precision == "fp16")
                answers = resolve(ds_config(candidate, training), view, world_size=8)
                assert answers.zero.stage == candidate.stage
                assert (answers.zero.offload_param is not None) == (candidate.parameters is not None)


def test_candidates_of_a_machine() -> None:
    def of(ranks: int, **more: Any) -> list[str]:
        training = Training(checkpointing=False, **more)
        return [each.name for each in candidates(training, ranks=ranks, separate=True)]

    assert of(1) == [
        "stage 0",
        "stage 2, optimizer cpu",
        "stage 3",
        "stage 3, parameters cpu",
        "stage 3, optimizer cpu",
        "stage 3, optimizer cpu, parameters cpu",
        "stage 3, optimizer cpu, parameters cpu, streaming",
    ]
    assert not any("streaming" in name for name in of(1, optimizer="Muon") + of(1, precision="fp16"))
    assert of(8)[:3] == ["stage 0", "stage 1", "stage 2"] and len(of(8, nvme_path="/d")) == len(PREFERRED)
    on_cpu = list(candidates(Training(checkpointing=True), ranks=2, separate=False))
    assert [each.stage for each in on_cpu] == [0, 1, 2, 3] and all(each.checkpointing for each in on_cpu)


def test_a_small_model_needs_nothing_and_a_large_one_everything(tmp_path: Path) -> None:
    assert planned("40M", gpus_per_node=1).chosen.candidate == Candidate(0)  # type: ignore[union-attr]
    model = of_size("8b")
    by_memory = {  # on a link that is too slow to hide stage 3's gathers
        memory: planned("", Training(length=1024), model, device_memory=memory, link="100G").chosen
        for memory in ("400G", "60G", "24G", "12G", "4G")
    }
    assert by_memory["400G"].candidate.stage <= 1  # type: ignore[union-attr]
    names = [None if each is None else each.candidate.name for each in by_memory.values()]
    assert names[-2] is not None and "optimizer cpu" in names[-2] and names[-1] is None
    for memory, each in by_memory.items():
        assert each is None or each.memory.device_total < parse_bytes(memory)


def test_of_the_fitting_ones_the_fastest_is_taken_and_of_equals_the_first() -> None:
    plan = planned("8b", Training(length=1024), device_memory="60G")
    fitting = [each for each in plan.estimates if each.fits]
    assert plan.chosen in fitting
    best = max(each.tokens_per_s for each in fitting)
    first = next(each for each in fitting if each.tokens_per_s * ALIKE >= best)
    assert plan.chosen is first and choose([]) == ([], None)
    lines = reasoning(plan)
    assert len(lines) == len(plan.estimates) and sum(line.endswith("; chosen") for line in lines) == 1


def test_streaming_is_taken_where_it_is_the_only_or_the_fastest_way(tmp_path: Path) -> None:
    """8 billion parameters on a device that holds none of them: 16 bytes per parameter in host memory, or 14."""
    model = of_size("8b")
    training = Training(length=1024, checkpointing=True, nvme_path=str(tmp_path))
    plain, streaming = (f"stage 3, optimizer cpu, parameters cpu{more}, checkpointing" for more in ("", ", streaming"))

    def planned_with(host_memory: str, training: Training) -> RankedPlans:
        machine = {"gpu": "gh200", "gpus_per_node": 1, "device_memory": "12G"}  # one GPU has the host's memory alone
        return planned("", training, model, **machine, host_memory=host_memory, disk="2T")

    only = planned_with("125G", replace(training, nvme_path=None))
    assert [each.candidate.name for each in only.estimates if each.fits] == [streaming] == [only.chosen.candidate.name]  # type: ignore[union-attr]
    _, host = sums(only)
    *parts, total, limit = (float(number) for number in re.findall(r"([\d.]+) GB", host))
    assert host.startswith("a host: 16.0 GB parameters + 16.0 GB gradients") and "optimizer" in host
    assert sum(parts) == pytest.approx(total, abs=0.3) and total < limit
    assert as_dict(only)["sums"] == list(sums(only)) and host in shown(only)

    fastest = planned_with("125G", training)  # a drive would be just as good
    by_name = {each.candidate.name: each for each in fastest.estimates if each.fits}
    assert fastest.chosen is by_name[streaming] and len(by_name) > 1
    assert all(each.seconds > 5 * fastest.chosen.seconds for name, each in by_name.items() if name != streaming)

    more = planned_with("160G", training)  # masters that need not be joined are updated faster
    by_name = {each.candidate.name: each for each in more.estimates if each.fits}
    assert more.chosen is by_name[plain] and by_name[streaming].seconds > ALIKE * by_name[plain].seconds

    less = planned_with("100G", replace(training, nvme_path=None))
    assert less.chosen is None and not list(sums(less))
    needed = [float(number) for number in re.findall(r"([\d.]+) GB of host memory", reasoning(less)[-1])]
    assert len(needed) == 3 and needed[1] > less.hardware.host_limit / 1e9 >= needed[2]
    assert 'clipping "last_norm"' in reasoning(less)[-1] and reasoning(less)[-1].endswith("changes the training")


def test_updates_beside_backward_are_hidden_behind_it(tmp_path: Path) -> None:
    """With a ds.json that keeps no gradient, the host updates during backward, and not after it."""
    model, seconds = of_size("1b"), {}
    for clipping in ("exact", "last_norm"):
        config = ds_config(Candidate(3, "cpu", "cpu", streams=True), Training())
        config |= {"bf16": {"enabled": True, "check_grad_overflow": clipping == "exact"}, "gradient_clipping": 1.0}
        config["hf_zero"] = {"streaming": {"enabled": True, "clipping": clipping}}
        given, machine = load_config(config), hardware({"gpu": "h100", "gpus_per_node": 1, "host_memory": "64G"})
        training = Training(length=8192, checkpointing=True)
        [yours] = make_plan(model, machine, training_of(given, training, 1), given).yours
        seconds[clipping] = yours.seconds
        assert (yours.memory.host.get("gradients", 0) > 0) == (clipping == "exact")
    assert seconds["last_norm"] < 0.8 * seconds["exact"]


def test_what_lacks_is_named() -> None:
    plan = planned("70b", Training(length=512, checkpointing=True), gpus_per_node=1, host_memory="64G")
    assert plan.chosen is None
    text = "\n".join(reasoning(plan))
    assert "of device memory (" in text and "of host memory for 1 rank(s)" in text
    assert "nothing fits" in text and "--nvme-path" in text
    said = shown(plan)
    assert said.startswith("nothing fits") and "bound by" not in said  # an empty table gave no reason


def test_a_hundred_thousand_ranks_answer_in_seconds() -> None:
    model = load_model("70b")
    started = time.process_time()
    plan = planned("", Training(length=4096), model, nodes=12_500)
    assert time.process_time() - started < 8
    assert plan.hardware.ranks == 100_000 and plan.chosen is not None
    plain = next(each for each in plan.estimates if each.candidate.name == "stage 3, checkpointing")
    assert plain.traffic.across > 10 * plain.traffic.within
    assert plan.chosen.candidate.second_shard == 8 and plan.chosen.traffic.across < plain.traffic.across / 2


def test_the_work_of_a_plan_does_not_grow_with_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """For 70B on 1,024 ranks only a few layers are run, with and without checkpointing, and there are no more parameter
    layouts than for 16 ranks (which also try parts of the states on the host)."""
    calls = Counter[str]()
    layers: list[int] = []
    trace_step = model_module.trace_step

    def counted(name: str, function: Any) -> Any:
        def wrapper(*arguments: Any, **more: Any) -> Any:
            calls[name] += 1
            return function(*arguments, **more)

        return wrapper

    def traced(module: Any, *arguments: Any, **more: Any) -> Any:
        layers.append(len(module.model.layers))
        return trace_step(module, *arguments, **more)

    monkeypatch.setattr(model_module, "trace_step", traced)
    for name in ("plan_units", "plan_layout"):
        monkeypatch.setattr(memory_module, name, counted(name, getattr(memory_module, name)))
    work = []
    for nodes in (128, 2):  # one model each: traces and layouts are cached per model
        calls.clear()
        assert planned("", Training(length=4096), load_model("70b"), nodes=nodes).hardware.ranks == 8 * nodes
        work.append((len(layers), dict(calls)))
        assert set(layers) == {model_module.FEW}
        layers.clear()
    (many, layouts_of_many), (few, layouts_of_few) = work
    assert many == few == 2 and all(layouts_of_many[name] <= number for name, number in layouts_of_few.items())


def test_sizes_and_machines() -> None:
    assert [parse_bytes(text) for text in ("80G", "1.5T", "24GiB", "5e10")] == [80e9, 1.5e12, 24 * 2**30, 5e10]
    with pytest.raises(ConfigError, match="number of bytes"):
        parse_bytes("much", "--disk")
    with pytest.raises(ConfigError, match="speed and memory are not known"):
        hardware({"gpu": "abacus"})
    assert hardware({"gpu": "abacus", "device_memory": "10G"}).device_memory == 10e9
    here = hardware({"gpu": "cpu", "gpus_per_node": 4, "host_memory": "8G"})
    assert (here.device_memory, here.separate, here.limit) == (2e9, False, 1.3e9)
    measured = calibrated(here, "fp32")
    assert 1e8 < measured.gpu.flops < 1e13 and 1e8 < measured.gpu.link < measured.gpu.memory < 1e12
    assert "measured on this machine" in measured.notes[-1]
    assert hardware({"gpu": "NVIDIA A100-SXM4-80GB"}).gpu == GPUS["a100"]
    assert hardware({"gpu": "NVIDIA A100-SXM4-40GB"}).gpu == hardware({"gpu": "a100-40"}).gpu == GPUS["a100-40"]
    assert all(each.num_bytes > 0 for each in found_accelerators())


def test_updates_in_host_memory_are_measured_where_the_accelerator_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers differ by a factor of ten in the bandwidth of their memory, which decides what offload costs."""
    monkeypatch.setattr(update_speed, "_NUMEL", 1 << 12)
    monkeypatch.setattr(machine, "current_device", lambda: torch.device("cuda:0"))
    monkeypatch.setattr(machine, "_flops", lambda device, dtype: 5e14)
    monkeypatch.setattr(machine, "_bytes_per_s", lambda device: 2e12)
    assumed = hardware({"gpu": "h100", "gpus_per_node": 8})
    measured = calibrated(assumed, "bf16")
    assert measured.host_memory_per_s > 0 and measured.host_memory_per_s != assumed.host_memory_per_s
    assert "GB/s of host memory in updates" in measured.notes[-1]


def test_a_name_that_only_contains_a_known_one_is_another_gpu() -> None:
    """`--gpu h1000` was planned as an H100, and a GH200 as an H200."""
    with pytest.raises(ConfigError, match="Did you mean h100"):
        hardware({"gpu": "h1000"})
    assert hardware({"gpu": "NVIDIA GH200 480GB"}).gpu == GPUS["gh200"]


def test_host_memory_of_a_machine_elsewhere() -> None:
    """The memory of the planning laptop was used, so that nothing could be offloaded on eight H100. A given amount was
    used in full, so that 998 of 1000 GB fitted, without room for the system and the data loaders' processes."""
    elsewhere = hardware({"gpu": "h100", "gpus_per_node": 8})
    assert elsewhere.host_memory == 8 * GPUS["h100"].host_memory
    assert any("assumed for such machines" in note for note in elsewhere.notes)
    given = hardware({"gpu": "h100", "gpus_per_node": 8, "host_memory": "1T"})
    assert given.host_limit == pytest.approx(926e9) and not given.notes


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, page, written = config_folder(tmp_path / "model"), tmp_path / "plan.html", tmp_path / "ds.json"
    words = ["plan", config, "--gpu", "h100", "--gpus-per-node", "1", "--seq-length", "64", "--html", str(page)]
    words += ["--micro-batch", "1"]
    assert main([*words, "--write", str(written), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["chosen"] == "stage 0" and found["model"]["parameters"] > 0
    assert json.loads(written.read_text()) == found["config"]
    assert main(["explain", str(written)]) == 0
    assert main([*words, "--all"]) == 0
    said = capsys.readouterr().out
    assert "stage 2, optimizer cpu" in said and "--per_device_train_batch_size 1 --bf16 true" in said
    assert main(["plan", config, "--micro-batch", "0"]) == 2 and "--micro-batch" in capsys.readouterr().err


def test_a_config_json_by_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text((Path(config_folder(tmp_path / "m")) / "config.json").read_text())
    assert load_model(str(tmp_path / "mine.json")).num_parameters == load_model(str(tmp_path / "m")).num_parameters
    (tmp_path / "mine.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be used"):
        load_model(str(tmp_path / "mine.json"))


@pytest.fixture(scope="module")
def plan() -> RankedPlans:
    return planned("8b", Training(length=1024, nvme_path="/d"), device_memory="24G", disk="1T")


def test_the_page_fetches_nothing(plan: RankedPlans) -> None:
    page = as_html(plan)
    assert not re.search(r"<script|<link|<img|https?://|url\(|@import", page)
    assert page.count('class="row') == len(plan.estimates) and "limit: " in page
    assert "Use <strong>" in page and plan.chosen is not None and plan.chosen.candidate.name in page


def test_bars_that_are_longer_than_is_drawn_are_drawn_as_cut(plan: RankedPlans) -> None:
    """Stage 0 of a large model looked as if it needed no more than a model that almost fits."""
    page = as_html(plan)
    largest = max(plan.estimates, key=lambda each: each.memory.device_total)
    cut = f'<div class="cut" title="{gigabytes(largest.memory.device_total)}: longer than drawn">'
    assert largest.memory.device_total > 1.6 * plan.hardware.limit and cut in page
    assert 0 < page.count('class="cut"') < len(plan.rows)


def test_what_can_be_seen_at_once_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without peft was only told so after the model had been built."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "hf_zero.planning.command", None)  # importing it now fails
    with pytest.raises(SystemExit):
        main(["plan", "8b", "--lora-rank", "8"])


@pytest.mark.parametrize("others", [(), ("--lora-rank", "8", "--measure", "1")])
def test_what_has_no_base_in_4_bit_is_refused(others: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "8b", "--base-bits", "4", *others])
    assert "--base-bits: " in capsys.readouterr().err


@pytest.mark.parametrize("bits", [(), ("--base-bits", "8")])
def test_what_has_no_scales_per_block_is_refused(bits: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "8b", "--lora-rank", "8", "--double-quant", *bits])
    assert "--double-quant: " in capsys.readouterr().err


def test_ranks_do_not_share_the_matrices_of_a_base_in_4_bit(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "8b", "--lora-rank", "8", "--base-bits", "4", "--gpu", "4090", "--gpus-per-node", "2"]
    assert main([*words, "--tensor-parallel", "2"]) == 2
    assert "--base-bits" in capsys.readouterr().err
    assert main([*words, "--device-memory", "2G"]) == 1  # what would make it fit is searched


def test_a_hub_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hub's library retried for half a minute, and the error did not mention that `8b` is also a model."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "https://127.0.0.1:9")
    monkeypatch.setattr("hf_zero.explain.views.getproxies", dict)
    with pytest.raises(ConfigError, match="the hub cannot be reached(.|\n)*the number of parameters: 8b"):
        config_file("nobody/Model-8B")


def test_json_has_what_the_table_has(plan: RankedPlans) -> None:
    found = json.loads(json.dumps(as_dict(plan)))
    assert [each["name"] for each in found["candidates"]] == [each.candidate.name for each in plan.estimates]
    for each in found["candidates"]:
        assert each["device_total"] == sum(each["device"].values()) and each["fits"] == (not each["lacks"])


def test_groups_within_hosts(tmp_path: Path) -> None:
    """On several hosts: a replica per host sends less between hosts but needs more memory; hpZ gathers within hosts."""
    slow = {"nodes": 4, "gpus_per_node": 4, "network": "1G", "gpu": "h100"}
    found = {
        each.candidate.name: each for each in planned("2b", Training(length=64, checkpointing=True), **slow).estimates
    }
    plain, hybrid, second = (found[f"stage 3{group}, checkpointing"] for group in ("", ", a copy per host", ", hpZ 4"))
    assert second.traffic.across < plain.traffic.across and hybrid.traffic.across < plain.traffic.across
    kept, by_copy = (sum(each.memory.device[kind] for kind in ("parameters", "optimizer")) for each in (plain, hybrid))
    assert by_copy == pytest.approx(4 * kept, rel=0.01)
    assert second.memory.device["parameters"] == pytest.approx(4 * plain.memory.device["parameters"], rel=0.05)
    assert max(second.seconds, hybrid.seconds) < plain.seconds
    assert hybrid.config["hf_zero"] == {"shard_group": "host"}
    assert second.config["zero_optimization"]["zero_hpz_partition_size"] == 4
    assert not any(each.candidate.copy_per_host for each in planned("2b").estimates)


def test_what_would_make_it_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each remedy is added to the previous ones, with the sums of candidates, the cheapest first."""
    machine = {"gpu": "abacus", "device_memory": "1.9G", "gpus_per_node": 4}
    plan = planned("350M", Training(length=8192, micro_batch=2), **machine)
    least = min(plan.estimates, key=lambda each: each.memory.device_total)
    found = list(remedies(plan, least))
    assert [each.what.split()[0] for each in found][0] == "a" and "sequence_parallel_size 4" in found[-1].what
    assert "activation_checkpointing.cpu_checkpointing" in [each.what for each in found]
    sizes = [least.memory.device_total, *(each.device for each in found)]
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] < sizes[0] / 3
    asked: list[tuple[Any, ...]] = []

    def again(*given: Any) -> list[show_module.Remedy]:
        """Returns the cached result, because computing it takes seconds."""
        asked.append(given)
        return found

    monkeypatch.setattr(show_module, "remedies", again)
    last = reasoning(plan)[-1]
    assert asked == [(plan, least)] and ("which fits" in last or "more devices" in last)
