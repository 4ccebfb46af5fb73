"""A metamorphic job as plain frozen data, fully determined by its JSON text.

    Job
      task   what is trained: model, data, optimizer, precision, everything that results depend on
      runs   the same task in several ways; their results are compared with those of the first
               Run = one Shape, or a Shape up to some update and another one from its checkpoint

Nothing here imports torch, so that jobs can be generated, counted and reduced without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.support.as_json import AsJson

DRIVERS = ("engine", "own", "accelerate", "trainer")
MODELS = ("llama", "gpt2", "qwen3", "mixtral", "mlp", "encoder", "normed")
PRECISIONS = ("fp32", "bf16", "fp16")
OPTIMIZERS = ("AdamW", "Adam", "SGD", "Lion", "Adagrad", "Lamb", "Muon", "Adafactor", "AdamW8bit", "OneBitAdam")
# Of the data and of training; "" is none.
FEATURES = ("", "curriculum", "random_ltd", "layer_drop", "compression")
OFFLOADS = ("none", "optimizer_cpu", "param_cpu", "both_cpu", "optimizer_nvme", "both_nvme")
TILES = ("", "mlp", "loss", "both")
RECOMPUTATIONS = ("", "reentrant", "non_reentrant")
# Of programs with a loop of their own ("own"), which bring their optimizer; "" is none.
OWN_OPTIMIZERS = ("AdamW", "RAdam", "Momentum", "Trust", "ScheduleFree", "Lookahead")
GROUPS = ("one", "two", "empty", "frozen", "each")
PENALTIES = ("", "square", "norm", "product", "frozen", "inside", "gradient")
RESETS = ("", "clear", "pop", "new", "zero")
HOOKS = ("", "grad", "late_grad", "post", "late_post")
PROBES = ("", "per_sample", "saliency")
EDITS = ("", "masters", "gathered", "written", "set")
PLAIN = -1  # the "stage" of plain PyTorch
ROWS = 12  # samples of an update: divisible by many numbers of ranks and micro-batches


@dataclass(frozen=True)
class Task:
    """What is trained.

    Attributes:
        seed: of weights and data.
        driver: who calls the engine.
        updates: optimizer steps.
        clip: largest norm; 0: none.
        schedule: the learning rate has one.
        adapters: LoRA; the model's own weights are frozen.
        uneven: samples have different numbers of labels; only if the driver divides by their number.
        wire: what is quantized in communication (ZeRO++): "", "weights", "gradients".
        scale_power: the first loss scale of fp16; if large, updates are skipped until it has come down.
        num_evaluated: samples of an evaluation.
        groups: how the parameters are divided into groups of the optimizer.
        penalty: a term of the loss from weights ("gradient": from the gradient of the input).
        resets: how the states of the optimizer are reset after the first update.
        hooks: of parameters, which halve gradients; "late": registered after the engine is made.
        probe: gradients beside those of training.
        edit: how weights are changed between the first two updates.
        grows: from the second update on, an update has twice as many samples.
    """

    seed: int
    driver: str = "engine"
    model: str = "llama"
    updates: int = 3
    precision: str = "fp32"
    optimizer: str = "AdamW"
    clip: float = 0.0
    schedule: bool = False
    feature: str = ""
    adapters: bool = False
    uneven: bool = False
    wire: str = ""
    scale_power: int = 10
    num_evaluated: int = 5
    groups: str = "one"
    penalty: str = ""
    resets: str = ""
    hooks: str = ""
    probe: str = ""
    edit: str = ""
    grows: bool = False


@dataclass(frozen=True)
class Shape:
    """How it is trained, which must not matter.

    Attributes:
        stage: of ZeRO; PLAIN: data-parallel PyTorch without an engine.
        accumulation: micro-batches of an update, on every rank.
        shard_group: ranks that share the states of a replica (hybrid sharding); 0: all.
        gather_group: ranks that gather weights among themselves (hpZ); 0: all.
        tensor: tensor-parallel ranks.
        sequence: sequence-parallel ranks.
        experts: ranks that hold all experts together, whole tensor groups among them.
        small: buckets of a few elements, and all limits of stage 3 at zero.
        keeps_on_host: kept inputs of recomputed layers are stored on the host, in one buffer.
        universal: the checkpoint that this shape resumes from is first converted to DeepSpeed's universal form.
        evaluates: before every update.
        saves: a checkpoint that is never loaded, after the first update.
        at_init: the model is built under zero.Init.
    """

    world: int = 1
    stage: int = 0
    accumulation: int = 1
    offload: str = "none"
    shard_group: int = 0
    gather_group: int = 0
    tensor: int = 1
    sequence: int = 1
    experts: int = 1
    tiles: str = ""
    recompute: str = ""
    small: bool = False
    overlap: bool = True
    keeps_on_host: bool = False
    universal: bool = False
    evaluates: bool = False
    saves: bool = False
    at_init: bool = False

    @property
    def data_ranks(self) -> int:
        return self.world // (self.tensor * self.sequence)

    @property
    def micro_batch(self) -> int:
        return ROWS // (self.data_ranks * self.accumulation)


@dataclass(frozen=True)
class Run:
    """One way to train the task. With `resume_at`, `second` continues after that many updates of `first`."""

    first: Shape
    resume_at: int = 0
    second: Shape = Shape()

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return (self.first, self.second) if self.resume_at else (self.first,)


@dataclass(frozen=True)
class Job(AsJson):
    """The first run is the reference for the others."""

    task: Task
    runs: tuple[Run, ...]

    def shapes(self) -> Iterator[Shape]:
        for run in self.runs:
            yield from run.shapes


@dataclass(frozen=True)
class Segment:
    """The work of one group of ranks at a time: some updates of a run.

    Attributes:
        folder: of the run, for checkpoints and swap files.
        start: number of earlier updates; their checkpoint is in `folder`.
        stop: update after which the next segment resumes from a checkpoint, or the last one.
    """

    task: Task
    shape: Shape
    folder: str
    start: int
    stop: int


def segments(job: Job, run: Run, folder: str) -> tuple[Segment, ...]:
    if not run.resume_at:
        return (Segment(job.task, run.first, folder, 0, job.task.updates),)
    return (
        Segment(job.task, run.first, folder, 0, run.resume_at),
        Segment(job.task, run.second, folder, run.resume_at, job.task.updates),
    )
