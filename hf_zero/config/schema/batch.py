"""The three batch sizes: two of them determine the third, and their equation must hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from hf_zero.config.errors import ABSENT, Edit
from hf_zero.config.rules import RANKS, AnyRule, Ranks, Rule
from hf_zero.config.schema.fields import Positive, Section, supported

TRAIN, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
SEQUENCE, TENSOR = "sequence_parallel_size", "tensor_parallel.autotp_size"
_SIZE: dict[str, Any] = {
    "raises": AssertionError,
    "words": "has to be greater than 0",
    "words_for": "greater_than_equal",
}
_GIVE = f"give {MICRO} (samples per forward on one rank), or {TRAIN}, as a number"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPolicy:
    """Batch sizes: train_batch_size == micro_batch_size * accumulation_steps * number of data ranks."""

    train_batch_size: int  # samples per update; with tensor parallelism, counted once for each rank that sees them
    micro_batch_size: int  # samples per forward on one rank
    accumulation_steps: int  # forwards per update
    drop_last: bool = False  # drop an incomplete last batch; only for a loader made from training_data=


def batch_of(train: int | None, micro: int | None, steps: int | None, data_ranks: int) -> tuple[int, int, int]:
    """Return the three sizes, of which missing ones (None) are derived. They may break the equation."""
    if steps is None:
        steps = train // micro // data_ranks if train is not None and micro is not None else 1
    if micro is None:
        assert train is not None, "one of the two sizes is given"
        micro = train // data_ranks // steps
    return micro * steps * data_ranks if train is None else train, micro, steps


def _nothing_given(micro: int | None, train: int | None, ranks: Ranks) -> object:
    return micro is None and train is None and ranks.sizes is None and not {TRAIN, MICRO} & ranks.autos


def _nobody_fills(micro: int | None, train: int | None, ranks: Ranks) -> object:
    waits = {TRAIN, MICRO} & ranks.autos
    return micro is None and train is None and ranks.sizes is None and ranks.is_complete and waits


def _unequal(given_train: int | None, given_micro: int | None, given_steps: int | None, *beside: Any) -> object:
    ranks: Ranks = beside[-1]
    waits = not ranks.is_complete and {TRAIN, MICRO} & ranks.autos
    if ranks.sizes is not None or not ranks.divides or waits or (given_train is None and given_micro is None):
        return False
    data_ranks = ranks.world_size // ranks.sequence_size
    train, micro, steps = batch_of(given_train, given_micro, given_steps, data_ranks)
    if _holds(train, micro, steps, data_ranks):
        return False
    name, detail = "world size", ""
    if ranks.sequence_size > 1:
        name, detail = "data ranks", f" (world size {ranks.world_size} / {ranks.sequence_size} per sequence)"
    sizes = ((TRAIN, train, given_train), (MICRO, micro, given_micro), (STEPS, steps, given_steps))
    shown = [f"{size} ({key}{'' if given is not None else ', derived'})" for key, size, given in sizes]
    equation = f"{shown[0]} != {shown[1]} x {shown[2]} x {data_ranks} ({name}{detail}) = {micro * steps * data_ranks}"
    unit = (given_micro or 1) * (given_steps or 1) * data_ranks
    if given_micro is not None and given_steps is not None:
        how, edit = f"remove {TRAIN} (it follows: {unit}), or write {unit}", Edit((TRAIN,))
    else:
        parts = " x ".join([*(f"{key} {size}" for key, size, given in sizes[1:] if given), f"{name} {data_ranks}"])
        nearest = max(unit, round(train / unit) * unit)
        how, edit = f"give a {TRAIN} that is a multiple of {parts} = {unit}, for example {nearest}", None
    return {"value": train, "ranks": name, "equation": equation, "how": how, "edit": edit}


def _holds(train: int, micro: int, steps: int, data_ranks: int) -> bool:
    return micro >= 1 and steps >= 1 and train == micro * steps * data_ranks


class BatchSizes(Section):
    """The top-level keys of the batch."""

    train_batch_size: Positive | None = supported(None, "Samples per update, over all ranks.", unit="samples", **_SIZE)
    train_micro_batch_size_per_gpu: Positive | None = supported(
        None, "Samples per forward on one rank.", unit="samples", **_SIZE
    )
    gradient_accumulation_steps: Positive | None = supported(None, "Forwards per update.", unit="forwards", **_SIZE)

    rules: ClassVar[tuple[AnyRule, ...]] = (
        Rule(
            keys=(MICRO, TRAIN, RANKS),
            broken=_nobody_fills,
            rule='the batch size is "auto", and nothing has filled it in',
            fix="Trainer fills it from per_device_train_batch_size, Accelerate from the dataloader given to prepare() "
            f"together with the model; otherwise {_GIVE}",
            at=f"{MICRO}, {TRAIN}",
            shows="auto",
            raises=TypeError,  # of Python, which DeepSpeed lets compute with the text
        ),
        Rule(
            keys=(MICRO, TRAIN, RANKS),
            broken=_nothing_given,
            rule="at least one of the two batch sizes must be given",
            fix=_GIVE,
            at=f"{MICRO}, {TRAIN}",
            shows=ABSENT,
            raises=AssertionError,
            words=f"{TRAIN} or {MICRO} needs to be provided",
        ),
        Rule(
            keys=(TRAIN, MICRO, STEPS, SEQUENCE, TENSOR, RANKS),
            broken=_unequal,
            needs_agreement=True,
            rule=f"{TRAIN} = {MICRO} x {STEPS} x {{ranks}} does not hold: {{equation}}",
            fix="{how}",
            raises=AssertionError,
            words=f"{TRAIN} is not equal to micro_batch_per_gpu * gradient_acc_step * world_size",
        ),
    )

    def batch(self, ranks: Ranks) -> BatchPolicy | None:
        """Return the policy; None if too little is known, or the equation does not hold."""
        train, micro, data_ranks = self.train_batch_size, self.train_micro_batch_size_per_gpu, ranks.world_size
        if train is None and micro is None:
            return None
        data_ranks //= ranks.sequence_size
        train, micro, steps = batch_of(train, micro, self.gradient_accumulation_steps, data_ranks)
        if not _holds(train, micro, steps, data_ranks):
            return None
        return BatchPolicy(train_batch_size=train, micro_batch_size=micro, accumulation_steps=steps)
