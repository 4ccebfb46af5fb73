"""What an engine has been told: its config as resolved, and the batch sizes, which a script may change."""

from __future__ import annotations

from hf_zero.config import Resolved


class EngineSettings:
    """The settings part of an engine. Names are DeepSpeed's.

    Attributes:
        resolved: the config; a script's changes do not show in it.
        accumulation_steps: micro-batches per update.
    """

    def __init__(self, resolved: Resolved, num_ranks: int, ranks_per_sample: int = 1) -> None:
        """
        Args:
            num_ranks: those that see other data.
            ranks_per_sample: those that see the same samples, whole.
        """
        self.resolved = resolved
        self._num_ranks = num_ranks
        self._ranks_per_sample = ranks_per_sample
        self.accumulation_steps = resolved.batch.accumulation_steps
        self._micro_batch_size = resolved.batch.micro_batch_size

    def train_batch_size(self) -> int:
        """As in the config: samples that several ranks see whole count for each of them."""
        return self.samples_per_update() * self._ranks_per_sample

    def samples_per_update(self) -> int:
        """Different ones."""
        return self._micro_batch_size * self.accumulation_steps * self._num_ranks

    def train_micro_batch_size_per_gpu(self) -> int:
        return self._micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        return self.accumulation_steps

    def get_batch_info(self) -> tuple[int, int, int]:
        """(train batch size, micro batch size, accumulation steps)."""
        return self.train_batch_size(), self._micro_batch_size, self.accumulation_steps

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Reach `train_batch_size` samples per update by changing the number of accumulation steps."""
        ranks = self._num_ranks * self._ranks_per_sample
        per_micro_step = self._micro_batch_size * ranks
        if train_batch_size <= 0 or train_batch_size % per_micro_step:
            raise ValueError(
                f"train_batch_size={train_batch_size} is not a positive multiple of "
                f"micro batch {self._micro_batch_size} x world size {ranks} = {per_micro_step}"
            )
        self.accumulation_steps = train_batch_size // per_micro_step

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the samples per forward; the train batch size changes with it."""
        if micro_batch_size <= 0:
            raise ValueError(f"micro batch size must be positive, got {micro_batch_size}")
        self._micro_batch_size = micro_batch_size

    def amp_enabled(self) -> bool:
        """Whether forward runs under torch.autocast because the config asks for it."""
        return self.resolved.precision.autocast is not None
