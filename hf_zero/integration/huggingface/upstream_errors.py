"""What transformers or accelerate would have said, in their own words: the text that people search for."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NoReturn

from hf_zero.config import ConfigError, Problem
from hf_zero.log import log_dist


def stepped_aside(place: str, error: Exception) -> None:
    """A patch met objects that it does not know: upstream's code runs alone, and ours needs an update."""
    line = f"{place}: hf_zero steps aside ({error}); autos and messages are those of that library"
    log_dist(" ".join(line.split()), level=logging.WARNING)


def raise_both(problems: Sequence[Problem], check: Callable[[], object]) -> NoReturn:
    """Raise what we found, beginning with what the host library's own check says.

    Args:
        check: that check, on a copy of what it would change. When it finds nothing, our message is the only one.

    Raises:
        ConfigError: always.
    """
    theirs = _words_of(check)
    if not theirs:
        raise ConfigError(problems) from None  # alone: not buried under the error that brought us here
    raise ConfigError(problems, headline=f"{theirs}\nhf_zero found in this config") from None


def _words_of(check: Callable[[], object]) -> str:
    try:
        check()
    except ConfigError:
        return ""  # our own, on the way through
    except ValueError as error:
        return str(error)
    except Exception:
        return ""  # it stumbled over something else that is wrong, which we say better
    return ""


class _Passed(Exception):
    """accelerate's checks are all done."""


@contextmanager
def no_engine() -> Iterator[None]:
    """Inside, `deepspeed.initialize` ends the call that comes to it: no engine is to be built just for a message."""
    package: Any = sys.modules["deepspeed"]

    def stop(*args: object, **kwargs: object) -> None:
        raise _Passed

    before = vars(package).get("initialize")
    package.initialize = stop
    try:
        yield
    finally:
        if before is None:
            del package.initialize
        else:
            package.initialize = before


def stand_in_model() -> Any:
    """A model of which only a size is asked."""
    return SimpleNamespace(config=SimpleNamespace(hidden_size=1))
