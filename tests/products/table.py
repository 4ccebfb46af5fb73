"""Combinations of features: configs, rejected ones, sets that cover every pair or triple, and their training.

python -m tests.products            trains every pair on four and on two ranks, and writes docs/products.md
python -m tests.products --all      also every triple on four ranks and every pair on eight
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import deepspeed
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from hf_zero.config import ConfigError, resolve
from tests.mesh.training import differences, train
from tests.support.one_process import CLIP, RATE, Trained, batches, in_one_process
from tests.support.ranks import run_ranks
from tests.tensor.models import model_of

WORLD, STEPS = 4, 5
AT_ONCE = 12  # products that the same ranks train one after the other
MOOT = "without effect"
TOLERANCES: dict[str, float] = {"fp32": 1e-5, "bf16": 5e-2}
VALUES: dict[str, tuple[str, ...]] = {
    "stage": ("0", "1", "2", "3"),
    "states": ("over all ranks", "in copies", "hpZ"),
    "tensor": ("1", "2"),
    "sequence": ("1", "2"),
    "expert": ("1", "2"),
    "accumulation": ("1", "2"),
    "checkpointing": ("off", "on"),
    "offload": ("none", "optimizer", "optimizer and weights"),
    "precision": ("fp32", "bf16"),
    "LoRA": ("off", "on"),
}
Product = tuple[str, ...]  # one of each, in this order
Choice = tuple[tuple[str, str], ...]  # of some of the names


def named(product: Product) -> dict[str, str]:
    return dict(zip(VALUES, product, strict=True))


def config_of(product: Product) -> dict[str, Any]:
    chosen = named(product)
    zero: dict[str, Any] = {"stage": int(chosen["stage"])}
    if chosen["stage"] == "3":
        zero["stage3_param_persistence_threshold"] = 0  # small parameters would stay gathered
    own: dict[str, Any] = {}
    if chosen["states"] == "in copies":
        own["shard_group"] = 2 // int(chosen["tensor"])
    if chosen["states"] == "hpZ":
        zero["zero_hpz_partition_size"] = 2
    if chosen["offload"] != "none":
        zero["offload_optimizer"] = {"device": "cpu"}
    if chosen["offload"] == "optimizer and weights":
        zero["offload_param"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": int(chosen["accumulation"]),
        "gradient_clipping": CLIP,
        "bf16": {"enabled": chosen["precision"] == "bf16"},
        "zero_optimization": zero,
        "tensor_parallel": {"autotp_size": int(chosen["tensor"])},
        "sequence_parallel_size": int(chosen["sequence"]),
        "expert_parallel": {
            "enabled": chosen["expert"] != "1",
            "autoep_size": int(chosen["expert"]),
            "expert_tensor_parallel_size": int(chosen["tensor"]) if chosen["expert"] != "1" else 1,
        },
        "hf_zero": own,
        "log_level": "error",
    }


def refusal(product: Product, world: int) -> str | None:
    """Why a product is rejected on this number of ranks; None if it trains."""
    # Not in ds.json, and so never a reason.
    return _refusal(tuple((named(product) | {"checkpointing": "off", "LoRA": "off"}).items()), world)


@functools.cache
def _refusal(choice: Choice, world: int) -> str | None:
    chosen = dict(choice)
    product = tuple(chosen.values())
    for (name, value), stages in {
        ("states", "hpZ"): "3",
        ("states", "in copies"): "123",
        ("offload", "optimizer and weights"): "3",
    }.items():
        if chosen[name] == value and chosen["stage"] not in stages:
            return f"{name} {value}: {MOOT} at stage {chosen['stage']}, and the engine says so"
    parts = {name: int(chosen[name]) for name in ("tensor", "sequence", "expert")}
    if world % math.prod(parts.values()):
        factors = " x ".join(f"{name} {size}" for name, size in parts.items())
        return f"world size = data ranks x {factors} does not hold: {world} != n x {math.prod(parts.values())}"
    try:
        resolve(config_of(product), world_size=world)
    except ConfigError as error:
        return f"{error.problems[0].path}: {error.problems[0].rule}"
    return None


def choices_of(product: Product, order: int) -> Iterator[Choice]:
    """Its pairs (`order` 2), triples (3) and so on."""
    return itertools.combinations(zip(VALUES, product, strict=True), order)


def covering(products: Sequence[Product], order: int = 2) -> list[Product]:
    """A small subset of `products` with every pair (or triple, ...) of values that occurs in them."""
    has = {product: set(choices_of(product, order)) for product in products}
    left = set().union(*has.values())
    chosen: list[Product] = []
    while left:
        best = max(products, key=lambda product: len(has[product] & left))
        left -= has[best]
        chosen.append(best)
    return chosen


@functools.cache
def split(world: int = WORLD) -> tuple[list[Product], dict[Product, str]]:
    """(those that train, why the others do not)."""
    every = list(itertools.product(*VALUES.values()))
    refused = {product: why for product in every if (why := refusal(product, world)) is not None}
    return [product for product in every if product not in refused], refused


def _model(chosen: dict[str, str]) -> nn.Module:
    model: Any = model_of("mixtral")
    if chosen["LoRA"] == "on":
        torch.manual_seed(3)
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    return model


def together(chosen: dict[str, str], world: int) -> int:
    """Batches of an update."""
    return world // (int(chosen["tensor"]) * int(chosen["sequence"])) * int(chosen["accumulation"])


def plain_of(products: Sequence[Product], world: int, steps: int = STEPS) -> dict[tuple[str, int], Trained]:
    """The same in one process, computed once per group of equivalent products."""
    found: dict[tuple[str, int], Trained] = {}
    for chosen in map(named, products):
        key = chosen["LoRA"], together(chosen, world)
        if key not in found:
            found[key] = in_one_process(_model(chosen), batches(steps * key[1]), data_ranks=key[1])
    return found


def _engine(product: Product) -> Any:
    chosen = named(product)
    model: Any = copy.deepcopy(_model(chosen))
    if chosen["checkpointing"] == "on":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE, momentum=0.9)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config_of(product))[0]


def _trained(
    rank: int, world: int, products: list[Product], plain: dict[tuple[str, int], Trained], steps: int
) -> dict[Product, float]:
    found: dict[Product, float] = {}
    for product in products:
        chosen = named(product)
        expected = plain[chosen["LoRA"], together(chosen, world)]
        engine = _engine(product)
        trained = train(engine, batches(steps * together(chosen, world)))
        own = expected.losses[engine.groups.data.rank :: engine.groups.data.size]
        engine.destroy()
        found[product] = max(differences(trained, Trained(own, expected.norms, expected.weights)))
    return found


def largest_differences(
    products: list[Product], world: int = WORLD, timeout_s: float = 900, steps: int = STEPS
) -> dict[Product, float]:
    """The largest difference of a loss, norm or weight from one process, over all updates and ranks."""
    found: dict[Product, float] = {}
    plain = plain_of(products, world, steps)
    for start in range(0, len(products), AT_ONCE):
        some = products[start : start + AT_ONCE]
        told = run_ranks(_trained, world, world, some, plain, steps, timeout_s=timeout_s)
        found |= {product: max(each[product] for each in told) for product in some}
    return found


def wrong_ones(found: dict[Product, float]) -> dict[Product, float]:
    """Those with a difference beyond rounding."""
    return {product: worst for product, worst in found.items() if not worst <= TOLERANCES[named(product)["precision"]]}
