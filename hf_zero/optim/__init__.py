"""Optimizers: shard in, shard out; found by their ds.json `type`, or given by the user."""
# ruff: noqa: F401  (what other rooms import from here)

from hf_zero.optim.adagrad import DeepSpeedCPUAdagrad
from hf_zero.optim.adam import DeepSpeedCPUAdam, FusedAdam
from hf_zero.optim.adam8 import Adam8bit, AdamW8bit
from hf_zero.optim.lamb import FusedLamb
from hf_zero.optim.lion import DeepSpeedCPULion, FusedLion
from hf_zero.optim.muon import Muon
from hf_zero.optim.registry import build_optimizer
from hf_zero.optim.traits import runs_natively, updater_for
from hf_zero.optim.updater import MasterTensor, Peers, SubGroup, Updater, WholeStepUpdater
