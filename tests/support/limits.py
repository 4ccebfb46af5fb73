"""Limits of stage 3."""

from __future__ import annotations

# No parameter stays gathered that is not in use, and none is gathered ahead.
NOTHING_STAYS = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 0,
}
