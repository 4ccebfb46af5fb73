"""`axolotl train` on CPUs: torchrun --nproc_per_node 2 axolotl_script.py run.yaml

Below stage 3, and without an engine, axolotl makes from_pretrained load onto the GPU with the local rank's index. Here
that is replaced by the CPU, and nothing else.
"""

from __future__ import annotations

import runpy
from typing import Any


def main() -> None:
    from axolotl.loaders.model import ModelLoader

    choose = ModelLoader._set_device_map_config

    def on_the_cpu(loader: Any) -> None:
        choose(loader)
        if "device_map" in loader.model_kwargs:
            loader.model_kwargs["device_map"] = {"": "cpu"}

    ModelLoader._set_device_map_config = on_the_cpu
    runpy.run_module("axolotl.cli.train", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
