"""Around Accelerator.no_sync: backward inside it is no update, at any stage; upstream's backward would step there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def around(original: Callable[..., Any]) -> Callable[..., Any]:
    @contextmanager
    def no_sync(self: Any, model: Any) -> Iterator[None]:
        with original(self, model):
            if self.distributed_type != "DEEPSPEED":
                yield
                return
            before = self.gradient_state.sync_gradients
            self.gradient_state._set_sync_gradients(False)
            try:
                yield
            finally:
                self.gradient_state._set_sync_gradients(before)

    return no_sync
