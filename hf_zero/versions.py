"""The DeepSpeed that hf_zero answers as."""

from __future__ import annotations

VERSION = "0.19.8+hf.zero"
"""The DeepSpeed version whose interface we answer with; the local part tells that it is hf_zero."""

GIT_HASH = GIT_BRANCH = "hf_zero"
"""Not built from DeepSpeed's repository: no commit of it would be true."""


def announcement() -> str:
    """The line by which tools find out which DeepSpeed a log is from."""
    return f"DeepSpeed info: version={VERSION}, git-hash={GIT_HASH}, git-branch={GIT_BRANCH}"
