"""The package that `import deepspeed` finds: only names, each loaded from hf_zero on first use.

The import hook creates its modules from the tables in hf_zero/integration/names.
"""

from __future__ import annotations

from hf_zero.deepspeed_version import VERSION as __version__
from hf_zero.integration.names import lazy_names

__all__ = ["__version__"]

__getattr__, __dir__ = lazy_names(__name__)
