"""Around save_pretrained at stage 3: a rank that is not to write does not, which transformers has from 5.15 on.

Before, every rank wrote the weights over those of the others; one that was given no state dict, as
`accelerator.get_state_dict` does it on all ranks but the first, read its own released ones for that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_zero.params.sharded_parameter import HANDLE


def around(original: Callable[..., None]) -> Callable[..., None]:
    def save_pretrained(
        self: Any, save_directory: Any, is_main_process: bool = True, *arguments: Any, **options: Any
    ) -> None:
        sharded = any(hasattr(parameter, HANDLE) for parameter in self.parameters())
        if is_main_process or not sharded:
            original(self, save_directory, is_main_process, *arguments, **options)

    return save_pretrained
