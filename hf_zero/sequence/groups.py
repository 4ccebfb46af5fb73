"""Which ranks share sequences: as programs say it (`mpu=`, `mesh_param=`), and as they ask for it."""

from __future__ import annotations

import weakref
from typing import Any

from hf_zero.comm import ParallelGroups, Partition, ProgramGroups, adopt, init_distributed, this_process, torch_group
from hf_zero.comm.process_group import get_world_group
from hf_zero.config import ConfigError, Problem
from hf_zero.errors import WrongArgument

_OTHER_SIZES = ("get_model_parallel_world_size", "get_tensor_model_parallel_world_size")


class SequenceGroups(ProgramGroups):
    """What `UlyssesSPAttentionHF.register_with_transformers` returns, and `deepspeed.initialize(mpu=...)` takes.

        world 4, 2 ranks per sequence     rank 0 1 | 2 3
            sequence-parallel group of rank 2        2 3     parts of the same sequences
            data-parallel group of rank 2        0   2       other sequences
            sequence-data-parallel group         0 1 2 3     shards of the states

    Names are DeepSpeed's. Groups are torch's own, for programs that call torch.distributed themselves.

    Attributes:
        skips_evaluation: in eval mode each rank has whole sequences.
    """

    size_name = "sequence_parallel_size"

    def __init__(self, partition: Partition) -> None:
        """Collective."""
        super().__init__(partition)
        self.skips_evaluation = False

    def initialize_sequence_parallel(self, sequence_parallel_size: int) -> None:
        """The groups are there already; another size is an error."""
        if sequence_parallel_size != len(self._ranks):
            raise WrongArgument(f"these are groups of {len(self._ranks)} ranks, not of {sequence_parallel_size}")

    def get_sequence_parallel_group(self) -> Any:
        return self._group

    def get_sequence_parallel_world_size(self) -> int:
        return len(self._ranks)

    def get_sequence_parallel_rank(self) -> int:
        return self._ranks.index(self._process.rank)

    def get_sequence_data_parallel_group(self) -> Any:
        return get_world_group()

    def get_sequence_data_parallel_world_size(self) -> int:
        return self._process.size

    def get_sequence_data_parallel_rank(self) -> int:
        return self._process.rank

    def get_model_parallel_world_size(self) -> int:
        return 1

    def get_model_parallel_rank(self) -> int:
        return 0


class _Known:
    """What programs ask of this process without naming an engine: `deepspeed.utils.groups`."""

    def __init__(self) -> None:
        self.made: SequenceGroups | None = None  # by a registration whose engine is not there yet
        self.engines: list[tuple[weakref.ref[Any], SequenceGroups]] = []

    def current(self) -> SequenceGroups | None:
        self.engines = [(engine, groups) for engine, groups in self.engines if engine() is not None]
        if self.made is not None:
            return self.made
        return self.engines[-1][1] if self.engines else None


_KNOWN = _Known()


def make_groups(size: int) -> SequenceGroups:
    """For ranks that share sequences from now on, also where torch alone has made the process group. Collective."""
    init_distributed()
    _KNOWN.made = SequenceGroups.of_size(size)
    return _KNOWN.made


def current_groups() -> SequenceGroups | None:
    """Those that were registered last, or those of the latest engine that shares sequences; None: there are none."""
    return _KNOWN.current()


def use_groups(engine: Any, groups: SequenceGroups | None) -> None:
    """They are this engine's from now on."""
    if groups is not None:
        _KNOWN.made = None
        _KNOWN.engines.append((weakref.ref(engine), groups))


def process_group_of(groups: ParallelGroups) -> Any:
    """torch's group of the ranks that share this one's sequences; None where it has whole ones. Collective once."""
    return torch_group(groups.sequences) if groups.sequence.size > 1 else None


def groups_given(mpu: Any = None, mesh_param: Any = None) -> SequenceGroups | None:
    """What the arguments of `initialize` say; None: nothing about sequences. Collective.

    Args:
        mpu: an object or module with DeepSpeed's `get_sequence_parallel_group`.
        mesh_param: (data ranks, ranks per sequence), or torch's DeviceMesh with a dimension named sp or
            sequence_parallel, whose groups are then used.

    Raises:
        NotImplementedError: they speak of another kind of parallelism.
        ConfigError: sizes that do not multiply to the number of ranks.
    """
    if mesh_param is not None:
        return _of_mesh(mesh_param)
    if mpu is None or isinstance(mpu, SequenceGroups):
        return mpu
    if hasattr(mpu, "get_sequence_parallel_group"):
        size = int(mpu.get_sequence_parallel_world_size())
        return _adopted(mpu.get_sequence_parallel_group()) if size > 1 else None
    if not any(hasattr(mpu, name) for name in _OTHER_SIZES):  # one that has them says that ranks hold whole matrices
        raise NotImplementedError(
            f"initialize(mpu=...): {type(mpu).__name__} has neither get_sequence_parallel_group nor {_OTHER_SIZES[0]}; "
            "it has to say who shares sequences or holds parts of matrices (docs/features.md)"
        )
    return None


def _of_mesh(mesh: Any) -> SequenceGroups | None:
    names = getattr(mesh, "mesh_dim_names", None)
    if names is not None:
        found = next((name for name in ("sp", "sequence_parallel") if name in names), None)
        if found is None:
            return None
        size = int(mesh[found].size())
        return _adopted(mesh.get_group(found)) if size > 1 else None
    data, size = (int(extent) for extent in mesh)
    world = this_process().size
    if data * size != world:
        rule = f"data ranks x ranks per sequence = world size does not hold: {data} x {size} != {world}"
        raise ConfigError(Problem("mesh_param", (data, size), rule, "give two sizes that multiply to the world size"))
    return SequenceGroups.of_size(size) if size > 1 else None


def _adopted(group: Any) -> SequenceGroups:
    return SequenceGroups(adopt(group))
