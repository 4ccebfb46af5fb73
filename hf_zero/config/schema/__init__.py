"""The keys of a config, one class per section."""

from __future__ import annotations

from hf_zero.config.schema.fields import Section, Verdict
from hf_zero.config.schema.root import Root

__all__ = ["Root", "Section", "Verdict"]
