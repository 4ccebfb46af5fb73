"""The hidden size of a model, wherever its configuration keeps it; without one, read off its parameters' shapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from hf_zero.config.sources import Source
from hf_zero.config.views import Given, ModelView

_NAMES = ("d_model", "n_embd", "model_dim", "embed_dim", "embedding_size", "dim", "hidden_dim")
# The part that carries most of the parameters in models made of several; others follow in their own order.
_PARTS = ("text_config", "language_config", "llm_config", "decoder", "encoder", "vision_config", "audio_config")
_DEEPEST = 4


def hidden_size(model: ModelView | None) -> Given | None:
    """The size that bucket sizes follow from, or None when there is nothing to read it from."""
    if model is None:
        return None
    if model.config is not None:
        found = next(_in_config(model.config, "model.config"), None)
        if found is not None:
            return found
    return _from_shapes(model.shapes)


def _in_config(config: Mapping[str, object], where: str, depth: int = 0) -> Iterator[Given]:
    for name in ("hidden_size", "hidden_sizes", *_NAMES):
        size = _as_size(config.get(name))
        if size is not None:
            yield Given(value=size, source=Source("model", f"{where}.{name} = {size}"))
        if name == "hidden_sizes":
            # What transformers looks at next, before any other name.
            yield from _part(config, "text_config", where, depth)
    for name in (*_PARTS, *(key for key in config if isinstance(key, str) and key not in _PARTS)):
        yield from _part(config, name, where, depth)


def _part(config: Mapping[str, object], name: str, where: str, depth: int) -> Iterator[Given]:
    inner = config.get(name)
    if isinstance(inner, Mapping) and depth < _DEEPEST:
        yield from _in_config(inner, f"{where}.{name}", depth + 1)


def _as_size(value: object) -> int | None:
    if isinstance(value, (list, tuple)):
        sizes = [size for size in map(_as_size, value) if size is not None]
        return max(sizes, default=None)
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    return None


def _from_shapes(shapes: Iterable[tuple[int, ...]]) -> Given | None:
    """The extent that most matrices share: each layer reads from or writes to the hidden state."""
    extents = Counter(extent for shape in shapes if len(shape) >= 2 for extent in {*shape[:2]} if extent > 1)
    if not extents:
        return None
    size = max(extents, key=lambda extent: (extents[extent], extent))
    return Given(value=size, source=Source("model", f"the shapes of its parameters ({extents[size]} have {size})"))
