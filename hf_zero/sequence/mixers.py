"""Layers that combine positions outside of attention: linear attention, state spaces, recurrences, convolutions.

In some of these modules (*mixers*) ranks exchange heads for positions (`hf_zero.sequence.scans`). All others run on
whole sequences on every rank, which keeps the output of its own positions:

    [b, l, h]    --gather-->    [b, n * l, h]    --mixer-->    [b, n * l, h]    --own positions-->    [b, l, h]

Backward is the adjoint: gradients of other ranks' positions are sent there and added up. The gradients of a mixer's
weights are those of this rank's outputs (or heads), which the engine sums over ranks as for all other weights.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from hf_zero.sequence.layer import gather
from hf_zero.sequence.scans import all_positions, functions_of, install_scans
from hf_zero.sequence.shared import CACHES, MODULES, RUNNING, Mixing, Shared

_ATTENTION = ("full_attention", "sliding_attention", "chunked_attention", "attention")
_MIXED = ("linear_attention", "conv", "mamba", "mamba2", "recurrent", "hybrid", "hybrid_sliding")
_PER_POSITION = ("moe", "mlp")
_LAYER_TYPES = ("layer_types", "layers_block_type", "block_types", "_block_types")
_MASKS = ("attention_mask", "conv_mask")


def check_kinds(config: Any) -> None:
    """Raises ValueError if a config has layers of a kind whose positions ranks cannot share."""
    for key in _LAYER_TYPES:
        known = (*_ATTENTION, *_MIXED, *_PER_POSITION)
        others = dict.fromkeys(str(kind) for kind in getattr(config, key, None) or () if kind not in known)
        if others:
            raise _refused(f"{type(config).__name__}, by its {key}: {', '.join(others)}")


def find_mixers(model: nn.Module, config: Any) -> list[nn.Module]:
    """The modules of the text model that combine positions outside of attention.

    These are the owners of convolutions over positions, of recurrent layers and of the decay of state spaces; and in
    layers that the config does not call attention, if none of these keeps a state, what does.

    Raises:
        ValueError: if positions are combined in a way that ranks cannot share.
    """
    modules = dict(_of_text(model, config))
    found: dict[str, nn.Module] = {}
    for name, module in modules.items():
        if "Indexer" in type(module).__name__:
            raise _refused(f"{type(model).__name__}, in {name} ({type(module).__name__})")
        is_convolution = isinstance(module, nn.Conv1d) and module.kernel_size != (1,)
        if is_convolution or isinstance(module, nn.RNNBase):
            found[_owner(modules, name)] = modules[_owner(modules, name)]
        elif "A_log" in module._parameters:  # the decay of state-space layers
            found[name] = module
    for name, kind, layer in _layers(modules, config):
        within = [module for each, module in found.items() if f"{each}.".startswith(f"{name}.")]
        if kind in _MIXED and not any(module is layer or _keeps_state(module) for module in within):
            children = {f"{name}.{child}": module for child, module in layer.named_children() if _keeps_state(module)}
            if not children:
                raise _refused(f"{type(model).__name__}, in {name} ({type(layer).__name__}, {kind})")
            found |= children
    outermost = {name: each for name, each in found.items() if not any(name.startswith(f"{other}.") for other in found)}
    for name, module in outermost.items():
        if not name or hasattr(module, "get_input_embeddings") or type(module).forward is nn.Module.forward:
            raise _refused(f"{type(model).__name__}, in {name or 'itself'} ({type(module).__name__})")
    return list(dict.fromkeys(outermost.values()))  # layers may share a module


def _refused(what: str) -> ValueError:
    return ValueError(
        f"{what}: this model also combines positions in a way that ranks cannot share, neither in attention nor in a "
        "module that takes hidden states [batch, positions, ...], such as linear attention or a convolution: use "
        "another model, or another way to save memory (docs/long_sequences.md)"
    )


def _of_text(model: nn.Module, config: Any) -> Iterator[tuple[str, nn.Module]]:
    """The modules of the text model with their names. Those of other inputs (convolutions over sound, projectors of
    images) are in a module with another config."""

    def walk(module: nn.Module, name: str, *, is_text: bool) -> Iterator[tuple[str, nn.Module]]:
        own = getattr(module, "config", None)
        is_text = is_text if own is None else type(own) is type(config)
        if is_text:
            yield name, module
        for child, inner in module.named_children():
            yield from walk(inner, f"{name}.{child}" if name else child, is_text=is_text)

    return walk(model, "", is_text=False)


def _owner(modules: dict[str, nn.Module], name: str) -> str:
    """The name of the module whose forward calls the module `name`."""
    while name:
        name = name.rpartition(".")[0]
        if not isinstance(modules.get(name), nn.ModuleList | nn.ModuleDict | nn.Sequential):
            break
    return name


def _layers(modules: dict[str, nn.Module], config: Any) -> Iterator[tuple[str, str, nn.Module]]:
    """(name, kind, layer) of every layer, if the config has a list of kinds."""
    kinds = next((kinds for key in _LAYER_TYPES if (kinds := getattr(config, key, None))), ())
    for name, module in modules.items():
        if isinstance(module, nn.ModuleList) and len(module) == len(kinds) > 0:
            yield from ((f"{name}.{number}", str(kind), module[number]) for number, kind in enumerate(kinds))
            return


def _keeps_state(module: nn.Module) -> bool:
    return any(name in CACHES or name == "use_cache" for name in _parameters(type(module)))


def _parameters(kind: type[nn.Module]) -> list[str]:
    """The names of the parameters of a class's forward; instances may have another one."""
    return list(inspect.signature(kind.forward).parameters)[1:]


