"""Writes docs/api.md from the docstrings of what users call.

`python docs/api.py` writes the page, `--check` fails when it is not up to date.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from hf_zero.api.engine import ZeroEngine
from hf_zero.integration.engine.config_queries import ConfigQueries
from hf_zero.integration.engine.engine import DeepSpeedEngine
from hf_zero.integration.engine.optimizer import DeepSpeedOptimizer
from hf_zero.integration.engine.view import View
from hf_zero.step.optimizer import ZeroOptimizer

PAGE = Path(__file__).with_suffix(".md")

HEAD = """# API reference

Under Trainer and Accelerate you call none of this: they do. Names below `deepspeed` are hf_zero's under DeepSpeed's
names, after `import deepspeed`; whatever else of DeepSpeed exists is listed in [DeepSpeed's names](deepspeed_names.md).

**Collective** means: every rank must make the call, in the same order, or the ranks wait for each other. *Rank* is one
process of a launch, with one device. A *master* is the fp32 copy of a weight that the optimizer updates. An *update* is
one change of the weights: with gradient accumulation, one in `gradient_accumulation_steps` calls of `step`.
"""

# Title -> what stands in it: "name for users = home"; after a dot, the home's name is the user's. Names without a home
# are attributes of OWNERS.
FUNCTIONS = {
    "Start": """
        hf_zero.initialize=integration.engine.engine.
        hf_zero.init_distributed=comm.
        hf_zero.install=integration.startup.
    """,
    "Engine: training": """
        engine=api.engine.ZeroEngine
        engine.forward engine.backward engine.step engine.no_sync engine.scale engine.zero_grad engine.train
        engine.is_gradient_accumulation_boundary engine.set_gradient_accumulation_boundary
        engine.was_step_applied engine.get_global_grad_norm engine.get_lr engine.get_mom engine.loss_scale
        engine.skipped_steps engine.micro_steps
    """,
    "Engine: batches": """
        engine.train_batch_size engine.train_micro_batch_size_per_gpu engine.gradient_accumulation_steps
        engine.get_batch_info engine.set_train_batch_size engine.set_train_micro_batch_size engine.deepspeed_io
    """,
    "Engine: checkpoints and weights": """
        engine.save_checkpoint engine.load_checkpoint engine.preempted engine.save_16bit_model engine.module_state_dict
        engine.load_module_state_dict
    """,
    "Engine: memory and speed": """
        engine.compile engine.to engine.offload_states engine.reload_states engine.empty_partition_cache
        engine.get_wall_clock_timers engine.destroy
    """,
    "Optimizer": """
        optimizer=step.optimizer.ZeroOptimizer
        optimizer.step optimizer.zero_grad optimizer.state_dict optimizer.load_state_dict optimizer.add_param_group
        optimizer.get_lr optimizer.set_lr optimizer.loss_scale optimizer.override_loss_scale optimizer.overflow
        optimizer.grad_norm optimizer.refresh_fp32_params
    """,
    "Sharded parameters": """
        deepspeed.zero.Init=api.zero_init.
        deepspeed.zero.GatheredParameters=api.gathered_parameters.
        hf_zero.gathered=api.gathered_parameters.
        hf_zero.gathered_weights=api.gathered_parameters.
        deepspeed.zero.register_external_parameter=api.gathered_parameters.
    """,
    "Masters, gradients and states of one parameter": """
        deepspeed.utils.safe_get_full_fp32_param=api.parameter_access.
        deepspeed.utils.safe_get_full_grad=api.parameter_access.
        deepspeed.utils.safe_get_full_optimizer_state=api.parameter_access.
        deepspeed.utils.safe_set_full_fp32_param=api.parameter_access.
        deepspeed.utils.safe_set_full_grad=api.parameter_access.
        deepspeed.utils.safe_set_full_optimizer_state=api.parameter_access.
        deepspeed.utils.safe_update_full_grad_vectorized=api.parameter_access.
        deepspeed.utils.safe_get_local_fp32_param=api.parameter_access.
        deepspeed.utils.safe_get_local_grad=api.parameter_access.
        deepspeed.utils.safe_get_local_optimizer_state=api.parameter_access.
        deepspeed.utils.safe_set_local_fp32_param=api.parameter_access.
        deepspeed.utils.safe_set_local_grad=api.parameter_access.
        deepspeed.utils.safe_set_local_optimizer_state=api.parameter_access.
    """,
    "Ordinary weights from a checkpoint": """
        zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint=checkpoint.consolidate.
        zero_to_fp32.load_state_dict_from_zero_checkpoint=checkpoint.consolidate.
        zero_to_fp32.convert_zero_checkpoint_to_state_dict=checkpoint.consolidate.
        zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict=checkpoint.consolidate.
        zero_to_fp32.LazyTensor=checkpoint.consolidate.
    """,
    "Errors": """
        ConfigError=config.errors. Problem=config.errors.
        DeepSpeedConfigError=config.errors. SyntaxProblem=config.text.
        WrongArgument=errors. WrongMoment=errors. CheckpointError=errors.
        StorageError=offload.vector. DoesNotFit=offload.memory_estimate.
        Disagreement=comm.negotiation. Mismatch=comm.cpu.shared_memory.
        LaunchError=launch. ElasticityError=extras.elasticity.
        ElasticityConfigError=extras.elasticity.
        ElasticityIncompatibleWorldSize=extras.elasticity.
    """,
}
NOTES = {
    "Start": "`hf_zero.DummyOptim` and `hf_zero.DummyScheduler` are Accelerate's classes ([page](accelerate.md)).",
    "Engine: training": "`engine` is what `initialize` returns first; `trainer.model_wrapped` and the model that "
    "`accelerator.prepare` returns are engines, too.",
    "Optimizer": "What `initialize` returns second, also `engine.optimizer`; its class has the name of DeepSpeed's.",
    "Sharded parameters": "At stage 3 a rank holds a part of each parameter, whose own tensor is empty outside of "
    "forward and backward ([page](stage3.md)). At other stages these do nothing, and programs need no `if`.",
    "Masters, gradients and states of one parameter": "For programs that read or change what the optimizer has of a "
    "parameter, at any stage and place. Shapes are the parameter's, values fp32. `param` is a parameter of the model.",
    "Ordinary weights from a checkpoint": "`from hf_zero.checkpoint import consolidate as zero_to_fp32`, or "
    "`deepspeed.utils.zero_to_fp32`. They need no ranks, no GPU and no engine; the command is "
    "`python -m hf_zero.zero_to_fp32` ([page](checkpoints.md)).",
    "Errors": "Causes and fixes: [troubleshooting](troubleshooting.md), which has a heading for each.",
}
# Of the engine's and the optimizer's own methods, what no user calls.
INTERNAL = {"optimizer_class", "training_progress", "knows_overflow", "late_norm", "has_gradients", "foresee_norm"}
INTERNAL |= {"param_groups", "state", "defaults", "cur_scale"}  # in the docstring of the class
HANDED_OUT = ("engine", "optimizer", "zero_to_fp32.LazyTensor", "Problem")  # users get these, and create none
OWNERS: dict[str, type] = {"engine": DeepSpeedEngine, "optimizer": DeepSpeedOptimizer}


def entries(text: str) -> Iterator[tuple[str, Any]]:
    """(name for users, object) of the names in `text`."""
    for word in text.split():
        shown, _, home = word.partition("=")
        owner, _, name = shown.rpartition(".")
        if home:
            module, _, name = home.rpartition(".")
            yield shown, getattr(import_module(f"hf_zero.{module}"), name or shown.rpartition(".")[2])
        else:
            yield shown, inspect.getattr_static(OWNERS[owner], name)


class _Words(str):
    """An annotation that inspect shows without quotes."""

    def __repr__(self) -> str:
        return str(self)


def kinds(shown: str, thing: Any) -> str:
    """Where an error is imported from, and the errors of Python that it is too."""
    if not (inspect.isclass(thing) and issubclass(thing, BaseException)):
        return ""
    builtin = [f"`{each.__name__}`" for each in thing.__mro__ if each.__module__ == "builtins" and each not in _ALL]
    return f"`{thing.__module__}.{shown}`, derived from {', '.join(builtin) or '`Exception`'}.\n"


_ALL = (Exception, BaseException, object)


def signature(shown: str, thing: Any) -> str:
    """The definition, without a body, as code that Python can parse; empty for attributes and classes of errors."""
    if isinstance(thing, (property, View)) or (inspect.isclass(thing) and issubclass(thing, BaseException)):
        return ""
    if shown in HANDED_OUT:
        return ""
    name = shown.rpartition(".")[2]
    found = inspect.signature(thing)
    bound = shown.startswith(("engine.", "optimizer."))
    words = list(found.parameters.values())[1 if bound else 0 :]
    parts = [str(each.replace(annotation=_Words(each.annotation))) for each in words]
    head, returns = f"def {name}", name if inspect.isclass(thing) else found.return_annotation
    line = f"{head}({', '.join(parts)}) -> {returns}: ..."
    if len(line) > 100:
        line = f"{head}(\n" + "".join(f"    {part},\n" for part in parts) + f") -> {returns}: ..."
    return f"```python\n{line}\n```\n"


_SECTIONS = ("Args", "Attributes", "Returns", "Raises")


def body(shown: str, thing: Any) -> Iterator[str]:
    """A docstring as Markdown, paragraph by paragraph."""
    text = inspect.getdoc(thing)
    if not text or text == inspect.getdoc(type(thing)):
        raise SystemExit(f"{shown}: has no docstring, and docs/api.py shows it")
    section = ""
    for paragraph in text.split("\n\n"):
        first = paragraph.partition("\n")[0]
        if first.rstrip(":") in _SECTIONS and first.endswith(":"):
            section = first.rstrip(":")
            yield from items(section, textwrap.dedent(paragraph.partition("\n")[2]))
        elif paragraph.startswith("    "):
            yield f"```python\n{textwrap.dedent(paragraph)}\n```\n"
        else:
            yield f"{' '.join(paragraph.split())}\n"


def items(section: str, text: str) -> Iterator[str]:
    """The lines of a section: one list item per argument, attribute or error."""
    entries = re.split(r"\n(?! )", text)
    if section == "Returns":
        yield f"*Returns:* {' '.join(text.split())}\n"
        return
    lines = []
    for entry in entries:
        name, colon, meaning = " ".join(entry.split()).partition(": ")
        names = ", ".join(f"`{each.strip()}`" for each in name.split(","))
        is_named = bool(colon) and re.fullmatch(r"[\w, ]+", name) is not None
        lines.append(f"- {names}: {meaning}" if is_named else f"- {' '.join(entry.split())}")
    yield f"*{'Arguments' if section == 'Args' else section}:*\n\n" + "\n".join(lines) + "\n"


def queries(listed: Sequence[str]) -> str:
    """One paragraph about the methods that return a value of the config."""
    names = [name for name, each in vars(ConfigQueries).items() if not name.startswith("_") and callable(each)]
    rest = ", ".join(f"`{name}`" for name in sorted(names) if f"engine.{name}" not in listed)
    return (
        "### Values of the config\n\nEach of these methods takes no argument and returns the value of the key that it "
        f'is named after, with defaults and `"auto"` filled in: {rest}.\n'
    )


def page() -> str:
    parts, listed = [HEAD], []
    for title, text in FUNCTIONS.items():
        parts.append(f"## {title}\n")
        if title in NOTES:
            parts.append(f"{NOTES[title]}\n")
        for shown, thing in entries(text):
            listed.append(shown)
            parts += [f"### {shown}\n", signature(shown, thing), kinds(shown, thing), *body(shown, thing)]
        if title == "Engine: batches":
            parts.append(queries(listed))
    for owner, kind in {"engine": ZeroEngine, "optimizer": ZeroOptimizer}.items():
        for name in vars(kind):
            if not name.startswith("_") and name not in INTERNAL and f"{owner}.{name}" not in listed:
                raise SystemExit(f"{owner}.{name}: list it in docs/api.py, or among the internal ones")
    return "\n".join(filter(None, parts))


def main(words: Sequence[str]) -> int:
    text = page()
    if "--check" in words:
        return 0 if PAGE.read_text(encoding="utf-8") == text else 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
