"""Groups and collectives: the only package that calls torch.distributed."""
# ruff: noqa: F401  (re-exported for other packages)

from hf_zero.comm.calls import enter
from hf_zero.comm.collectives import (
    MAX_SEND_BUFFERS,
    Channel,
    Collectives,
    LoneCollectives,
    outside_transforms,
    uncompiled,
)
from hf_zero.comm.groups import (
    ParallelGroups,
    ProgramGroups,
    adopt,
    background_collectives,
    collectives_for,
    hosts,
    in_hops,
    parallel_groups,
    set_timeout,
    takes_hops,
    torch_group,
    watching_collectives,
)
from hf_zero.comm.ledger import Call, Ledger, Tally, ledger
from hf_zero.comm.mesh import Dimension, Hosts, Mesh, Partition, ShardSize, across, consecutive, group_of
from hf_zero.comm.negotiation.gathering import Gathering, Negotiation
from hf_zero.comm.negotiation.own_rows import EngineRows, OwnRow, UnitRows
from hf_zero.comm.process_group import (
    barrier,
    destroy_process_group,
    get_local_rank,
    get_rank,
    get_world_size,
    init_distributed,
    is_initialized,
    local_device,
    this_process,
)
from hf_zero.comm.rows import GatherBuffers, OutsideAutograd, Pending, Rows
from hf_zero.comm.torch_backend import NativeCollectives
