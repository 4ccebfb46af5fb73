"""Groups and collectives: the only room that talks to torch.distributed."""
# ruff: noqa: F401  (what other rooms import from here)

from hf_zero.comm.collectives import MAX_SEND_BUFFERS, Collectives
from hf_zero.comm.ledger import Call, Ledger, Tally, ledger
from hf_zero.comm.negotiation import Gathering, Negotiation
from hf_zero.comm.process_group import (
    Channel,
    background_collectives,
    barrier,
    collectives_for,
    destroy_process_group,
    get_local_rank,
    get_rank,
    get_world_size,
    init_distributed,
    is_initialized,
    local_device,
    set_timeout,
    watching_collectives,
)
from hf_zero.comm.rows import Pending, Rows
