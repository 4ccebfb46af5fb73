"""Optimizers on shards, selected by the `type` in ds.json or passed by the user."""
# ruff: noqa: F401  (re-exported for other packages)

from hf_zero.optim.registry import build_optimizer
from hf_zero.optim.traits import updater_for
from hf_zero.optim.updater import MasterTensor, Peers, SubGroup, Updater, WholeStepUpdater
