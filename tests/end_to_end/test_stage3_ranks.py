"""Stage 3 with ranks that do different things: generation, experts, branches, reading the model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import MixtralForCausalLM, Seq2SeqTrainer, Seq2SeqTrainingArguments
from transformers.integrations import HfDeepSpeedConfig

from tests.end_to_end.stage3 import (
    WIDTH,
    Seen,
    assert_same_training,
    assert_trains_as_plain,
    auto_config,
    ds_config,
    engine_of,
    plain,
    rank_batches,
    seeded,
    train_engine,
    vectors,
    whole,
)
from tests.support.architectures import ARCHITECTURES, share
from tests.support.models import Batch, tiny_llama
from tests.support.ranks import run_ranks


def find_stop(rows: list[list[int]]) -> int:
    """A token that the first row generates early and the second one never."""
    for place, token in enumerate(rows[0][:8]):
        if 1 <= place and token not in rows[1] and token not in rows[0][:place]:
            return token
    raise AssertionError(f"no token ends the first row only: {rows}")


def lively_llama() -> Any:
    """Random weights large enough for greedy continuations to vary."""
    model = tiny_llama()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(12)
    return model.eval()


PROMPTS = [[5, 9, 77], [100, 41, 6]]


def continuation(model: Any, rank: int, stop: int | None) -> list[int]:
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, "eos_token_id": stop}
    tokens: list[int] = model.generate(torch.tensor([PROMPTS[rank]]), **options)[0, 3:].tolist()
    return tokens


def run_generate(rank: int, stop: int, trainer_like: bool) -> tuple[list[int], Seen]:
    alive = HfDeepSpeedConfig(ds_config()) if trainer_like else None
    model = lively_llama()
    engine = engine_of(model)
    tokens = continuation(engine.module, rank, stop)
    tokens_again = continuation(engine, rank, stop)  # through the engine's attributes
    assert tokens_again == tokens
    seen = *train_engine(engine.train(), [step[rank] for step in rank_batches(2)]), whole(model)
    del alive
    return tokens, seen


@pytest.mark.parametrize("trainer_like", [False, True], ids=["script", "trainer"])
def test_generate_ends_when_ranks_finish_at_different_lengths(trainer_like: bool) -> None:
    """A rank whose text was complete left the gathers that the other one waited for, which hung until the timeout
    unless the user knew the flag synced_gpus."""
    model = lively_llama()
    stop = find_stop([continuation(model, rank, None) for rank in (0, 1)])
    expected = [continuation(model, rank, stop) for rank in (0, 1)]
    assert len(expected[0]) < 10 < len(expected[1])
    answers = run_ranks(run_generate, 2, stop, trainer_like, timeout_s=60)
    assert [tokens for tokens, _ in answers] == expected
    # ... and training is as if there had been no generation before it.
    assert_same_training([seen for _, seen in answers], plain(lively_llama(), rank_batches(2)))


def run_predict_with_generate(rank: int, folder: str, stop: int) -> list[list[int]]:
    rows = translations()
    options: dict[str, Any] = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
    training = Seq2SeqTrainingArguments(
        folder,
        predict_with_generate=True,
        per_device_eval_batch_size=1,
        per_device_train_batch_size=1,
        deepspeed=auto_config(),
        **options,
    )
    trainer = Seq2SeqTrainer(model=lively_t5(stop), args=training, eval_dataset=rows)  # type: ignore[arg-type]
    predicted = trainer.predict(rows).predictions  # type: ignore[arg-type]
    return [[int(token) for token in row[1:] if token not in (-100, 0)] for row in predicted]


def translations() -> list[dict[str, list[int]]]:
    batch = ARCHITECTURES["t5"].batches(1, 4)[0]
    return [{key: value[row].tolist() for key, value in batch.items()} for row in range(4)]


def lively_t5(stop: int | None) -> Any:
    model = ARCHITECTURES["t5"].build()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(3)
    settings = model.generation_config
    settings.suppress_tokens, settings.eos_token_id = [0], stop  # 0 is also padding, which would look like the end
    settings.max_new_tokens, settings.do_sample = 20, False
    return model.eval()


def test_predict_with_generate_of_a_trainer(tmp_path: Path) -> None:
    """Seq2SeqTrainer's evaluation hung for the same reason, at the first batch whose ranks needed different lengths."""

    def answers(stop: int | None) -> list[list[int]]:
        model = lively_t5(stop)
        rows = [torch.tensor([row["input_ids"]]) for row in translations()]
        return [model.generate(ids)[0, 1:].tolist() for ids in rows]

    free = answers(None)
    stop = next(token for token in free[0][1:] if token not in free[1])
    expected = answers(stop)
    assert len(expected[0]) < len(expected[1]) == 20, "both ranks of one length: this would prove nothing"
    for predicted in run_ranks(run_predict_with_generate, 2, str(tmp_path), stop, init=False, timeout_s=60):
        assert predicted == expected