def attach_mixers(mixers: Sequence[nn.Module], shared: Shared) -> list[RemovableHandle]:
    """Let ranks share the sequences of these modules, until the handles are removed."""
    handles = []
    for mixer in mixers:
        MODULES[mixer] = shared
        if functions_of(mixer, shared.group.size):
            install_scans(mixer)
        handles.append(mixer.register_forward_pre_hook(_before, with_kwargs=True))
        handles.append(mixer.register_forward_hook(_after, always_call=True))
    return handles


def _before(mixer: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Forward pre-hook, with keywords. Collective.

    transformers makes no mask where none of a rank's own positions is padding, and what other ranks have is not known
    when checkpointed layers are recomputed. A mask is always gathered, so that all ranks send the same messages.
    """
    shared, sight = MODULES.get(mixer), RUNNING.sight
    if shared is None or RUNNING.mixers or not (shared.is_on(mixer) or sight is not None):
        return None
    parameters, group = _parameters(type(mixer)), shared.group
    keywords = {**dict(zip(parameters, args, strict=False)), **keywords}
    hidden = keywords[parameters[0]]
    if sight is not None and (hidden.dim() < 3 or hidden.shape[1] != sight.length):
        raise NotImplementedError(
            f"{type(mixer).__name__} combines positions of an input {tuple(hidden.shape)}, which is not [batch, "
            f"positions, ...] with this rank's {sight.length} positions: it cannot share sequences"
        )
    samples, length = hidden.shape[:2]
    functions = functions_of(mixer, group.size)
    RUNNING.mixers.append(Mixing(mixer, group, samples, length, functions))

    def whole(value: Any) -> Any:
        is_part = isinstance(value, Tensor) and value.dim() > 1 and value.shape[:2] in ((samples, length), (1, length))
        return all_positions(group, value) if is_part else value

    if functions and isinstance(keywords.get("seq_idx"), Tensor):
        keywords["seq_idx"] = whole(keywords["seq_idx"])
    for name in dict.fromkeys((*parameters, *keywords)):
        value = keywords.get(name)
        if name in CACHES:
            keywords.update({name: None} if name in keywords else {})  # a state of its own part continues nothing
        elif name == "use_cache":
            keywords[name] = False
        elif not functions and name in _MASKS and (value is None or value.dim() == 2):
            own = hidden.new_ones(samples, length, dtype=torch.uint8) if value is None else value.to(torch.uint8)
            keywords[name] = gather(group, own, dim=1).bool()
    if functions:
        return (), keywords
    masks = {name: keywords.pop(name) for name in _MASKS if name in keywords}
    return (), {**tree_map(whole, keywords), **masks}


def _after(mixer: nn.Module, args: Any, output: Any) -> Any:
    """Forward hook, which must always be called; `output` is None after an error."""
    if not RUNNING.mixers or RUNNING.mixers[-1].mixer is not mixer:
        return None
    running = RUNNING.mixers.pop()
    if output is None:
        return None
    if running.functions:
        missing = [name for name in running.functions if name not in running.calls]
        if missing:
            raise NotImplementedError(
                f"{type(mixer).__name__} has not called {', '.join(missing)}, around which ranks exchange heads: each "
                "rank has computed its part of the sequences alone. Leave out use_kernels=True, or whatever else has "
                "replaced its forward"
            )
        return None
    group, samples, length = running.group, running.samples, running.length
    whole = (samples, group.size * length)

    def own(value: Any) -> Any:
        is_whole = isinstance(value, Tensor) and value.shape[:2] == whole
        return value.narrow(1, group.rank * length, length) if is_whole else value

    first = next(iter(tree_leaves(output)), None)
    if not isinstance(first, Tensor) or first.shape[:2] != whole:
        shape = tuple(getattr(first, "shape", ()))
        raise NotImplementedError(
            f"{type(mixer).__name__} returns {shape} for {samples} sequences of {whole[1]} positions: it cannot share "
            "sequences"
        )
    return tree_map(own, output)
