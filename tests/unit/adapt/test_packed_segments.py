"""Packed rows in a model: each segment is computed as if it were alone, and what leaks is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import oracles
import pytest
import torch
import zoo
from adapt_data_cases import BOS, EOS, shared, written
from transformers import AutoModelForCausalLM, PreTrainedModel

from rewriter.adapt.models import isolates_segments
from rewriter.adapt.token_rows import load_rows


def model_of(family: str, attention: str = "eager") -> PreTrainedModel:
    """A model of the zoo's family that knows the tokenizer's tokens."""
    config = zoo.config(family)
    config.vocab_size = 264
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
    zoo.randomize(model, 0)
    return model.eval()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_packed_examples_are_computed_as_if_alone(family: str, attention: str, tmp_path: Path) -> None:
    model = model_of(family, attention)
    texts = ["packed", "examples of", "one row", "are", "computed as if each were alone in it", "a"]
    path = written(tmp_path, *({"text": text} for text in texts))
    packed = load_rows(path, shared(), length=40)
    single = load_rows(path, shared(), length=40, packing=False)
    assert (len(packed), len(single)) == (2, 6)
    batch = {name: torch.stack([row[name] for row in packed]) for name in packed[0]}
    inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
    with torch.no_grad():
        logits = model(**inputs, use_cache=False).logits
        alone = {i: model(input_ids=torch.tensor([[BOS, *t.encode(), EOS]])).logits[0] for i, t in enumerate(texts)}
        together = model(input_ids=inputs["input_ids"], use_cache=False).logits
    found = [logits[r][batch["segment_ids"][r] == n] for r, n in [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0)]]
    assert [len(f) for f in found] == [8, 13, 9, 5, 38]
    for number, value in enumerate(found):
        assert oracles.relative_error(value, alone[number]) <= 1e-5, number
    leaking = together[0][batch["segment_ids"][0] == 1]
    assert oracles.relative_error(leaking, alone[1]) >= 1e-2  # the comparison sees what leaks


@pytest.mark.parametrize("family", [*zoo.FAMILIES, *zoo.VARIANTS])
def test_families_that_keep_packed_segments_apart(family: str) -> None:
    """Every family does. Of the variants some do not: transformers makes the mask of gpt_oss without the positions."""
    model, ids = zoo.shared(family), zoo.batch(1, 24)
    with torch.no_grad():
        packed = model(input_ids=ids, position_ids=torch.tensor([[*range(10), *range(14)]]), use_cache=False).logits
        alone = model(input_ids=ids[:, 10:], use_cache=False).logits
    apart = oracles.relative_error(packed[:, 10:], alone) <= 1e-4
    assert isolates_segments(model) == apart
    assert apart or family not in zoo.FAMILIES
    assert not apart or family != "gpt_oss"


def test_bf16_keeps_segments_apart_too() -> None:
    model = zoo.build("mixtral", dtype=torch.bfloat16).train()
    state = torch.get_rng_state()
    assert isolates_segments(model)
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())


def test_positions_that_do_not_restart_are_found() -> None:
    """The mask is right, yet a segment is not what it is alone."""
    model = zoo.build("gpt2")
    model.transformer.wpe.register_forward_pre_hook(lambda _, args: (torch.arange(args[0].shape[-1])[None],))
    assert not isolates_segments(model)


def test_a_leak_in_batches_of_several_rows_is_found() -> None:
    """As of kernels that find segments in the positions of one row only."""
    model = zoo.build("llama")

    def forget(_: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, kwargs | ({"position_ids": None} if kwargs["input_ids"].shape[0] > 1 else {})

    model.register_forward_pre_hook(forget, with_kwargs=True)
    assert not isolates_segments(model)


def test_a_leak_smaller_than_rounding_is_found() -> None:
    """By the gradient: such a model's logits are those of the segment alone, within the tolerance."""
    model = zoo.build("llama")
    model.model.norm.register_forward_hook(lambda _, args, states: states + 1e-5 * states[:, :1])
    assert not isolates_segments(model)