def biased_mixtral() -> Any:
    """Tokens below 50 are routed to experts 0 and 1, the others to 2 and 3."""
    model = ARCHITECTURES["mixtral"].build()
    assert isinstance(model, MixtralForCausalLM)
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        embedding[:50, 0], embedding[50:, 0] = 3.0, -3.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.01)
            layer.mlp.gate.weight[:, 0] = torch.tensor([5.0, 5.0, -5.0, -5.0])
    return model


def mixtral_batches(steps: int) -> list[list[Batch]]:
    generator = torch.Generator().manual_seed(0)
    parts = []
    for _ in range(steps):
        low = torch.randint(3, 50, (4, 10), generator=generator)
        high = torch.randint(50, 90, (4, 10), generator=generator)
        parts.append([{"input_ids": ids, "labels": ids} for ids in (low, high)])
    return parts


def test_disjoint_experts_of_mixtral() -> None:
    """Experts of transformers' models are packed into one parameter; test_stage3_any_order.py has modules."""
    model = biased_mixtral()
    used = []
    for part in mixtral_batches(1)[0]:
        model.zero_grad()
        model(**part).loss.backward()
        gradient = model.model.layers[0].mlp.experts.gate_up_proj.grad
        used.append(set(gradient.flatten(1).any(1).nonzero().flatten().tolist()))
    assert used == [{0, 1}, {2, 3}], "the routing is not disjoint: this would prove nothing"
    assert_trains_as_plain(biased_mixtral, partial(mixtral_batches, 4))


def story_batches(steps: int) -> list[list[Batch]]:
    """One of the two ranks has images, the other only text; they alternate."""
    parts = []
    for step, batch in enumerate(ARCHITECTURES["llava"].batches(steps, 4)):
        ranks = [share(batch, rank, 2) for rank in (0, 1)]
        text = ranks[step % 2]["input_ids"][:, -10:]
        ranks[step % 2] = {"input_ids": text, "labels": text}
        parts.append(ranks)
    return parts


def test_a_text_batch_beside_a_vision_batch() -> None:
    """One rank's batch had no image, so its vision tower did not run, and the other rank waited for it forever."""
    build, parts = ARCHITECTURES["llava"].build, partial(story_batches, 4)
    assert_trains_as_plain(build, parts, limits=[{"stage3_max_live_parameters": 100_000}])


class Branches(nn.Module):
    """A branch right under the root that only batches with the flag use."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.branch = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.outlet = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, flag: bool) -> Tensor:
        hidden = self.trunk(x)
        if flag:
            hidden = hidden + self.branch(hidden)
        return self.outlet(hidden).square().mean()


def flagged(steps: int) -> list[list[Batch]]:
    return [
        [{**part, "flag": torch.tensor(rank == step % 3)} for rank, part in enumerate(parts)]
        for step, parts in enumerate(vectors(steps))
    ]


def test_a_branch_that_runs_on_one_rank_or_on_none() -> None:
    """A module executed on some ranks only left the others in another collective."""
    assert_trains_as_plain(partial(seeded, Branches), partial(flagged, 6))


def run_rank_0_looks(rank: int) -> Seen:
    model = tiny_llama()
    engine = engine_of(model)
    seen: tuple[list[float], list[float]] = ([], [])
    for parts in rank_batches(3):
        if rank == 0:  # typical logging on the main process
            assert repr(engine) and model.num_parameters() == tiny_llama().num_parameters()
            assert {name: tuple(value.shape) for name, value in model.named_parameters()}
            with pytest.raises(
                RuntimeError, match=r"parameter 'lm_head.weight' cannot be read here \(torch.Tensor.norm"
            ):
                float(model.lm_head.weight.detach().norm())
            sum(p.numel() for p in model.parameters() if p.requires_grad)
        losses, norms = train_engine(engine, [parts[rank]])
        seen = (seen[0] + losses, seen[1] + norms)
    return *seen, whole(model)


def test_rank_0_may_look_at_the_model_alone() -> None:
    """`if is_main_process:` around a norm or a parameter count: the read gathered, without the other ranks. Queries
    that need no values now work; others raise an error that names the parameter, and training continues."""
    assert_same_training(run_ranks(run_rank_0_looks, 2, timeout_s=60), plain(tiny_llama(), rank_batches(3)))
