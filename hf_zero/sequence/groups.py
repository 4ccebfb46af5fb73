"""Groups of ranks that share sequences, as programs define (`mpu=`, `mesh_param=`) and query them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import nn

from hf_zero.comm import (
    Collectives,
    Mesh,
    ParallelGroups,
    Partition,
    ProgramGroups,
    adopt,
    group_of,
    init_distributed,
    this_process,
    torch_group,
)
from hf_zero.comm.process_group import get_world_group
from hf_zero.config import ConfigError, Problem
from hf_zero.config.extras import loaded
from hf_zero.errors import WrongArgument
from hf_zero.features import DIMENSIONS, unwrapped
from hf_zero.sequence.shared import shares_sequences

_OTHER_SIZES = ("get_model_parallel_world_size", "get_tensor_model_parallel_world_size")


class SequenceGroups(ProgramGroups):
    """The mpu that `UlyssesSPAttentionHF.register_with_transformers` returns, for `deepspeed.initialize(mpu=...)`.

        world 4, 2 ranks per sequence     rank 0 1 | 2 3
            sequence-parallel group of rank 2        2 3     parts of the same sequences
            data-parallel group of rank 2        0   2       other sequences
            sequence-data-parallel group         0 1 2 3     shards of the states

    Names are DeepSpeed's. Groups are torch process groups, for programs that call torch.distributed themselves.

    Attributes:
        skips_evaluation: whether inputs in eval mode are whole sequences.
    """

    name = "sequence"
    samples = "parts"
    group_name = "sequence"
    size_name = "sequence_parallel_size"
    resolved_size = "sequence_size"
    made: ClassVar[SequenceGroups | None] = None  # by a registration without an engine yet

    def __init__(self, partition: Partition) -> None:
        """Collective."""
        super().__init__(partition)
        self.skips_evaluation = False
        self._alike = tuple(range(self._process.size))
        self._alike_group: Any = None  # of all ranks

    @classmethod
    def given(cls, model: Any, mpu: Any = None, mesh_param: Any = None) -> SequenceGroups | None:
        return groups_given(mpu, mesh_param)

    @classmethod
    def current(cls) -> SequenceGroups | None:
        """The groups registered last, or else those of the latest engine with sequence parallelism; None without
        any."""
        return cls.made or super().current()

    @classmethod
    def prepare(cls, model: nn.Module, groups: ParallelGroups, asked: SequenceGroups | None) -> None:
        """Enable or disable sequence parallelism in `model`. Models outside transformers must use
        `DistributedAttention` themselves."""
        if asked is None and not shares_sequences(model):
            return
        from hf_zero.sequence.attention import attach, detach, is_attached, is_supported

        if asked is None:
            detach(model)
        elif not is_attached(model) and is_supported(unwrapped(model)):
            attach(model, groups.along(cls.name), skips_evaluation=asked.skips_evaluation)

    def own_part(self, batch: Any, group: Collectives) -> Any:
        """This rank's part of the sequences in a batch, which must be a mapping."""
        from hf_zero.sequence.batches import part_of

        return part_of(batch, group.rank, group.size) if isinstance(batch, Mapping) else batch

    def belong_to(self, engine: Any, beside: Sequence[ProgramGroups], mesh: Mesh) -> None:
        SequenceGroups.made = None
        super().belong_to(engine, beside, mesh)
        self._alike = group_of(self._process.rank, mesh.same_weights)
        self._alike_group = torch_group(mesh.same_weights) if len(mesh.same_weights) > 1 else None

    def initialize_sequence_parallel(self, sequence_parallel_size: int) -> None:
        """Do nothing, because the groups exist; another size is an error."""
        if sequence_parallel_size != len(self._ranks):
            raise WrongArgument(f"these are groups of {len(self._ranks)} ranks, not of {sequence_parallel_size}")

    get_sequence_parallel_group = ProgramGroups.own_group
    get_sequence_parallel_world_size = ProgramGroups.own_size
    get_sequence_parallel_rank = ProgramGroups.own_rank

    def get_sequence_data_parallel_group(self) -> Any:
        return self._alike_group or get_world_group()

    def get_sequence_data_parallel_world_size(self) -> int:
        return len(self._alike)

    def get_sequence_data_parallel_rank(self) -> int:
        return self._alike.index(self._process.rank)

    def get_model_parallel_world_size(self) -> int:
        return 1

    def get_model_parallel_rank(self) -> int:
        return 0


def make_groups(size: int, model: Any = None) -> SequenceGroups:
    """Create groups of `size` ranks that share sequences; torch may have initialized the process group. Collective.

    Args:
        model: its ranks share sequences; where a program wants other parallelism for it (`tp_model_init`), among those
            with the same place along these dimensions. Default: consecutive ranks.
    """
    init_distributed()
    kinds: list[type[ProgramGroups]] = [loaded(where) for where in DIMENSIONS] if model is not None else []
    others = [kind.given(model, None, None) for kind in kinds if kind is not SequenceGroups]
    SequenceGroups.made = SequenceGroups.of_size(size, [each.dimension for each in others if each is not None])
    return SequenceGroups.made


def process_group_of(groups: ParallelGroups) -> Any:
    """The torch group of ranks that share sequences with this one; None without any. Collective at first use."""
    dimension = next((each for each in groups.mesh.dimensions if each.name == SequenceGroups.name), None)
    return None if dimension is None else torch_group(dimension.groups)


def groups_given(mpu: Any = None, mesh_param: Any = None) -> SequenceGroups | None:
    """Groups from the arguments of `initialize`; None if these do not define any. Collective.

    Args:
        mpu: an object or module with DeepSpeed's `get_sequence_parallel_group`.
        mesh_param: (data ranks, ranks per sequence), or a torch DeviceMesh with a dimension named sp or
            sequence_parallel, whose groups are used.

    Raises:
        NotImplementedError: if the mpu defines another kind of parallelism.
        ConfigError: if the product of the sizes is not the number of ranks.
    """
    if mesh_param is not None:
        return _of_mesh(mesh_param)
    if mpu is None or isinstance(mpu, SequenceGroups):
        return mpu
    if hasattr(mpu, "get_sequence_parallel_group"):
        size = int(mpu.get_sequence_parallel_world_size())
        return SequenceGroups(adopt(mpu.get_sequence_parallel_group())) if size > 1 else None
    if not any(hasattr(mpu, name) for name in _OTHER_SIZES):  # these methods mean tensor parallelism or none
        raise NotImplementedError(
            f"initialize(mpu=...): {type(mpu).__name__} has neither get_sequence_parallel_group nor {_OTHER_SIZES[0]}; "
            "it must define which ranks share sequences or hold parts of matrices (docs/features.md)"
        )
    return None


def _of_mesh(mesh: Any) -> SequenceGroups | None:
    names = getattr(mesh, "mesh_dim_names", None)
    if names is not None:
        dimension = next((name for name in ("sp", "sequence_parallel") if name in names), None)
        if dimension is None:
            return None
        size = int(mesh[dimension].size())
        return SequenceGroups(adopt(mesh.get_group(dimension))) if size > 1 else None
    data, size = (int(extent) for extent in mesh)
    world = this_process().size
    if data * size != world:
        rule = f"data ranks x ranks per sequence = world size does not hold: {data} x {size} != {world}"
        raise ConfigError(Problem("mesh_param", (data, size), rule, "give two sizes that multiply to the world size"))
    return SequenceGroups.of_size(size) if size > 1 else None
