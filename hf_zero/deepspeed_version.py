"""The version of DeepSpeed whose interface hf_zero provides."""

from __future__ import annotations

VERSION = "0.19.8+hf.zero"
"""The DeepSpeed version whose interface we provide; its local part identifies hf_zero."""

GIT_HASH = GIT_BRANCH = "hf_zero"
"""There is no commit hash, because this is not built from DeepSpeed's repository."""


def announcement() -> str:
    """Return the words in which tools look for DeepSpeed's version in a log."""
    return f"DeepSpeed info: version={VERSION}, git-hash={GIT_HASH}, git-branch={GIT_BRANCH}"
