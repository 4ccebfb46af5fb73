"""The import hook, active from interpreter start, through which `deepspeed` finds hf_zero; imports nothing costly.

The package that `deepspeed` means:
  HF_ZERO=0                            never hf_zero
  HF_ZERO=1 or hf_zero.install()       always hf_zero
  otherwise                            a real DeepSpeed if one is installed, else hf_zero
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # not typing's, because importing typing takes several times this file's time budget
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from importlib.machinery import ModuleSpec
    from importlib.metadata import Distribution, DistributionFinder
    from types import CodeType, ModuleType
    from typing import Any

NAME = "deepspeed"
ALIAS_FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), NAME)
ALIAS_FILE = os.path.join(ALIAS_FOLDER, "__init__.py")
# Modules in which hf_zero patches a few functions right after loading (integration/patches).
PATCHED = frozenset(
    (
        "accelerate.accelerator",
        "accelerate.commands.config.config_args",
        "accelerate.commands.launch",
        "accelerate.data_loader",
        "accelerate.state",
        "accelerate.utils.dataclasses",
        "accelerate.utils.deepspeed",
        "peft.peft_model",
        "peft.tuners.adalora.layer",
        "peft.tuners.trainable_tokens.layer",
        "peft.tuners.tuners_utils",
        "peft.utils.other",
        "torch.distributed.nn.functional",
        "transformers.core_model_loading",
        "transformers.generation.utils",
        "transformers.integrations.deepspeed",
        "transformers.masking_utils",
        "transformers.modeling_utils",
        "transformers.quantizers.quantizer_torchao",
        "transformers.trainer",
        "transformers.trainer_jit_checkpoint",
        "transformers.trainer_utils",
        "trl.generation.vllm_generation",
        "trl.kernels.chunked_divergence",
        "trl.kernels.chunked_logprob",
        "trl.trainer.utils",
    )
)
# Also patched if a real DeepSpeed is used, so that `accelerate launch` always has --use_hf_zero.
LAUNCHER = frozenset(("accelerate.commands.config.config_args", "accelerate.commands.launch"))


class AliasFinder:
    """The finder on sys.meta_path: provides import specs and distribution metadata for `deepspeed`.

    It is the first finder and defers to a real DeepSpeed. As the last finder it would be simpler, but then any plain
    folder named `deepspeed` (people keep their ds.json files in one) would hide it as a namespace package.

    Attributes:
        forced: whether `hf_zero.install()` has asked for the alias, even if there is a real DeepSpeed.
    """

    def __init__(self) -> None:
        self.forced = False
        self._looking: set[int] = set()  # threads that are querying the other finders

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        if name == NAME and not self.answers():
            real: ModuleSpec | None = None
            if _switch() is None:
                real = self._unless_nested(lambda: self._spec_with(NAME, path, _say_who_answers), None)
            return real
        if name == NAME:
            from importlib.util import spec_from_file_location

            return spec_from_file_location(NAME, ALIAS_FILE, submodule_search_locations=[ALIAS_FOLDER])
        if name.startswith(NAME + ".") and is_ours(sys.modules.get(NAME)):
            return _submodule_spec(name)
        if name in PATCHED and (self.answers() or (name in LAUNCHER and _switch() is not False)):
            return self._spec_with(name, path, _patch)
        return None

    def find_distributions(self, context: DistributionFinder.Context) -> Iterable[Distribution]:
        if context.name not in (None, NAME) and str(context.name).lower() != NAME:
            return []
        if context.name is None and "path" in vars(context):
            return []  # pip lists given folders; a distribution in memory cannot be frozen or uninstalled
        if not self.answers():
            return []
        from hf_zero.integration.distribution import AliasDistribution

        return [AliasDistribution()]

    def invalidate_caches(self) -> None:
        """Nothing is cached: part of the protocol of sys.meta_path."""

    def answers(self) -> bool:
        """Whether `deepspeed` means hf_zero now."""
        switch = _switch()
        if switch is False:
            return False
        loaded = sys.modules.get(NAME)
        if loaded is not None:
            return is_ours(loaded)
        # In a nested query our own answer is meaningless.
        return self.forced or switch is True or not self._unless_nested(self._finds_real, True)

    def _unless_nested(self, query: Callable[[], Any], nested: Any) -> Any:
        """The result of a query of the other finders; `nested` if it comes from one of them, which delegates."""
        from _thread import get_ident

        thread = get_ident()
        if thread in self._looking:
            return nested
        self._looking.add(thread)
        try:
            return query()
        finally:
            self._looking.discard(thread)

    def _specs(self, name: str, path: Sequence[str] | None = None) -> Iterator[ModuleSpec]:
        """Yield the specs of the other finders."""
        for finder in sys.meta_path:
            find_spec = getattr(finder, "find_spec", None)
            spec = None if finder is self or find_spec is None else find_spec(name, path)
            if spec is not None:
                yield spec

    def _spec_with(
        self, name: str, path: Sequence[str] | None, afterwards: Callable[[ModuleType], None]
    ) -> ModuleSpec | None:
        """The spec from other finders; `afterwards` is called when the module's own code has run."""
        spec = next(self._specs(name, path), None)
        if spec is None:
            return None
        loader: Any = spec.loader
        execute = getattr(loader, "exec_module", None)
        if execute is not None:

            def exec_module(module: ModuleType) -> None:
                vars(loader).pop("get_code", None)
                execute(module)
                afterwards(module)

            try:
                loader.exec_module = exec_module
                if name in LAUNCHER:
                    loader.get_code = _program
            except AttributeError:
                return spec  # the loader cannot be changed: the module stays unpatched
        return spec

    def _finds_real(self) -> bool:
        # No origin: a namespace package, which is only a folder of that name.
        return any(spec.origin not in (None, ALIAS_FILE) for spec in self._specs(NAME))


