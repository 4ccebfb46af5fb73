"""Imported by the server that forks ranks: what a rank's first engine would import and compute, ready for all ranks.

It took half of the CPU time of a rank that trains a small model for a few steps.
"""

# ruff: noqa: F401

import torch
import torch.utils.serialization.config

import hf_zero.api.engine_checkpoints
import hf_zero.api.entry
import hf_zero.checkpoint.service
import hf_zero.comm.cpu.host
import hf_zero.comm.cpu.point_to_point
import hf_zero.comm.known_groups
import hf_zero.comm.negotiation.host
import hf_zero.comm.negotiation.lockstep
import hf_zero.offload.memory_estimate
import hf_zero.optim.adam
import hf_zero.params.sharded
import hf_zero.sequence.groups
import hf_zero.tensor.groups
from hf_zero.config import resolve
from hf_zero.integration.names import known_modules

# Its cache of where each section is. Nothing here may compute with tensors: OpenMP's threads do not survive a fork, and
# ranks that set a number of threads would wait for them.
resolve({"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}, world_size=1)
known_modules()  # the table of DeepSpeed's names
