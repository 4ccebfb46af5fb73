"""mixed_precision="fp8" under Accelerate: at each stage the results bitwise equal those of torchao alone.

Scales are per tensor, so two ranks with the same samples get the same as one. CPUs emulate the products.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.launch import alone_is_not_distributed
from tests.support.ranks import run_ranks
from tests.support.requirements import requires

STEPS = 3


def model_and_ids() -> tuple[Any, torch.Tensor]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=96, num_key_value_heads=4, **sizes))
    return model, torch.randint(0, 96, (2, 16), generator=torch.Generator().manual_seed(1))


def losses_of(model: Any, ids: torch.Tensor, optimizer: Any, backward: Any) -> list[float]:
    losses = []
    for _ in range(STEPS):
        loss = model(input_ids=ids, labels=ids).loss
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def under_accelerate(rank: int, stage: int) -> list[float]:
    alone_is_not_distributed()
    import hf_zero

    hf_zero.install()
    from accelerate import Accelerator
    from accelerate.utils import AORecipeKwargs, DeepSpeedPlugin
    from torchao.float8 import Float8LinearConfig

    zero = {"stage": stage} | ({"stage3_param_persistence_threshold": 0} if stage == 3 else {})
    config = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": False}, "gradient_clipping": 0.0}
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="fp8",
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config={**config, "zero_optimization": zero}),
        kwargs_handlers=[AORecipeKwargs(config=Float8LinearConfig(emulate=True))],
    )
    model, ids = model_and_ids()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    kinds = [type(module).__name__ for module in model.modules()]
    assert kinds.count("Float8Linear") == 2 * 7 - 1 and kinds.count("Linear") == 2  # the first and the last stay
    return losses_of(model, ids, optimizer, accelerator.backward)


@requires(modules=("torchao",))
@pytest.mark.slow
@pytest.mark.parametrize(("stage", "ranks"), [(0, 1), (2, 2), (3, 1), (3, 2)])
def test_equals_torchao_on_its_own(stage: int, ranks: int) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model, ids = model_and_ids()
    ends = ("model.layers.0.self_attn.q_proj", "lm_head")
    convert_to_float8_training(
        model, module_filter_fn=lambda _, name: name not in ends, config=Float8LinearConfig(emulate=True)
    )
    expected = losses_of(model, ids, torch.optim.SGD(model.parameters(), lr=0.1), torch.Tensor.backward)
    assert run_ranks(under_accelerate, ranks, stage, init=False) == [expected] * ranks
