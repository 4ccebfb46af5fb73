"""Sparse attention as one of transformers' attention implementations, for models that support them by name.

    model.set_attn_implementation("hf_zero_sparse")      transformers calls us for a mask (once per forward) and for
    attach(model, FixedSparsityConfig(num_heads=12))     attention (once per layer); modules hold the pattern

Cross-attention, and decoding with a cache, stay dense.

`SparseMask` represents the model's own mask as a function of positions, without a tensor of size tokens x tokens.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hf_zero.config import ConfigError, Problem, Resolved
from hf_zero.extras.sparse_attention import PATTERNS, SparseAttention, gathered, pattern_keys
from hf_zero.extras.sparse_attention.gathered import BlockPlan, Rules, entries_of, gathered_attention, make_plan
from hf_zero.extras.sparse_attention.sparsity import Layout, SparsityConfig
from hf_zero.features import TrainingFeature, text_config, unwrapped

MaskFunction = Callable[[Any, Any, Any, Any], Any]
"""(indices of sample, head, query and key) -> whether the query may attend to the key; for broadcastable tensors."""

_AT_ONCE = 1 << 24  # maximum number of positions evaluated at once
_plan = functools.lru_cache(maxsize=32)(make_plan)


def causal(_sample: Any, _head: Any, query: Any, key: Any) -> Any:
    return key <= query


class SparseMask:
    """The mask of one forward. Layers with the same pattern share the plans and masks derived from it."""

    def __init__(self, function: MaskFunction | None, batch: int, length: int, device: torch.device) -> None:
        """`function`: None allows all pairs of tokens."""
        self.function = function
        self.batch = batch
        self.length = length
        self.device = device
        self._layouts: dict[SparsityConfig, tuple[Layout, ...]] = {}
        self._flex: dict[SparsityConfig, Any] = {}
        self._plans: dict[SparsityConfig, BlockPlan] = {}
        self.kept: dict[int, Tensor | None] = {}  # masks of row groups, shared by all layers with one pattern

    def plan(self, sparsity: SparsityConfig, num_heads: int) -> BlockPlan:
        """The plan of `gathered_attention` for a pattern."""
        layouts = self.layouts(sparsity, num_heads)
        return self._plans.setdefault(sparsity, _plan(layouts, num_heads, sparsity.block))

    def flex(self, sparsity: SparsityConfig, num_heads: int) -> Any:
        """The BlockMask of a pattern."""
        layouts = self.layouts(sparsity, num_heads)
        if sparsity not in self._flex:
            shape = (self.batch, self.length)
            self._flex[sparsity] = gathered.block_mask(layouts, sparsity.block, shape, self.function, self.device)
        return self._flex[sparsity]

    def layouts(self, sparsity: SparsityConfig, num_heads: int) -> tuple[Layout, ...]:
        """The pattern's layouts without later key blocks that the mask forbids entirely."""
        if sparsity not in self._layouts:
            if sparsity.different_layout_per_head and sparsity.num_heads != num_heads:
                raise ValueError(
                    f"the layouts are for {sparsity.num_heads} heads, but the model has {num_heads} query heads: "
                    "set num_heads, or set different_layout_per_head to false"
                )
            layouts = sparsity.head_rows(-(-self.length // sparsity.block))
            trimmed = {layout: self._trimmed(layout, sparsity.block) for layout in dict.fromkeys(layouts)}
            self._layouts[sparsity] = tuple(trimmed[layout] for layout in layouts)
        return self._layouts[sparsity]

    def allowed(self, queries: Tensor, keys: Tensor, _heads: tuple[int, ...] = ()) -> Tensor:
        """Evaluate the mask at positions of queries [R, q, 1] and keys [R, 1, k]: bool [B or 1, 1, R, q, k]."""
        if self.function is None:
            return torch.ones((1, 1, 1, 1, 1), dtype=torch.bool, device=self.device)
        samples = torch.arange(self.batch, device=self.device).view(-1, 1, 1, 1, 1)
        head = torch.zeros((1, 1, 1, 1, 1), dtype=torch.long, device=self.device)
        answer: Tensor = self.function(samples, head, queries[None, None], keys[None, None])
        return answer

    def dense(self) -> Tensor:
        """The model's mask without the pattern: bool [B or 1, 1, S, S]."""
        positions = torch.arange(self.length, device=self.device)
        answer = self.allowed(positions.view(1, -1, 1), positions.view(1, 1, -1))[:, :, 0]
        return answer.expand(answer.shape[0], 1, self.length, self.length)

    def _trimmed(self, layout: Layout, block: int) -> Layout:
        later = [(row, key) for row, seen in enumerate(layout) for key in seen if key > row]
        if self.function is None or not later:
            return layout
        unused = {pair for pair, is_used in zip(later, self._used(later, block)) if not is_used}
        return tuple(tuple(key for key in seen if (row, key) not in unused) for row, seen in enumerate(layout))

    def _used(self, pairs: list[tuple[int, int]], block: int) -> list[bool]:
        """For each (query block, key block), whether the mask allows any pair of their positions."""
        offsets = torch.arange(block, device=self.device)
        used: list[bool] = []
        step = max(1, _AT_ONCE // (block * block * self.batch))
        for start in range(0, len(pairs), step):
            some = torch.tensor(pairs[start : start + step], device=self.device)
            queries, keys = ((some[:, side, None] * block + offsets).clamp(max=self.length - 1) for side in (0, 1))
            used += (
                self.allowed(queries[:, :, None], keys[:, None, :])
                .expand(-1, -1, len(some), block, block)
                .any(dim=(0, 1, 3, 4))
                .tolist()
            )
        return used


NAME = "hf_zero_sparse"
_SPARSITY = "_hf_zero_sparsity"
_CROSS = re.compile(r"cross|encoder_attn|encdec|multihead_attn", re.IGNORECASE)
_UNKNOWN_ARGUMENTS = ("softcap", "s_aux", "cache")


def register() -> None:
    """Register `attn_implementation="hf_zero_sparse"` with transformers in this process."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, sparse_attention_forward)
    AttentionMaskInterface.register(NAME, sparse_mask)


def attach(model: nn.Module, sparsity: SparsityConfig) -> None:
    """Set the pattern of every self-attention in `model`."""
    for name, module in model.named_modules():
        vars(module)[_SPARSITY] = None if _CROSS.search(name) else sparsity


def detach(model: nn.Module) -> None:
    """Undo `attach`."""
    for module in model.modules():
        vars(module).pop(_SPARSITY, None)


def switch_on(model: nn.Module, sparsity: SparsityConfig) -> Callable[[], None]:
    """Enable sparse attention in a transformers model; returns a function that undoes it.

    Raises:
        ValueError: if the model does not support attention implementations by name.
    """
    takes = getattr(model, "_can_set_attn_implementation", None)
    if takes is None or not takes():
        raise ValueError(
            f"{type(model).__name__} does not support attn_implementation=...: use "
            "SparseSelfAttention in the model instead"
        )
    register()
    before = model.config._attn_implementation  # type: ignore[union-attr]
    model.set_attn_implementation(NAME)  # type: ignore[operator]
    attach(model, sparsity)

    def undo() -> None:
        detach(model)
        model.set_attn_implementation(before)  # type: ignore[operator]

    return undo


def sparse_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = causal,
    attention_mask: Tensor | None = None,
    device: Any = "cpu",
    **more: Any,
) -> Any:
    """Create the mask of a forward; transformers.masking_utils calls it with these arguments."""
    from transformers.masking_utils import and_masks, padding_mask_function, prepare_padding_mask, sdpa_mask

    def dense(**changes: Any) -> Tensor | None:
        arguments = {**more, **changes}
        answer: Tensor | None = sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            device=device,
            **arguments,
        )
        return answer

    if q_length != kv_length or q_offset != kv_offset:
        return dense()  # decoding with a cache, or cross-attention
    if more.get("use_vmap"):  # the function does not support tensors of positions
        table = dense(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
        assert table is not None, "transformers was told not to skip the mask"
        return SparseMask(_looks_up(table), batch_size, q_length, torch.device(device))
    function = _shifted(mask_function, int(q_offset))
    if attention_mask is not None and not bool(attention_mask.all()):
        padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
        assert padding is not None, "created from a mask"
        function = and_masks(function, padding_mask_function(padding))
    return SparseMask(function, batch_size, q_length, torch.device(device))


def _shifted(function: MaskFunction, offset: int) -> MaskFunction:
    if not offset:
        return function
    return lambda sample, head, query, key: function(sample, head, query + offset, key + offset)


def _looks_up(table: Tensor) -> MaskFunction:
    """A mask function that looks up a table: bool [B or 1, 1, S, S]."""
    shared = table.shape[0] == 1
    return lambda sample, head, query, key: table[sample * 0 if shared else sample, head * 0, query, key]


def sparse_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Attention as called by transformers: query [B, H, S, D], key, value [B, K, S, D] -> ([B, S, H, D], None)."""
    _refuse(module, more)
    sparsity: SparsityConfig | None = vars(module)[_SPARSITY]
    mask = _mask_of(module, query, key, attention_mask, is_causal)
    if sparsity is None or mask is None:
        return _dense(module, query, key, value, attention_mask, dropout, scaling, is_causal, position_bias, more)
    heads = query.shape[1]
    if (
        query.device.type not in ("cpu", "meta")
        and not dropout
        and position_bias is None
        and gathered.fits(sparsity.block)
    ):
        output = gathered.flex(query, key, value, mask.flex(sparsity, heads), scaling)
    else:
        rules = Rules(
            allowed=mask.allowed,
            added=None if position_bias is None else entries_of(position_bias),
            scale=scaling,
            dropout=dropout,
            kept=mask.kept if position_bias is None else None,
        )
        output = gathered_attention(query, key, value, mask.plan(sparsity, heads), rules)
    return output.transpose(1, 2).contiguous(), None


def _refuse(module: nn.Module, arguments: dict[str, Any]) -> None:
    if _SPARSITY not in vars(module):
        raise RuntimeError(
            f'{type(module).__name__} has attn_implementation="{NAME}" but no pattern: add a sparse_attention '
            "section to the config, or call "
            "hf_zero.extras.sparse_attention.registered.attach(model, FixedSparsityConfig(num_heads=...))"
        )
    names = [name for name in _UNKNOWN_ARGUMENTS if arguments.get(name) is not None]
    if names:
        raise NotImplementedError(
            f"{type(module).__name__} uses {', '.join(names)}, which sparse attention does not support: "
            'remove the sparse_attention section and use attn_implementation="eager"'
        )


def _mask_of(module: nn.Module, query: Tensor, key: Tensor, given: Any, is_causal: bool | None) -> SparseMask | None:
    """The mask of one call; None if it stays dense."""
    if isinstance(given, SparseMask):
        return given
    batch, _, length, _ = query.shape
    if key.shape[2] != length or length == 1:
        return None
    if given is None:
        causes = getattr(module, "is_causal", False) if is_causal is None else is_causal
        return SparseMask(causal if causes else None, batch, length, query.device)
    if isinstance(given, Tensor) and given.dim() == 4 and given.shape[1] == 1:
        table = given if given.dtype == torch.bool else given > torch.finfo(given.dtype).min / 2
        return SparseMask(_looks_up(table.expand(-1, -1, length, -1)), batch, length, query.device)
    return None


def _dense(module: nn.Module, *arguments: Any) -> tuple[Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    query, key, value, mask, dropout, scaling, is_causal, position_bias, more = arguments
    if isinstance(mask, SparseMask):
        mask = mask.dense()
    if position_bias is not None:
        more = {**more, "position_bias": position_bias}
    output: tuple[Tensor, None] = sdpa_attention_forward(
        module, query, key, value, mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **more
    )
    return output


class SparseAttentionFeature(TrainingFeature):
    """Sparse attention in a model until the engine is destroyed."""

    name = "sparse_attention"

    def __init__(self, undo: Callable[[], None]) -> None:
        self._undo = undo

    def close(self) -> None:
        self._undo()


def pattern_of(section: SparseAttention, num_heads: int) -> SparsityConfig:
    """The pattern that the section defines."""
    settings = {name: getattr(section, name) for name in pattern_keys(section.mode)}
    if section.mode != "local_sliding_window":  # all its heads have the same pattern
        settings["different_layout_per_head"] = section.different_layout_per_head
    return PATTERNS[section.mode](num_heads, block=section.block, **settings)


def sparse_attention_of(model: nn.Module, resolved: Resolved) -> TrainingFeature | None:
    """The feature, if the config enables it.

    Raises:
        ConfigError: if the model does not support attention implementations by name.
    """
    policy = resolved.extras.get("sparse_attention")
    if policy is None:
        return None
    base = unwrapped(model)
    heads = getattr(text_config(getattr(base, "config", None)), "num_attention_heads", None)
    try:
        if not isinstance(heads, int):
            raise ValueError(f"{type(base).__name__} has no config.num_attention_heads")
        return SparseAttentionFeature(switch_on(base, pattern_of(policy, heads)))
    except ValueError as error:
        fix = "remove the section, or use deepspeed.ops.sparse_attention.SparseSelfAttention in the model"
        raise ConfigError([Problem("sparse_attention", policy.mode, str(error), fix)]) from error
