"""Random jobs: `random_job(seed)` always gives the same one. All are valid: unsupported combinations are not drawn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from random import Random

from tests.metamorphic.spec import DRIVERS, OFFLOADS, RECOMPUTATIONS, ROWS, TILES, Job, Run, Shape, Task

LOSS_SCALES = (10, 10, 10, 26)  # 2**26 overflows in fp16: updates are skipped until the scale is small enough
# Arithmetic that depends on how ranks partition vectors or sum, or that makes full steps from small differences.
SHAPED = ("AdamW8bit", "OneBitAdam")
WORLDS = (1, 2, 2, 2, 3, 4)


def random_job(seed: int) -> Job:
    draw = Random(f"metamorphic:{seed}")
    task = _task(draw, seed)
    reference = _shape(draw, task)
    number = 1 if draw.random() < 0.7 else 2
    return Job(task, (Run(reference), *(_variant(draw, task, reference) for _ in range(number))))


def _task(draw: Random, seed: int) -> Task:
    driver = draw.choices(DRIVERS, (82, 9, 9))[0]
    # Trainer cannot save plain modules that share a weight.
    model = draw.choices(("llama", "gpt2", "qwen3", "mlp"), (5, 2, 2, 0 if driver == "trainer" else 2))[0]
    optimizers = ("AdamW", "SGD", "Lion", "Adagrad", "Lamb", "Muon", "Adafactor", "AdamW8bit", "OneBitAdam", "Adam")
    features = ("", "curriculum", "random_ltd", "layer_drop", "compression")
    precision = draw.choices(("fp32", "bf16", "fp16"), (6, 2, 2))[0]
    task = Task(
        seed=seed,
        driver=driver,
        model=model,
        updates=draw.choice((2, 3, 3, 4)),
        precision=precision,
        optimizer=draw.choices(optimizers, (40, 15, 5, 5, 5, 5, 5, 5, 3, 7))[0],
        clip=draw.choice((0.0, 0.3, 1.0)),
        schedule=draw.random() < 0.4,
        feature="" if model == "mlp" else draw.choices(features, (12, 2, 2, 2, 2))[0],
        adapters=model != "mlp" and draw.random() < 0.2,
        uneven=driver == "trainer" and model != "mlp" and draw.random() < 0.5,
        scale_power=draw.choice(LOSS_SCALES) if precision == "fp16" else 10,
        num_evaluated=draw.choice((3, 5, 7, 12)),
    )
    if draw.random() < 0.06 and task.optimizer == "AdamW":
        task = replace(task, wire=draw.choice(("weights", "gradients")))
    return task


def is_shaped(task: Task) -> bool:
    """Whether results depend on stage, ranks and micro-batches by design."""
    overflows = task.precision == "fp16" and task.scale_power > 16
    # The gradient of GPT-2's key bias is only rounding error: softmax does not depend on it.
    takes_noise = task.model == "gpt2" and task.optimizer in ("Lion", "Muon", "Adafactor")
    # Values rounded to 16 bits have another sign, or another direction, near zero.
    takes_noise |= task.precision != "fp32" and task.optimizer in ("Lion", "Muon")
    return task.optimizer in SHAPED or bool(task.wire) or overflows or task.feature == "compression" or takes_noise


def _shape(draw: Random, task: Task) -> Shape:
    while True:
        shape = Shape(
            world=draw.choice(WORLDS),
            stage=draw.choices((0, 1, 2, 3), (2, 2, 3, 5))[0],
            accumulation=draw.choice((1, 1, 2, 3)),
            offload=draw.choices(OFFLOADS, (10, 2, 1, 1, 1, 1))[0],
            shard_group=draw.choice((0, 0, 0, 0, 1, 2)),
            gather_group=draw.choice((0, 0, 0, 0, 2)),
            tensor=draw.choice((1, 1, 1, 1, 2)),
            sequence=draw.choice((1, 1, 1, 1, 2, 4)),
            tiles=draw.choice(("", "", "", *TILES)),
            recompute=draw.choice(("", "", *RECOMPUTATIONS)),
            small=draw.random() < 0.4,
            overlap=draw.random() < 0.7,
            keeps_on_host=draw.random() < 0.2,
        )
        if problem(task, shape) is None:
            return shape


def problem(task: Task, shape: Shape) -> str | None:
    """Why this job is invalid: task and shape ask for features that do not go together, according to the docs."""
    return next(_problems(task, shape), None)


def _problems(task: Task, shape: Shape) -> Iterator[str]:
    if shape.world % (shape.tensor * shape.sequence) or ROWS % (shape.data_ranks * shape.accumulation):
        yield "the ranks, or the samples, cannot be divided like that"
    if shape.stage < 3 and (shape.offload.startswith(("param", "both")) or shape.gather_group):
        yield "weights are whole below stage 3"
    if shape.stage == 0 and (shape.offload.endswith("nvme") or shape.shard_group):
        yield "nothing is sharded at stage 0"
    groups = [group for group in (shape.shard_group, shape.gather_group) if group]
    if any(shape.world % group for group in groups) or shape.world == 1 and groups:
        yield "groups divide the ranks"
    if shape.gather_group and shape.shard_group and shape.shard_group % shape.gather_group:
        yield "gather groups lie in shard groups"
    if shape.tensor > 1 and (groups or shape.sequence > 1):
        yield "parts of matrices go with neither groups nor parts of sequences"
    parts = shape.tensor > 1 or shape.sequence > 1
    if task.model == "mlp" and (parts or shape.tiles):
        yield "an MLP has neither heads nor tokens"
    if parts and (task.feature or task.optimizer not in ("AdamW", "Adam", "SGD") or task.wire):
        yield "kept apart from parts"
    if task.driver == "trainer" and shape.data_ranks > 1 and shape.accumulation % shape.sequence:
        yield "the batches that ranks of a sequence load come one after the other: updates would see other samples"
    if task.driver == "accelerate" and shape.sequence > 1:
        yield "the loop of accelerate's page for sequences is another one"
    if task.feature == "compression" and shape.tiles in ("mlp", "both"):
        yield "both act on the MLP"
    if task.optimizer == "OneBitAdam" and (shape.stage > 1 or groups or shape.offload != "none"):
        yield "1-bit optimizers: stages 0 and 1"
    if shape.keeps_on_host and (not shape.recompute or task.model == "mlp"):
        yield "no layer of transformers keeps anything"
    if task.wire and (shape.stage < 3 or shape.world == 1):
        yield "ZeRO++ is about stage 3"


def _variant(draw: Random, task: Task, reference: Shape) -> Run:
    """Resumed at the same or another shape, in another shape, or with evaluations and saves in between."""
    kind = draw.choices(("same", "elsewhere", "shape", "between"), (25, 35, 30, 10))[0]
    if is_shaped(task) and kind in ("elsewhere", "shape"):
        kind = draw.choice(("same", "between"))
    # The error feedback of compression is saved as its mean over ranks.
    at = 1 if task.optimizer == "OneBitAdam" else draw.randrange(1, task.updates)
    if kind == "same":
        return _by_form(draw, task, Run(_between(draw, reference), at, reference))
    if kind == "between":
        return Run(replace(reference, evaluates=True, saves=draw.random() < 0.5))
    if kind == "shape":
        return Run(_between(draw, _another(draw, task, reference)))
    return _by_form(draw, task, Run(_another(draw, task, reference), at, _another(draw, task, reference)))


def _by_form(draw: Random, task: Task, run: Run) -> Run:
    """Sometimes converts to the universal form, which only has states with one value per element, of full matrices."""
    has_form = task.optimizer in ("AdamW", "Adam", "SGD", "Lion", "Adagrad", "Muon") and task.driver == "engine"
    if has_form and run.first.stage and run.first.tensor == 1 and not task.wire and draw.random() < 0.25:
        return replace(run, second=replace(run.second, universal=True))
    return run


def _between(draw: Random, shape: Shape) -> Shape:
    return replace(shape, evaluates=draw.random() < 0.2, saves=draw.random() < 0.2)


def _another(draw: Random, task: Task, reference: Shape) -> Shape:
    while True:
        shape = _shape(draw, task)
        if task.feature == "random_ltd":  # tokens are drawn for each rank and micro-batch
            shape = replace(shape, world=reference.world, accumulation=reference.accumulation)
        if task.feature == "layer_drop":  # layers are drawn for each micro-batch
            shape = replace(shape, accumulation=reference.accumulation)
        if problem(task, shape) is None:
            return shape


def features(job: Job) -> frozenset[str]:
    """The features of a job, as words to select and count by."""
    found = {f"{field.name}={getattr(job.task, field.name)}" for field in fields(Task) if field.name not in ("seed",)}
    for shape in job.shapes():
        found |= {f"{field.name}={getattr(shape, field.name)}" for field in fields(Shape)}
    for run in job.runs[1:]:
        found.add(relation(job, run))
    return frozenset(found)


def relation(job: Job, run: Run) -> str:
    """What this run varies, which must not matter."""
    reference = job.runs[0].first
    plain = [replace(shape, evaluates=False, saves=False, universal=False) for shape in run.shapes]
    if not run.resume_at:
        return "relation=between" if plain[0] == reference else "relation=shape"
    if all(shape == reference for shape in plain):
        return "relation=resumed"
    return (
        "relation=resumed at another number of ranks"
        if plain[0].world != plain[1].world
        else "relation=resumed otherwise"
    )
