"""The emitted checkpoint computes the ladder: logits, generation with its caches, padding, every entry point."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import emitted
import oracles
import pytest
import torch
import zoo
from torch import fx
from transformers import AutoModel

from rewriter.emit.huggingface import emit_huggingface
from rewriter.ir.marks import in_stream, stream_index
from rewriter.passes.ladder import Ladder

TOLERANCE = 1e-5


def vocabulary(family: str) -> int:
    return min(zoo.shared(family).config.vocab_size, 256)


def sdpa_is_exact(family: str) -> bool:
    """True if the source has SDPA attention that computes what its eager attention does: it knows no soft-caps."""
    return zoo.shared(family)._supports_sdpa and not getattr(zoo.config(family), "attn_logit_softcapping", None)


def cases(fast: str, selections: Sequence[str]) -> list[Any]:
    """(family, selection): every family with `fast`, the others in the slow tests."""
    slow = [pytest.param(f, s, marks=pytest.mark.slow) for f in zoo.FAMILIES for s in selections if s != fast]
    return [*((family, fast) for family in zoo.FAMILIES), ("llama", "all"), *slow]


@pytest.mark.parametrize(("family", "selection"), cases("scattered", emitted.SELECTIONS))
@pytest.mark.fast("llama-scattered", "llama-all0")
def test_logits_equal_the_oracle(family: str, selection: str) -> None:
    model, layers = zoo.shared(family), emitted.layers(family, selection)
    ids = zoo.batch(rows=2, length=37, vocab=vocabulary(family))
    expected = oracles.ladder_logits(model, layers, ids)
    assert oracles.relative_error(oracles.ladder_logits(model, set(), ids), expected) >= 1e-2
    for attention in ["eager", "sdpa"] if sdpa_is_exact(family) else ["eager"]:
        with torch.no_grad():
            logits = emitted.shared(family, selection, attention)(input_ids=ids).logits
        assert oracles.relative_error(logits, expected) <= TOLERANCE, attention


def test_sdpa_of_a_soft_capped_model_is_what_the_source_makes_of_it() -> None:
    """Gemma 2's SDPA is refused by newer transformers and drops the soft-caps in older ones: theirs, not ours."""
    original = zoo.build("gemma2")
    if not original._supports_sdpa:
        with pytest.raises(ValueError, match="scaled_dot_product_attention"):
            emitted.shared("gemma2", "all", "sdpa")
        return
    original.set_attn_implementation("sdpa")
    ids = zoo.batch()
    expected = oracles.ladder_logits(original, emitted.layers("gemma2", "all"), ids)
    with torch.no_grad():
        logits = emitted.shared("gemma2", "all", "sdpa")(input_ids=ids).logits
    assert oracles.relative_error(logits, expected) <= TOLERANCE


@pytest.mark.parametrize("family", zoo.FAMILIES)
@pytest.mark.fast("llama", "gpt2", "gemma3_text")
def test_generate_with_cache_and_left_padding(family: str) -> None:
    check_generation(family, "upper-half", 16)


@pytest.mark.slow
@pytest.mark.parametrize("selection", emitted.SELECTIONS)
@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_long_generate_with_cache_and_left_padding(family: str, selection: str) -> None:
    check_generation(family, selection, 64)


def check_generation(family: str, selection: str, tokens: int) -> None:
    """Greedy text of a left-padded batch with a cache is what recomputing everything with the oracle gives."""
    original, layers = zoo.shared(family), emitted.layers(family, selection)
    prompts = zoo.prompts(8, vocabulary(family))
    expected = oracles.greedy_oracle(lambda ids: oracles.ladder_logits(original, layers, ids), prompts, tokens)
    model, inputs = emitted.shared(family, selection), emitted.left_padded(prompts)
    text = model.generate(**inputs, max_new_tokens=tokens, do_sample=False, use_cache=True)
    assert text[:, inputs["input_ids"].shape[1] :].tolist() == expected
    assert all(len(set(row)) > 1 for row in expected)


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "mixtral"])
def test_static_cache(family: str) -> None:
    model, inputs = emitted.shared(family, "scattered"), emitted.left_padded(zoo.prompts(3))
    dynamic = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    static = model.generate(**inputs, max_new_tokens=12, do_sample=False, cache_implementation="static")
    uncached = model.generate(**inputs, max_new_tokens=12, do_sample=False, use_cache=False)
    assert dynamic.tolist() == static.tolist() == uncached.tolist()


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "gpt_neox"])
def test_left_padding_changes_no_logit(family: str) -> None:
    model = emitted.shared(family, "scattered")
    prompts = zoo.prompts(3, vocabulary(family))
    inputs = emitted.left_padded(prompts)
    positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        together = model(**inputs, position_ids=positions).logits
        for row, prompt in enumerate(prompts):
            alone = model(input_ids=torch.tensor([prompt])).logits[0]
            assert oracles.relative_error(together[row, -len(prompt) :], alone) <= TOLERANCE


