"""Optimizers: shard in, shard out; found by their ds.json `type`, or given by the user."""
# ruff: noqa: F401  (what other packages import from here)

from hf_zero.optim.registry import build_optimizer
from hf_zero.optim.traits import updater_for
from hf_zero.optim.updater import MasterTensor, Peers, SubGroup, Updater, WholeStepUpdater
