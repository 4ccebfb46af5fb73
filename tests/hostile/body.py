"""One rank's part of a hostile program, without process globals and own collectives: a rank may be a thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import hf_zero
from tests.hostile.model import Root, build_model, run_calls, two_losses
from tests.hostile.spec import Forward, Program, RankMicro

RATES = {"sgd": 0.01, "adamw": 0.01}
WEIGHT_DECAY = 0.1
# Intentionally large for Adam: it bounds how far rounding in a gradient near zero can move a weight (rate / eps).
EPS = 1e-3

# (model, optimizer, config) -> engine
MakeEngine = Callable[[nn.Module, torch.optim.Optimizer, dict[str, Any]], Any]
TwoLosses = tuple[Tensor, Tensor]
Read = Callable[[Tensor], Any]


@dataclass(frozen=True)
class RankResult:
    """A rank's observations: both losses of every forward in their order, the norm of every update, and the final
    weights."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    weights: dict[str, Tensor]


def make_zero_engine(model: nn.Module, optimizer: torch.optim.Optimizer, config: dict[str, Any]) -> Any:
    """The engine as a script creates it."""
    return hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]


def run_rank(
    program: Program, rank: int, make_engine: MakeEngine, folder: str = "/tmp", read: Read = Tensor.item
) -> RankResult:
    """Runs one rank's part of `program`. `folder` is for offload to a drive; `read` reads the loss of a forward."""
    model = build_model(program)
    engine = make_engine(model, make_optimizer(program, model), ds_config(program, folder))
    losses: list[float] = []
    norms: list[float] = []
    for step in program.steps:
        for micro in step:
            losses += play(micro.ranks[rank], micro.backward, _Driver(engine, program, read))
            engine.step()
        norms.append(float(engine.get_global_grad_norm()))
    with hf_zero.gathered(engine.module):
        weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    engine.destroy()
    return RankResult(tuple(losses), tuple(norms), weights)


class _Driver:
    """Forward, evaluation and backward with an engine."""

    def __init__(self, engine: Any, program: Program, read: Read) -> None:
        self.read = read
        self._engine = engine
        self._program = program

    def forward(self, batch: Forward) -> TwoLosses:
        return forward(self._engine, self._engine.module, self._program, batch)

    def evaluate(self, batch: Forward) -> TwoLosses:
        self._engine.eval()
        with torch.no_grad():
            losses = self.forward(batch)
        self._engine.train()
        return losses

    def backward(self, loss: Tensor, retain_graph: bool) -> None:
        self._engine.backward(loss, retain_graph=retain_graph)


def forward(wrapped: nn.Module, model: Root, program: Program, batch: Forward) -> TwoLosses:
    """Both losses of a batch, through `wrapped`, or by calling the modules of `model` directly."""
    generator = torch.Generator().manual_seed(batch.seed)
    dtype = next(model.parameters()).dtype
    x = torch.randn(batch.rows, program.width, generator=generator).to(dtype).requires_grad_()
    target = torch.randn(batch.rows, program.width, generator=generator).to(dtype)
    if not batch.direct:
        losses: TwoLosses = wrapped(x, target, calls=batch.calls)
        return losses
    h, tapped = run_calls(model, batch.calls, x, x)
    return two_losses(h, tapped, x, target)


def play(micro: RankMicro, backward: str, driver: Any) -> list[float]:
    """Runs a rank's forwards, evaluations and backwards of one micro-batch; returns all losses."""
    seen: list[float] = []

    def noted(losses: TwoLosses) -> TwoLosses:
        seen.extend(driver.read(loss) for loss in losses)
        return losses

    def evaluate(place: str) -> None:
        if micro.evaluate == place:
            for batch in micro.evaluations:
                noted(driver.evaluate(batch))

    evaluate("first")
    graphs: list[TwoLosses] = []
    for batch in micro.forwards:
        graphs.append(noted(driver.forward(batch)))
        if backward == "each":
            evaluate("between")
            driver.backward(sum(graphs.pop()), False)
    if backward != "each":
        evaluate("between")
    for loss, retain_graph in _backwards(graphs, backward):
        driver.backward(loss, retain_graph)
    evaluate("last")
    return seen


def _backwards(graphs: list[TwoLosses], backward: str) -> Iterator[tuple[Tensor, bool]]:
    """(loss, whether its graph is needed again) of the backwards after all forwards."""
    if backward == "sum":
        yield torch.stack([loss for losses in graphs for loss in losses]).sum(), False
        return
    for first, second in reversed(graphs) if backward == "late_reversed" else graphs:
        if backward == "split":
            yield first, True
            yield second, False
        else:
            if backward == "retain":
                yield first + second, True
            yield first + second, False


def make_optimizer(program: Program, model: nn.Module) -> torch.optim.Optimizer:
    """Weight decay for matrices only."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed = [parameter for parameter in trained if parameter.dim() > 1]
    spared = [parameter for parameter in trained if parameter.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": spared, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    if program.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=RATES["sgd"], momentum=0.9)
    return torch.optim.AdamW(groups, lr=RATES["adamw"], eps=EPS)


def ds_config(program: Program, folder: str) -> dict[str, Any]:
    """The program's ds.json."""
    zero: dict[str, Any] = {"stage": program.stage, "overlap_comm": program.overlap}
    if program.reduce_bucket is not None:
        zero["reduce_bucket_size"] = program.reduce_bucket
    if program.stage == 3:
        if program.groups != "none":
            zero["zero_hpz_partition_size" if program.groups == "hpz" else "mics_shard_size"] = 2
        limits = {
            "stage3_prefetch_bucket_size": program.limits.prefetch,
            "stage3_max_live_parameters": program.limits.max_live,
            "stage3_max_reuse_distance": program.limits.max_reuse,
            "stage3_param_persistence_threshold": program.limits.param_persistence,
            "stage3_model_persistence_threshold": program.limits.model_persistence,
        }
        zero |= {key: value for key, value in limits.items() if value is not None}
        if program.leaves:
            zero["leaf_module"] = {"names": list(program.leaves)}
    what, _, device = program.offload.partition("_")
    place = {"device": device, **({"nvme_path": folder} if device == "nvme" else {})}
    if what in ("optimizer", "both"):
        zero["offload_optimizer"] = place
    if what in ("param", "both"):
        zero["offload_param"] = {**place, **({"max_in_cpu": 0} if device == "nvme" else {})}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": program.accumulation,
        "gradient_clipping": program.clip,
        "zero_optimization": zero,
    }