@pytest.mark.parametrize("family", ["llama_tied", "mixtral"])
def test_auto_model_is_the_model_without_its_head(family: str) -> None:
    base = emitted.load(emitted.emitted(family, "upper-half"), AutoModel)
    whole = emitted.shared(family, "upper-half")
    assert type(base).__name__ == "Rewriter" + emitted.program(family).source.base_class
    ids = zoo.batch()
    with torch.no_grad():
        assert torch.equal(base(input_ids=ids)[0], whole.base_model(input_ids=ids)[0])


@pytest.mark.parametrize("family", ["gpt2", "gemma3_text", "mixtral"])
def test_recorded_hidden_states_are_the_residual_stream(family: str) -> None:
    ids, original = zoo.batch(), zoo.shared(family)
    with torch.no_grad(), oracles.ladder_oracle(original, emitted.layers(family, "all")):
        expected = original(input_ids=ids, output_hidden_states=True).hidden_states
    with torch.no_grad():
        recorded = emitted.shared(family, "all")(input_ids=ids, output_hidden_states=True).hidden_states
    assert len(recorded) == len(expected)
    for ours, theirs in zip(recorded, expected, strict=True):
        assert oracles.relative_error(ours, theirs) <= TOLERANCE


def test_a_ladder_of_one_layer(tmp_path: Path) -> None:
    """The first layer alone: nothing but its MLP has anything to miss, and nothing crosses a layer."""
    files = emit_huggingface(Ladder([0]).apply(emitted.program("llama")))
    assert files.config["rewriter_layers"] == ["ladder_alone", "standard", "standard", "standard"]
    emitted.write(files, emitted.source("llama"), tmp_path / "out")
    ids = zoo.batch()
    with torch.no_grad():
        logits = emitted.load(tmp_path / "out")(input_ids=ids).logits
    assert oracles.relative_error(logits, oracles.ladder_logits(zoo.shared("llama"), {0}, ids)) <= TOLERANCE


# Seeded faults: what a wrong rewrite would emit must fail the comparison above


def _stream(graph: fx.Graph) -> dict[int, fx.Node]:
    return {stream_index(node): node for node in graph.nodes if in_stream(node)}


def _norm(graph: fx.Graph, name: str) -> fx.Node:
    return next(node for node in graph.nodes if node.target == f"model.layers.2.{name}")


def drained_transition(graph: fx.Graph) -> None:
    """The first ladder attention reads everything, also the MLP before it."""
    _norm(graph, "input_layernorm").args = (_stream(graph)[4],)


def swapped_reads(graph: fx.Graph) -> None:
    """Attention reads what the MLP has to read, and the reverse."""
    _norm(graph, "input_layernorm").args = (_stream(graph)[4],)
    _norm(graph, "post_attention_layernorm").args = (_stream(graph)[3],)


def lost_write(graph: fx.Graph) -> None:
    """The attention of a ladder layer is added nowhere."""
    add, previous = _stream(graph)[5], _stream(graph)[4]
    add.replace_all_uses_with(previous)


@pytest.mark.parametrize("fault", [drained_transition, swapped_reads, lost_write])
def test_seeded_faults_show(fault: Callable[[fx.Graph], None], tmp_path: Path) -> None:
    faulty = emitted.edited(emitted.ladder("llama", "upper-half"), fault)
    emitted.write(emit_huggingface(faulty), emitted.source("llama"), tmp_path / "out")
    ids = zoo.batch()
    with torch.no_grad():
        logits = emitted.load(tmp_path / "out")(input_ids=ids).logits
    expected = oracles.ladder_logits(zoo.shared("llama"), emitted.layers("llama", "upper-half"), ids)
    assert oracles.relative_error(logits, expected) >= 1e-2
