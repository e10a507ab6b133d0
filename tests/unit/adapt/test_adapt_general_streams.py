"""Gradients that `adapt` trains by, of models whose layers hand values on beside a stream of any form: those of the
unmodified model whose blocks read late (`rewriter.check.withheld_reference`), by the Hugging Face file and by the
module of one rank; on two ranks in `ranks/test_adapt_ranks_general_streams.py`."""

from __future__ import annotations

from collections.abc import MutableMapping
from functools import cache
from pathlib import Path
from typing import Any

import emitted
import pytest
import torch
from emitted_ranks import build
from general_streams import GRADIENTS, HEALED, Healed, errors, gradients, healed
from programs import applied

from rewriter.adapt.models import (
    HuggingFaceModel,
    Model,
    ShardedModel,
    freeze_unchanged,
    frozen,
    layers_of,
    load_model,
    share_frozen,
    trunk_of,
)
from rewriter.adapt.output import shard_of
from rewriter.adapt.unshard import full_tensors
from rewriter.emit.huggingface import emit_huggingface
from rewriter.weights import Checkpoint

TYPES = [name if name == "gemma4_text" else pytest.param(name, marks=pytest.mark.slow) for name in HEALED]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("healed")


@cache
def of_type(name: str, scratch: Path) -> Healed:
    return healed(name, scratch / name)


@cache
def hugging_face(name: str, scratch: Path) -> Model:
    """The checkpoint of the ladder, as `adapt` loads it."""
    emitted.write(emit_huggingface(of_type(name, scratch).rewritten), scratch / name, scratch / f"{name}-ladder")
    return HuggingFaceModel(load_model(scratch / f"{name}-ladder", torch.device("cpu"), True), None)


def runtime(name: str, scratch: Path) -> Model:
    source, tensors, ties = of_type(name, scratch).case(1)
    return ShardedModel(build(source, tensors[0], ties, None))


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("kind", [hugging_face, runtime])
def test_gradients_are_those_of_the_unmodified_model(kind: Any, name: str, scratch: Path) -> None:
    case = of_type(name, scratch)
    loss, found = gradients(kind(name, scratch), case.batch)
    assert loss == pytest.approx(case.loss, rel=1e-5)
    assert found.keys() == case.expected.keys()
    far = {name: error for name, error in errors(found, case).items() if not error < GRADIENTS}
    assert not far
    moved = [name for name, gradient in found.items() if gradient.any()]
    assert not [name for name in moved if ".indexer." in name], "a choice has no gradient"
    assert len(moved) > 0.7 * len(found)


def detached(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """The value that a module hands on, without its gradient: a seeded fault."""
    for shared in (value for value in kwargs.values() if isinstance(value, MutableMapping)):
        for key, values in list(shared.items()):
            if isinstance(values, tuple):
                shared[key] = tuple(x.detach() for x in values)
    if not isinstance(output, tuple):
        return output
    return output[0], *(x.detach() if isinstance(x, torch.Tensor) else x for x in output[1:])


@pytest.mark.parametrize("name", TYPES[:2])
def test_a_value_that_is_handed_on_without_its_gradient_is_found(name: str, scratch: Path) -> None:
    """Keys and values of Gemma 4, states of Zaya's routers."""
    case, model = of_type(name, scratch), hugging_face(name, scratch)
    hooks = [
        part.register_forward_hook(detached, with_kwargs=True)
        for layer in layers_of(model.module)
        for part in (layer, layer.self_attn)
    ]
    try:
        loss, found = gradients(model, case.batch)
    finally:
        for hook in hooks:
            hook.remove()
    assert loss == pytest.approx(case.loss, rel=1e-5)
    assert max(errors(found, case).values()) > 100 * GRADIENTS


@pytest.mark.parametrize("name", TYPES)
def test_shards_are_put_together_to_the_checkpoint(name: str, scratch: Path) -> None:
    """Stored buffers are part of it, and no gradient moves them: scales of layers, tables of each token's experts."""
    case, model = of_type(name, scratch), runtime(name, scratch)
    assert [n for n, _ in model.module.named_buffers() if n in case.program.parameters] or name == "zaya"
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.add_(1)
    like, trained = Checkpoint.open(scratch / name), dict(case.model.named_parameters())
    held = case.sharded(1)
    full = full_tensors(held, like, [shard_of(model.module, held)])
    assert full.keys() == like.tensors.keys()
    untouched = [n for n in full if torch.equal(full[n], like.read(n))]
    assert len(full) - len(untouched) >= 0.9 * len(trained)
    assert all(torch.equal(full[n], like.read(n) + 1) for n in full if n not in untouched)


def test_layers_whose_keys_are_read_above_are_computed(scratch: Path) -> None:
    """Layers 2 and 3 of this Gemma 4 read keys and values that layers 0 and 1 stored: no output stands for these."""
    name, out = "gemma4_text", scratch / "upper"
    program = applied(of_type(name, scratch).program, ("ladder", {"layers": [2, 3]}))
    emitted.write(emit_huggingface(program), scratch / name, out)
    student, teacher = (load_model(path, torch.device("cpu"), True) for path in (out, scratch / name))
    freeze_unchanged(student)
    share_frozen(student, frozen(teacher))
    assert trunk_of(student, teacher) is None


@pytest.mark.parametrize("name", TYPES)
def test_the_loss_falls(name: str, scratch: Path) -> None:
    case, model = of_type(name, scratch), runtime(name, scratch)
    optimizer = torch.optim.AdamW(model.module.parameters(), lr=3e-3)
    losses = []
    for _ in range(6):
        losses.append(gradients(model, case.batch)[0])
        optimizer.step()
    assert losses[0] == pytest.approx(case.loss, rel=1e-5)
    assert losses[-1] < 0.9 * losses[0]
