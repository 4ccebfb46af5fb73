"""Registers a model for sequence parallelism under DeepSpeed's name."""

from __future__ import annotations

from typing import Any

from hf_zero.comm import Channel, collectives_for, local_device
from hf_zero.errors import WrongArgument
from hf_zero.features import text_config, unwrapped
from hf_zero.sequence.attention import attach, check_config, check_model
from hf_zero.sequence.groups import SequenceGroups, make_groups


class UlyssesSPAttentionHF:
    """DeepSpeed's name for sequence parallelism in transformers models."""

    @classmethod
    def register_with_transformers(
        cls,
        model_name_or_path: Any,
        core_attn_implementation: str | None,
        sequence_parallel_size: int,
        micro_batch_size: int,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
        max_length: int | None = None,
    ) -> SequenceGroups | None:
        """Let groups of `sequence_parallel_size` ranks share sequences: consecutive ones, or where `tp_model_init` has
        marked the model, consecutive ones among those that will hold the same parts. Collective; may be called again.

        Args:
            model_name_or_path: a transformers model, which PEFT may wrap; or its name, in which case the model passed
                to `deepspeed.initialize` is used.
            core_attn_implementation: must be the model's own, if given.
            micro_batch_size, seq_length: not needed, because batches and lengths may differ between forwards.
            disable_in_eval: whether inputs in eval mode are whole sequences.
            max_length: older name of `seq_length`.

        Returns:
            The mpu for `deepspeed.initialize(mpu=...)`; None for a size of 1.

        Raises:
            ValueError: if sizes are not divisible, or the model does not support sequence parallelism.
        """
        if sequence_parallel_size == 1:
            return None
        if not seq_length_is_variable and seq_length is None and max_length is None:
            raise WrongArgument("seq_length_is_variable=False needs seq_length=, the length of the whole sequences")
        length = max_length if seq_length is None else seq_length
        if not seq_length_is_variable and length is not None and length % sequence_parallel_size:
            raise WrongArgument(
                f"sequence length = ranks per sequence x positions per rank does not hold: {length} != "
                f"{sequence_parallel_size} x n"
            )
        model = None if isinstance(model_name_or_path, str) else model_name_or_path
        if model is None:
            from transformers import AutoConfig

            check_config(text_config(AutoConfig.from_pretrained(model_name_or_path)), sequence_parallel_size)
        else:
            check_model(unwrapped(model), sequence_parallel_size)
        if core_attn_implementation is not None:
            _check_attention(model, core_attn_implementation)
        groups = make_groups(sequence_parallel_size, model)
        groups.skips_evaluation = disable_in_eval
        if model is not None:
            collectives = collectives_for(local_device(), Channel.LAYERS, groups.partition)
            attach(model, collectives, skips_evaluation=disable_in_eval)
        return groups


def _check_attention(model: Any, asked: str) -> None:
    from transformers import AttentionInterface

    known = ["eager", *AttentionInterface._global_mapping]
    if asked not in known:
        raise WrongArgument(f"core_attn_implementation={asked!r} is not known to transformers: {', '.join(known)}")
    own = asked if model is None else text_config(unwrapped(model).config)._attn_implementation
    if asked != own:
        raise WrongArgument(
            f"the model uses {own!r}, but core_attn_implementation is {asked!r}: load the model with "
            f"attn_implementation={asked!r}, or leave the argument None"
        )
