"""deepspeed.utils.tensor_fragment: what optimizer files say about places in a partition."""

from __future__ import annotations

from hf_zero.integration.alias import lazy_names

__getattr__, __dir__ = lazy_names(__name__, {"fragment_address": "hf_zero.checkpoint.inert.fragment_address"})
