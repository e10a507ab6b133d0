"""The loss of a training step, whose logits are there a few tokens at a time, is that of all logits at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import zoo
from torch import Tensor, nn

from rewriter.adapt import objective
from rewriter.adapt.models import HuggingFaceModel, TokenStates
from rewriter.runtime.replicas import IGNORED

ROWS, LENGTH = 2, 21
APART = sorted(zoo.FAMILIES)


def batch() -> dict[str, Tensor]:
    ids = zoo.batch(ROWS, LENGTH)
    return {"input_ids": ids, "position_ids": torch.arange(LENGTH).expand(ROWS, LENGTH)}


def targets() -> Tensor:
    wanted = zoo.batch(ROWS, LENGTH, seed=3)
    wanted[0, 4:9] = IGNORED
    return wanted


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def check(model: nn.Module, of_states: Callable[[TokenStates], Tensor], of_logits: Callable[[Tensor], Tensor]) -> None:
    """A loss and its gradients, of chunks and of all logits [N, V] that have a target."""
    computed = HuggingFaceModel(model, None)(batch())
    assert computed.head is not None
    loss = of_states(computed)
    found = gradients(model, loss)
    chosen = targets().flatten() != IGNORED
    direct = of_logits(model(**batch(), use_cache=False).logits.flatten(0, 1)[chosen].float())
    assert torch.allclose(loss, direct, rtol=1e-5)
    expected = gradients(model, direct)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.allclose(found[name], gradient, rtol=1e-3, atol=1e-5 * float(gradient.abs().max())), name


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objective, "_CHUNK", 3 * 256)


@pytest.mark.parametrize("family", APART)
def test_chunks_give_the_cross_entropy_and_its_gradients(family: str) -> None:
    wanted = targets()
    own = wanted[wanted != IGNORED]
    check(
        zoo.build(family).eval(),
        lambda computed: objective.cross_entropy(computed, wanted),
        lambda logits: F.cross_entropy(logits, own, reduction="sum"),
    )


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_chunks_give_the_divergence_and_its_gradients(family: str) -> None:
    wanted, teacher = targets(), zoo.build(family, seed=1).eval()
    taught = HuggingFaceModel(teacher, None)(batch())
    there = teacher(**batch(), use_cache=False).logits.flatten(0, 1)[wanted.flatten() != IGNORED].detach() / 2

    def direct(logits: Tensor) -> Tensor:
        p = there.softmax(-1)
        return 4 * (p * (p.log() - (logits / 2).log_softmax(-1))).sum()

    check(zoo.build(family).eval(), lambda computed: objective.divergence(computed, taught, wanted, 2.0), direct)


def test_no_more_logits_are_there_than_a_chunk_has() -> None:
    model, seen = zoo.build("llama").eval(), []
    computed = HuggingFaceModel(model, None)(batch())
    handle = model.get_output_embeddings().register_forward_hook(lambda *call: seen.append(call[2].shape[1]))
    objective.cross_entropy(computed, targets()).backward()
    handle.remove()
    assert max(seen) == 3
    assert sum(seen) == int((targets() != IGNORED).sum())  # and none is computed twice


def test_without_targets_there_is_a_gradient_of_nothing() -> None:
    model = zoo.build("llama").eval()
    computed = HuggingFaceModel(model, None)(batch())
    found = gradients(model, objective.cross_entropy(computed, torch.full((ROWS, LENGTH), IGNORED)))
    assert all(gradient.eq(0).all() for gradient in found.values())


def test_a_head_that_sees_other_tokens_is_computed_whole() -> None:
    model = zoo.build("llama").eval()
    inner = model.lm_head.forward
    model.lm_head.forward = lambda x: inner(x - x.mean(1, keepdim=True))
    computed = HuggingFaceModel(model, None)(batch())
    assert computed.head is None
    assert torch.equal(computed.states, model(**batch(), use_cache=False).logits)
