"""Random jobs: `random_job(seed)` always gives the same one. All are valid: unsupported combinations are not drawn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from random import Random

from tests.metamorphic.spec import (
    DRIVERS,
    EDITS,
    GROUPS,
    HOOKS,
    OFFLOADS,
    OWN_OPTIMIZERS,
    PENALTIES,
    PLAIN,
    PROBES,
    RECOMPUTATIONS,
    RESETS,
    ROWS,
    TILES,
    Job,
    Run,
    Shape,
    Task,
)

LOSS_SCALES = (10, 10, 10, 26)  # 2**26 overflows in fp16: updates are skipped until the scale is small enough
# Arithmetic that depends on how ranks partition vectors or sum, or that makes full steps from small differences.
SHAPED = ("AdamW8bit", "OneBitAdam")
WORLDS = (1, 2, 2, 2, 3, 4)


def random_job(seed: int) -> Job:
    draw = Random(f"metamorphic:{seed}")
    task = _task(draw, seed)
    if task.driver == "own":
        return _own_job(draw, task)
    reference = _shape(draw, task)
    number = 1 if draw.random() < 0.7 else 2
    return Job(task, (Run(reference), *(_variant(draw, task, reference) for _ in range(number))))


def _task(draw: Random, seed: int) -> Task:
    driver = draw.choices(DRIVERS, (45, 45, 5, 5))[0]
    if driver == "own":
        return _own_task(draw, seed)
    # Trainer cannot save plain modules that share a weight.
    models, weights = ("llama", "gpt2", "qwen3", "mixtral", "mlp"), (5, 2, 2, 2, 0 if driver == "trainer" else 2)
    model = draw.choices(models, weights)[0]
    optimizers = ("AdamW", "SGD", "Lion", "Adagrad", "Lamb", "Muon", "Adafactor", "AdamW8bit", "OneBitAdam", "Adam")
    features = ("", "curriculum", "random_ltd", "layer_drop", "compression")
    # Rounding to 16 bits routes tokens to other experts.
    precision = "fp32" if model == "mixtral" else draw.choices(("fp32", "bf16", "fp16"), (6, 2, 2))[0]
    task = Task(
        seed=seed,
        driver=driver,
        model=model,
        updates=draw.choice((2, 3, 3, 4)),
        precision=precision,
        optimizer=draw.choices(optimizers, (40, 15, 5, 5, 5, 5, 5, 5, 3, 7))[0],
        clip=draw.choice((0.0, 0.3, 1.0)),
        schedule=draw.random() < 0.4,
        feature="" if model in ("mlp", "mixtral") else draw.choices(features, (12, 2, 2, 2, 2))[0],
        adapters=model != "mlp" and draw.random() < 0.2,
        uneven=driver == "trainer" and model != "mlp" and draw.random() < 0.5,
        scale_power=draw.choice(LOSS_SCALES) if precision == "fp16" else 10,
        num_evaluated=draw.choice((3, 5, 7, 12)),
    )
    if draw.random() < 0.06 and task.optimizer == "AdamW":
        task = replace(task, wire=draw.choice(("weights", "gradients")))
    return task


# Only these fields of a task are for programs with their own loop, and only these of a shape.
OWN_FIELDS = ("groups", "penalty", "resets", "hooks", "probe", "edit", "grows")


def _own_task(draw: Random, seed: int) -> Task:
    while True:
        model = draw.choices(("mlp", "encoder", "normed", "llama"), (4, 3, 2, 2))[0]
        task = Task(
            seed=seed,
            driver="own",
            model=model,
            updates=draw.choice((3, 3, 4)),
            precision=draw.choices(("fp32", "bf16"), (3, 2))[0],
            optimizer=draw.choice(OWN_OPTIMIZERS),
            clip=draw.choice((0.0, 0.3, 1.0)),
            schedule=draw.random() < 0.5,
            adapters=model == "llama" and draw.random() < 0.5,
            groups=draw.choice(GROUPS),
            penalty=draw.choice(("", *PENALTIES)),
            resets=draw.choice(("", "", "", *RESETS)),
            hooks=draw.choice(("", "", "", *HOOKS)),
            probe=draw.choice(("", "", *PROBES)),
            edit=draw.choice(("", "", "", *EDITS)),
            grows=draw.random() < 0.25,
        )
        if problem(task, Shape(stage=PLAIN)) is None:
            return task


def _own_job(draw: Random, task: Task) -> Job:
    """First without an engine, on as many ranks and with as many micro-batches if results depend on them."""
    reference = replace(_own_shape(draw, task), stage=PLAIN, offload="none", small=False, recompute="", at_init=False)
    runs = [Run(reference)]
    for _ in range(1 if draw.random() < 0.6 else 2):
        first, second = (_between(draw, _own_shape(draw, task, reference)) for _ in range(2))
        resumes = draw.random() < 0.3 and (task.model != "normed" or first.world == 1)  # files have rank 0's statistics
        runs.append(Run(first, draw.randrange(1, task.updates), second) if resumes else Run(first))
    return Job(task, tuple(runs))


def _own_shape(draw: Random, task: Task, reference: Shape | None = None) -> Shape:
    while True:
        stage = draw.choices((0, 1, 2, 3), (2, 2, 3, 6))[0]
        shape = Shape(
            world=draw.choice((1, 2, 2)),
            stage=stage,
            accumulation=draw.choice((1, 1, 2, 3)),
            offload=draw.choices(OFFLOADS, (12, 2, 1, 1, 1, 1))[0],
            recompute=draw.choice(("", "", *RECOMPUTATIONS)),
            small=draw.random() < 0.5,
            overlap=draw.random() < 0.7,
            at_init=stage == 3 and draw.random() < 0.4,
        )
        if task.model == "normed" and reference is not None:
            shape = replace(shape, world=reference.world, accumulation=reference.accumulation)
        if problem(task, shape) is None:
            return shape


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
            experts=draw.choice((1, 2, 4)) if task.model == "mixtral" else 1,
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
    yield from _problems_of_own(task, shape)
    if shape.world % (shape.tensor * shape.sequence) or ROWS % (shape.data_ranks * shape.accumulation):
        yield "the ranks, or the samples, cannot be divided like that"
    if shape.stage < 3 and (shape.offload.startswith(("param", "both")) or shape.gather_group):
        yield "weights are whole below stage 3"
    if shape.stage == 0 and (shape.offload.endswith("nvme") or shape.shard_group):
        yield "nothing is sharded at stage 0"
    groups = [group for group in (shape.shard_group, shape.gather_group) if group]
    same_parts = shape.world // shape.tensor
    if any(same_parts % group for group in groups) or same_parts == 1 and groups:
        yield "groups divide the ranks with the same parts of matrices"
    if shape.gather_group and shape.shard_group and shape.shard_group % shape.gather_group:
        yield "gather groups lie in shard groups"
    parts = shape.tensor > 1 or shape.sequence > 1
    if task.model in ("mlp", "encoder", "normed") and (parts or shape.tiles):
        yield "an MLP has neither heads nor tokens"
    if parts and (task.feature or task.optimizer not in ("AdamW", "Adam", "SGD") or task.wire):
        yield "kept apart from parts"
    yield from _problems_of_experts(task, shape)
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


def _problems_of_experts(task: Task, shape: Shape) -> Iterator[str]:
    if task.model == "mixtral" and (task.precision != "fp32" or task.feature or shape.tiles in ("mlp", "both")):
        yield "other roundings route to other experts; experts have no MLP of tokens in order"
    if shape.experts == 1:
        return
    if task.model != "mixtral" or shape.stage < 1 or shape.experts % shape.tensor:
        yield "experts are distributed from stage 1 on, over whole tensor groups"
    if shape.world % (shape.experts * shape.sequence):
        yield "the ranks of an expert group have different samples"
    if shape.shard_group and shape.shard_group * shape.tensor % (shape.experts * shape.sequence):
        yield "each copy of the states has all experts"
    if task.optimizer in ("Lamb", "Adafactor", "OneBitAdam") or task.wire:
        yield "ranks hold shards of different parameters"


def _problems_of_own(task: Task, shape: Shape) -> Iterator[str]:
    """Of programs with a loop of their own, and of what only these do."""
    plain = Task(task.seed)
    if task.driver != "own":
        if any(getattr(task, name) != getattr(plain, name) for name in OWN_FIELDS) or shape.at_init:
            yield "only a loop of its own does this"
        if shape.stage == PLAIN or task.model in ("encoder", "normed"):
            yield "only loops of their own run without an engine, and have these models"
        return
    if task.optimizer not in OWN_OPTIMIZERS or task.precision == "fp16" or task.feature or task.uneven or task.wire:
        yield "the own loop does not do that"
    if shape.tensor * shape.sequence > 1 or shape.shard_group or shape.gather_group or shape.tiles:
        yield "the own loop is data-parallel"
    if shape.at_init and (shape.stage != 3 or task.adapters):
        yield "zero.Init is about stage 3, and adapters are added later"
    if shape.at_init and task.model == "llama" and task.precision == "bf16":
        yield "transformers draws other random numbers in bf16"
    if task.model == "mlp" and task.optimizer == "ScheduleFree" and (task.edit == "masters" or task.resets == "zero"):
        yield "in flat shards unused parameters have states, too, and eval() moves towards them"
    if shape.recompute and (task.model in ("encoder", "normed") or task.probe or task.penalty == "gradient"):
        yield "recomputation is not differentiated twice, nor by torch.func"
    if task.model == "llama" and (task.probe or task.penalty == "gradient"):
        yield "tokens have no gradient"
    if task.penalty == "gradient" and task.model != "mlp":
        yield "attention has no second derivative on CPUs, and statistics depend on all samples"
    if task.penalty == "frozen" and task.model not in ("mlp", "encoder"):
        yield "no frozen weight has the shape of a trained one"
    if task.model == "encoder" and task.precision == "bf16" and task.optimizer in ("AdamW", "RAdam"):
        yield "the gradient of the key's bias is rounding error, which these divide by itself"
    if task.model == "normed" and (task.probe or shape.micro_batch < 3):
        yield "statistics of a sample, or changed by a probe"
    if task.edit == "masters" or task.optimizer == "Lookahead":
        is_elsewhere = task.optimizer == "Trust" and shape.stage > 0 and shape.world > 1
        if is_elsewhere or shape.offload.endswith("nvme"):
            yield "masters that are not in memory between steps cannot be written to"
    if task.hooks.endswith("post") and shape.recompute == "reentrant":
        yield "a backward within the backward calls it, and then the penalty's once more"
    if task.hooks.endswith("post") and (shape.accumulation > 1 or task.grows):
        yield "without an engine such a hook sees the sum of micro-batches"


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