FINDER = AliasFinder()


def enable() -> None:
    """Put the finder on sys.meta_path, once, unless HF_ZERO=0."""
    if _switch() is not False and FINDER not in sys.meta_path:
        sys.meta_path.insert(0, FINDER)


def install() -> None:
    """Make `import deepspeed` import hf_zero in this process, even if a real DeepSpeed is installed.

    Call it before anything imports deepspeed, transformers or accelerate. HF_ZERO=1 does the same for all processes
    that inherit it. Without a real DeepSpeed neither is needed: hf_zero answers by its start-up hook, and where that
    does not run (hf_zero on PYTHONPATH only), from `import hf_zero` on.

    Raises:
        RuntimeError: with HF_ZERO=0, or if a real DeepSpeed was imported before.
    """
    if _switch() is False:
        raise RuntimeError("hf_zero.install() was called, but HF_ZERO=0 turns hf_zero off: unset it or set it to 1.")
    loaded = sys.modules.get(NAME)
    if loaded is not None and not is_ours(loaded):
        where = getattr(loaded, "__file__", None) or "an unknown place"
        raise RuntimeError(
            f"hf_zero.install() came too late: a real deepspeed was already imported from {where}. Call it before "
            "anything imports deepspeed, transformers or accelerate, or start the program with HF_ZERO=1."
        )
    FINDER.forced = True
    enable()
    for name in PATCHED:
        module = sys.modules.get(name)
        if module is not None:
            _patch(module)


def _program(name: str) -> CodeType:
    """The code for `python -m`, which otherwise runs the module without importing it, so without patches."""
    return compile(f"from {name} import main\nmain()", name, "exec")


def _patch(module: ModuleType) -> None:
    from hf_zero.integration.patches import patch

    patch(module)


def _say_who_answers(module: ModuleType) -> None:
    """Log one line on the first rank if a real DeepSpeed was imported although hf_zero is installed."""
    if is_ours(module) or getattr(module, "__file__", None) is None or os.environ.get("RANK", "0") != "0":
        return
    version = getattr(module, "__version__", "of unknown version")
    if sys.stderr is not None:
        sys.stderr.write(
            f"hf_zero: a real DeepSpeed ({version}) is installed too and answers to `import deepspeed`, so hf_zero "
            "does nothing here. HF_ZERO=1 lets hf_zero answer; HF_ZERO=0 keeps DeepSpeed, without this line.\n"
        )


def is_ours(module: ModuleType | None) -> bool:
    """Whether this module is the alias package."""
    return module is not None and getattr(module, "__file__", None) == ALIAS_FILE


def _switch() -> bool | None:
    """HF_ZERO as the user set it: on, off, or None for unset and for anything unclear (this file must stay silent)."""
    return {"1": True, "on": True, "true": True, "0": False, "off": False, "false": False}.get(
        os.environ.get("HF_ZERO", "").strip().lower()
    )


def _submodule_spec(name: str) -> ModuleSpec:
    from hf_zero.integration.names import generated_spec, missing_module

    spec = generated_spec(name)
    if spec is None:
        raise missing_module(name)
    return spec


enable()
