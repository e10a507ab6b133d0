"""Padded sizes: the same function on 3, 5, 6 and 7 ranks, by every family's own classes; and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fitted_models
import pytest
import torch
import zoo

from rewriter.check.comparison import relative_error
from rewriter.check.padded_model import padded_model, real_tokens
from rewriter.common.errors import RewriterError
from rewriter.ir import Program
from rewriter.ir.simulate import simulate
from rewriter.passes.fit_ranks import FitRanks
from rewriter.passes.fitting import units
from rewriter.recipes.apply import apply_recipe, load_recipe
from rewriter.tracing import trace

ANY = FitRanks(waste=1e9)


def fitted(source: Any, tp: int, recipe: str = "fit-tp", **options: Any) -> Program:
    given = fitted_models.WASTE | {f"fit_ranks.{name}": value for name, value in options.items()}
    return apply_recipe(trace(source), load_recipe(recipe, given), tp)[0]


@pytest.fixture(scope="module", params=fitted_models.FAMILIES)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    directory = tmp_path_factory.mktemp(request.param)
    fitted_models.save(request.param, directory)
    return request.param, directory


DEGREES = [3, *(pytest.param(tp, marks=pytest.mark.slow) for tp in (5, 6, 7))]


@pytest.mark.parametrize("tp", DEGREES)
def test_ranks_and_the_family_s_own_classes_compute_the_source(source: tuple[str, Path], tp: int) -> None:
    family, directory = source
    logits, tokens = fitted_models.of_source(family)
    program = fitted(directory, tp)
    assert program.history[0].fired
    assert not any("do not divide" in note for note in program.history[1].notes)
    limit = 1e-4 if family == "qwen3_next" else 1e-5  # the delta rule comes in chunks
    assert relative_error(real_tokens(simulate(program, fitted_models.ids()), logits), logits) < limit
    model = padded_model(program)
    with torch.no_grad():
        padded = model(input_ids=fitted_models.ids(), use_cache=False).logits
    assert relative_error(real_tokens(padded, logits), logits) < limit
    assert torch.equal(fitted_models.tokens(model), tokens)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert shapes.items() >= {n: p.shape for n, p in program.origin.parameters.items() if n in shapes}.items()


def test_every_number_that_is_asked_for_divides(tmp_path: Path) -> None:
    fitted_models.save("qwen3", tmp_path)
    program = fitted(tmp_path, 3, also=[6, 4])
    settings = program.source.settings
    for ranks in (3, 4, 6):
        assert settings["num_attention_heads"] % ranks == settings["intermediate_size"] % ranks == 0
        heads = settings["num_key_value_heads"]
        assert heads % ranks == 0 or ranks % heads == 0
        again = apply_recipe(program.origin.with_(origin=None), load_recipe("tensor-parallel"), ranks)[0]
        logits = fitted_models.of_source("qwen3")[0]
        assert relative_error(real_tokens(simulate(again, fitted_models.ids()), logits), logits) < 1e-5


def test_heads_in_another_group_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A seeded fault: query heads that go to the copies of another key/value head."""
    fitted_models.save("qwen3", tmp_path)
    right = units.source_units

    def wrong(old: Any, new: Any) -> dict[int, int]:
        result = right(old, new)
        for axis in new.axes:
            if axis.queries is not None:
                places = [axis.first + i for i in range(axis.count)]
                result |= dict(zip(places, reversed([result[p] for p in places]), strict=True))
        return result

    monkeypatch.setattr("rewriter.passes.fit_ranks.source_units", wrong)
    logits = fitted_models.of_source("qwen3")[0]
    assert relative_error(simulate(fitted(tmp_path, 3), fitted_models.ids())[..., :250], logits) > 1e-2


