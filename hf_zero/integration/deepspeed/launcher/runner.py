"""deepspeed.launcher.runner: the name of the file with environment variables for remote machines."""

from __future__ import annotations

from hf_zero.integration.alias import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__, {"DEEPSPEED_ENVIRONMENT_NAME": "hf_zero.integration.arguments.DEEPSPEED_ENVIRONMENT_NAME"}
)
