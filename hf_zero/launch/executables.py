"""The commands `deepspeed` and `ds_report`: a real DeepSpeed's own where one answers to the name, else ours."""

from __future__ import annotations

from importlib import import_module

from hf_zero.integration.startup import FINDER


def deepspeed() -> None:
    """Start ranks: the launcher's options are the same."""
    home = "hf_zero.launch.deepspeed_names" if FINDER.answers() else "deepspeed.launcher.runner"
    import_module(home).main()


def ds_report() -> None:
    """Say what an issue needs: versions, devices, limits."""
    home = "hf_zero.integration.compat.env_report" if FINDER.answers() else "deepspeed.env_report"
    import_module(home).cli_main()
