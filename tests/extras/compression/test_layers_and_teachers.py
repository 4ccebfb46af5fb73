"""Layer reduction, in place and from a teacher, and distillation losses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from hf_zero import initialize
from hf_zero.config import ConfigError
from hf_zero.errors import WrongArgument
from hf_zero.extras.compression.export import init_compression, student_initialization
from hf_zero.extras.compression.feature import TeacherLoss, logit_loss
from hf_zero.extras.compression.section import Distillation as DistillationSection
from tests.extras.compression.models import bert_batches, ds_config, tiny_bert

REDUCTION = {"enabled": True, "module_name_prefix": "bert.encoder.layer", "teacher_layer": [1, 3]}


def test_a_model_loses_layers_in_place() -> None:
    model, whole = tiny_bert(4), tiny_bert(4)
    init_compression(model, ds_config(layer_reduction=REDUCTION))
    assert model.config.num_hidden_layers == 2 and len(model.bert.encoder.layer) == 2
    for own, theirs in zip(model.bert.encoder.layer, (whole.bert.encoder.layer[i] for i in (1, 3)), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(own.parameters(), theirs.parameters(), strict=True))
    assert [layer.attention.self.layer_idx for layer in model.bert.encoder.layer] in ([0, 1], [None, None])


@pytest.mark.parametrize("compresses", [False, True])
def test_a_student_takes_over_from_a_teacher(compresses: bool) -> None:
    teacher, student = tiny_bert(4, seed=1), tiny_bert(2, seed=2)
    section = {**REDUCTION, "other_module_name": ["bert.embeddings", "classifier"]}
    if compresses:
        init_compression(student, ds_config(layer_reduction=section), teacher)
    else:
        student_initialization(student, teacher, ds_config(layer_reduction=section))
    own, theirs = student.bert.encoder.layer[1].output.dense, teacher.bert.encoder.layer[3].output.dense
    assert torch.equal(own.weight, theirs.weight) and torch.equal(student.classifier.weight, teacher.classifier.weight)
    assert not torch.equal(student.bert.pooler.dense.weight, teacher.bert.pooler.dense.weight)
    with pytest.raises(ConfigError, match="names 2 layers, but the student has 3"):
        student_initialization(tiny_bert(3), teacher, ds_config(layer_reduction=section))


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({**REDUCTION, "module_name_prefix": "bert.encoder.layers"}, "bert.encoder.layer"),
        ({**REDUCTION, "teacher_layer": [1, 4]}, "layers 0 to 3"),
    ],
)
def test_names_that_the_model_does_not_have(section: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        init_compression(tiny_bert(4), ds_config(layer_reduction=section))


def test_logit_loss() -> None:
    torch.manual_seed(0)
    own, theirs = torch.randn(4, 5, requires_grad=True), torch.randn(4, 5)
    expected = functional.cross_entropy(own / 2, (theirs / 2).softmax(-1)) * 4
    torch.testing.assert_close(logit_loss(own, theirs, 2.0), expected)
    labels = torch.tensor([[1, -100, 2, -100]])
    tokens = logit_loss(own[None], theirs[None], 1.0, labels)
    torch.testing.assert_close(tokens, functional.cross_entropy(own[[0, 2]], theirs[[0, 2]].softmax(-1)))
    torch.testing.assert_close(logit_loss(own[:, :1], theirs[:, :1]), functional.mse_loss(own[:, :1], theirs[:, :1]))


def test_parts_of_the_loss() -> None:
    """Labels, logits, and states: for a student of layers 1 and 3, states 0, 1, 2 are compared with 0, 2, 4."""
    torch.manual_seed(0)
    teacher, student = tiny_bert(4, seed=1).eval(), tiny_bert(2, seed=2)
    batch = bert_batches(1)[0]
    policy = DistillationSection(label_weight=0.5, logit_weight=2.0, hidden_weight=3.0)
    distillation = TeacherLoss(policy, teacher, (1, 3))
    keywords = distillation.keywords(batch)
    output = student(**keywords)
    own_loss = output.loss.detach().clone()
    loss = distillation.apply((), keywords, output).loss
    with torch.no_grad():
        taught = teacher(input_ids=batch["input_ids"], output_hidden_states=True)
    states = zip(output.hidden_states, (taught.hidden_states[index] for index in (0, 2, 4)), strict=True)
    expected = 0.5 * own_loss + 2.0 * logit_loss(output.logits, taught.logits)
    expected = expected + 3.0 * sum(functional.mse_loss(a, b) for a, b in states)
    torch.testing.assert_close(loss, expected)


def test_the_teachers_part_is_this_batchs_share_of_the_update() -> None:
    logits = torch.randn(1, 4, 3)
    output = {"loss": torch.tensor(0.0), "logits": logits}
    teacher = SimpleNamespace(logits=torch.randn(1, 4, 3))
    distillation = TeacherLoss(DistillationSection(), lambda **_: teacher)
    labels = torch.tensor([[-100, 1, 2, -100]])

    class Output(dict[str, Any]):
        __getattr__ = dict.__getitem__

    found = distillation.apply((), {"labels": labels, "num_items_in_batch": 8}, Output(output)).loss
    torch.testing.assert_close(found, logit_loss(logits, teacher.logits, 1.0, labels) * 2 / 8)


def test_labels_that_were_kept_back() -> None:
    config = {**ds_config(), "hf_zero": {"distillation": {}}}
    engine = initialize(model=tiny_bert(), config=config)[0]
    with pytest.raises(WrongArgument, match=r"output\.loss"):
        engine(input_ids=bert_batches(1)[0]["input_ids"])


def test_a_teacher_alone() -> None:
    """Without any technique the teacher equals the initial model, so at first it only repeats the logits."""
    config = {**ds_config(), "hf_zero": {"distillation": {"label_weight": 0.0}}}
    model = tiny_bert()
    engine = initialize(model=model, config=config)[0]
    batch = bert_batches(1)[0]
    loss = engine(**batch).loss
    with torch.no_grad():
        torch.testing.assert_close(loss, logit_loss(model(**batch).logits, model(**batch).logits))
    engine.backward(loss)
    engine.step()
    engine.eval()
    assert engine(**batch).loss > 0
