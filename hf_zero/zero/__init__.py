"""The three states of training (parameters, gradients, optimizer) and how the stages shard them.

Vocabulary, used everywhere without synonyms:
  flat buffer   one 1-D tensor per bucket; the bucket's parameters are views of it
  shard         the equal part of a bucket that one rank owns
  owned         the interval a rank updates: its shard at stages 1 and 2, the whole bucket at stage 0
  master        the owned weights in the precision in which they are updated
  local         gradients of this rank only, not reduced yet
  reduced       gradients summed over all ranks, owned interval only
"""

from hf_zero.layout.sharding import Sharding
from hf_zero.zero.flat_parameters import FlatBucket, FlatParameters
from hf_zero.zero.gradients import GradientReducer
from hf_zero.zero.optimizer import ZeroOptimizer

__all__ = ["FlatBucket", "FlatParameters", "GradientReducer", "Sharding", "ZeroOptimizer"]
