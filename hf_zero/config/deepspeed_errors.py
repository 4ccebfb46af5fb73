"""What DeepSpeed raises and says where we find a problem.

Scripts that catch DeepSpeed's errors, suites with `pytest.raises(..., match=...)`, and people who search for a message
know a type and a few distinctive words. So an error of ours is of that type too, and shows those words with its own
rule: they are an interface, as names of keys are, and the rest of the sentence is ours. `tests/config/wrong_setups.py`
has them for each set-up, or why it has none, and a test asks a real DeepSpeed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_BATCH, _OF_CHOICE = "train_.*|gradient_accumulation_steps", r"(?:optimizer|scheduler)\.params\.(?P<key>.*)"
_EQUATION = "train_batch_size is not equal to micro_batch_per_gpu * gradient_acc_step * world_size"
_EITHER = "train_batch_size or train_micro_batch_size_per_gpu"
_SOURCE = "Expected a string path to an existing deepspeed config, or a dictionary"

# As DeepSpeed 0.19.8 has it: a regex for the whole path of the problem, one found in our rule, the type (None: a
# ValueError or its own DeepSpeedConfigError, as all of ours are), and how our rule is shown ("": as it is).
_ANSWERS: tuple[tuple[str, str, type[Exception] | None, str], ...] = (
    (_BATCH, "must be at least 1", AssertionError, "has to be greater than 0: {rule}"),
    (_BATCH, "must be given", AssertionError, f"{_EITHER} needs to be provided: {{rule}}"),
    (_BATCH, "does not hold", AssertionError, f"{_EQUATION}: {{rule}}"),
    (_BATCH, "", AssertionError, ""),
    (r"fp16\.enabled, bf16\.enabled", "", AssertionError, "fp16 and bf16 modes cannot be simultaneously enabled"),
    (r"fp16\.loss_scale", "at least 0", None, "fp16.loss_scale must be >= 0"),
    (r"(?:fp16|bf16|zero_optimization)\..*", "no such key", None, "Extra inputs are not permitted: {rule}"),
    (r"optimizer\.type", "neither", AssertionError, "is not a supported DeepSpeed Optimizer: it {rule}"),
    (r"scheduler\.type", "neither|case", AssertionError, "hf_zero does not recognize LR scheduler {value}: {rule}"),
    (r"(?:optimizer|scheduler)\.type", "", AssertionError, ""),
    (r"(?:optimizer|scheduler)\.params", "", TypeError, ""),
    (_OF_CHOICE, "no such argument", TypeError, "got an unexpected keyword argument '{key}': {rule}"),
    (_OF_CHOICE, " needs ", TypeError, "missing 1 required positional argument: '{key}'; {rule}"),
    (_OF_CHOICE, "clipping", None, "'{key}' is not supported as an optimizer parameter: {rule}"),
    (r"scheduler\.params\.(?P<key>warmup_num_steps)", "at least 0", None, "{key} must be a positive integer or 0"),
    (r"(?P<key>communication_data_type|gradient_allreduce_op)", "must be", None, "Invalid {key}: {rule}"),
    (r"checkpoint\.tag_validation", "must be", None, "invalid tag_validation value: {rule}"),
    (r"checkpoint\.parallel_write\.(?P<key>.*)", "must be", None, "{key} value of {value} is invalid: {rule}"),
    (r"data_types\.grad_accum_dtype", "", NotImplementedError, "unsupported mix of model_dtype and this: {rule}"),
    (r"bf16\.(?P<key>bf16_.*states)", "", AssertionError, "{key} requires bf16_master_weights_and_grads: {rule}"),
    (r"bf16\.bf16_.*|fp16\.fp16_.*|data_types\.param_dtype", "", AssertionError, ""),
    ("log_level", "must be", None, "is not one of the valid logging levels: {rule}"),
    (
        "config",
        "no config",
        AssertionError,
        "{rule}: initialize() requires --deepspeed_config to specify configuration file",
    ),
    (r"config|args\.deepspeed_config", "given", AssertionError, ""),
    ("config", "is not a config|no such file", None, f"{_SOURCE}: {{rule}}"),
)


def _answer(path: str, rule: str) -> tuple[type[Exception] | None, str, str]:
    """The first row that fits: type, how the rule is shown, and the last key of the path."""
    for wanted, words, kind, shown in _ANSWERS:
        match = re.fullmatch(wanted, path)
        if match and re.search(words, rule):
            return kind, shown, match.groupdict().get("key", "")
    return None, "", ""


def kinds_of(path: str, rule: str, value: object) -> Iterator[type[Exception]]:
    """The types, besides our own, of the error that DeepSpeed raises for such a problem."""
    kind, _, _ = _answer(path, rule)
    if kind is not None:
        yield kind
    if value == "auto" and path.rpartition(", ")[2].startswith("train_"):
        yield TypeError  # it computes with the text


def shown_rule(path: str, rule: str, value: str) -> str:
    """Our rule with DeepSpeed's words; `value` as it is shown."""
    _, shown, key = _answer(path, rule)
    return sentence(shown.format(rule=rule, value=value, key=key) if shown else rule)


def sentence(rule: str) -> str:
    """With its subject, which stands in the line before: "must be text" becomes "it must be text"."""
    first = rule.partition(" ")[0]
    if first in ("not", "neither"):
        return f"it is {rule}"
    return f"it {rule}" if first in ("must", "is", "has", "needs") else rule
