"""Ulysses sequence parallelism: ranks that share sequences exchange heads for positions around every attention."""
# ruff: noqa: F401  (what other packages import from here)

from hf_zero.sequence.groups import SequenceGroups, current_groups, groups_given, process_group_of, use_groups
from hf_zero.sequence.registration import share_sequences