def test_padding_of_a_vocabulary_is_never_the_likeliest(tmp_path: Path) -> None:
    """Logits that are all below zero: rows of zeros would win."""
    model = fitted_models.build("qwen3", tie_word_embeddings=False)
    with torch.no_grad():  # every row with a large part that the last hidden state, whose norm is 1, always has
        model.model.norm.weight.zero_()
        model.model.norm.weight[0] = 1.0
        for layer in model.model.layers:
            layer.mlp.down_proj.weight[0] = layer.self_attn.o_proj.weight[0] = 0.0
        model.model.embed_tokens.weight[:, 0] = 5.0
        model.lm_head.weight[:, 0] = -3.0 + 0.1 * torch.rand(250)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        logits = model(input_ids=fitted_models.ids()).logits
    assert logits.max() < 0
    padded = simulate(fitted(tmp_path, 3), fitted_models.ids())
    assert padded.shape[-1] == 384
    assert (padded[..., 250:].amax(-1) < padded[..., :250].amax(-1)).all()
    with pytest.raises(Exception, match="likeliest token at 66 places"):
        real_tokens(torch.cat([logits, torch.zeros(2, 33, 1)], -1), logits)


def test_what_padding_would_change_is_refused_by_its_name(tmp_path: Path) -> None:
    zoo.save("olmo2", tmp_path / "olmo2")
    with pytest.raises(
        RewriterError, match=r"layers\.0\.self_attn cannot be padded: mean\.dim computes over all heads"
    ):
        fitted(tmp_path / "olmo2", 3)
    zoo.save("gpt2", tmp_path / "gpt2")
    with pytest.raises(RewriterError, match="GPT2LMHeadModel cannot be built with n_head=6"):
        fitted(tmp_path / "gpt2", 3)
    zoo.save("gpt_neox", tmp_path / "neox")
    with pytest.raises(RewriterError, match=r"layers\.0\.attention computes otherwise with these sizes"):
        fitted(tmp_path / "neox", 3)


def test_more_waste_than_allowed_is_asked_for(tmp_path: Path) -> None:
    fitted_models.save("qwen3", tmp_path)
    with pytest.raises(
        RewriterError, match=r"grow by [34]\d\.\d% .*at most 25% are allowed.*--set fit_ranks.waste=\d5?0?%"
    ):
        apply_recipe(trace(tmp_path), load_recipe("fit-tp"), 7)
    with pytest.raises(RewriterError, match="waste='much'; expected a share"):
        FitRanks(waste="much")
    with pytest.raises(RewriterError, match=r"also=\[0\]; expected numbers of ranks"):
        FitRanks(also=[0])


def test_sizes_that_divide_stay_as_they_are(tmp_path: Path) -> None:
    zoo.save("llama@3", tmp_path)
    before = trace(tmp_path)
    after = FitRanks().apply(before.with_(mesh={"tp": 1}, origin=before))
    assert not after.history[0].fired
    assert after.parameters == before.parameters
    with pytest.raises(RewriterError, match="put it first"):
        ANY.apply(after)


def test_widths_of_modules_that_the_model_has_not_stay(tmp_path: Path) -> None:
    """Every layer of a Qwen3-MoE has experts: its `intermediate_size` is of no weight."""
    fitted_models.save("qwen3_moe", tmp_path, intermediate_size=1000)
    assert "intermediate_size" not in fitted(tmp_path, 3).source.settings


def test_other_classes_that_compute_the_same_take_heads_that_do_not_divide_the_width(tmp_path: Path) -> None:
    fitted_models.save("llama", tmp_path)
    program = fitted(tmp_path, 5)  # ten heads in a width of 48
    assert (program.source.model_type, program.source.architecture) == ("mistral", "MistralForCausalLM")
    assert program.source.config["architectures"] == ["MistralForCausalLM"]
    assert not program.source.on_load
    fitted_models.save("llama", tmp_path / "biased", attention_bias=True)  # which Mistral has not
    biased = fitted(tmp_path / "biased", 5)
    assert (biased.source.model_type, biased.source.on_load) == ("llama", {"num_attention_heads": 10})
