"""Verification: the independent reference, the shrunken copy, the shrunken check that has to notice faults, drift."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import oracles
import pytest
import torch
import zoo
from ladder_reference import ladder_reference
from transformers import AutoConfig, AutoModelForCausalLM

from rewriter.check import drift as drift_module
from rewriter.check import shrunken_check as shrunken_check_module
from rewriter.check.comparison import Verification, compare, relative_error
from rewriter.check.drift import calibration_tokens, drift, golden_logits, golden_tokens, too_large
from rewriter.check.random_model import random_ids, random_model
from rewriter.check.shrunken_check import check_shrunken
from rewriter.check.stream_hooks import decoder_layers, find_structure
from rewriter.common.errors import RewriterError, VerificationError
from rewriter.common.shrink_sizes import WINDOW
from rewriter.ir import Program
from rewriter.ir.residual import residual_blocks, stream_values
from rewriter.ir.simulate import load_weights
from rewriter.passes.base import record
from rewriter.passes.ladder import Ladder
from rewriter.passes.selection import resolve
from rewriter.passes.tensor_parallel import TensorParallel
from rewriter.tracing import trace
from rewriter.tracing.shrink import representatives, shrink

# Comparing


def test_the_worst_position_and_figures_are_named() -> None:
    expected = torch.ones(2, 3, 5)
    actual = expected.clone()
    actual[1, 2, 4] = 1.5
    with pytest.raises(
        VerificationError, match=r"a = b: worst at row 1, token 2, vocabulary entry 4: 1.5, expected 1;"
    ):
        Verification().require("a = b", actual, expected, 1e-5)
    assert VerificationError.exit_code == 3


@pytest.mark.parametrize("broken", [torch.full((2,), math.nan), torch.tensor([1.0, math.inf]), torch.ones(3)])
def test_nans_and_other_shapes_never_pass(broken: torch.Tensor) -> None:
    assert not compare("x", broken, torch.ones(2), limit=1e9).passed


def test_of_several_lengths_the_worst_is_kept() -> None:
    result = Verification()
    for offset in (0.0, 2e-6, 1e-6):
        result.require("x", torch.ones(2) + offset, torch.ones(2), 1e-5)
    assert result.figures() == {"x": pytest.approx(2e-6, rel=0.1)}


# The reference that knows no families


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_the_general_reference_equals_the_oracle(family: str) -> None:
    model = zoo.shared(family)
    ids = zoo.batch()
    depth = len(oracles.layers_of(model))
    original = oracles.ladder_logits(model, set(), ids)
    for layers in zoo.selections(depth).values():
        expected = oracles.ladder_logits(model, layers, ids)
        assert oracles.relative_error(original, expected) >= 1e-2
        with torch.no_grad(), ladder_reference(model, layers):
            actual = model(ids, use_cache=False).logits
        assert oracles.relative_error(actual, expected) <= 1e-6
    with torch.no_grad():
        assert torch.equal(model(ids, use_cache=False).logits, original), "a hook was left behind"


def test_parallel_blocks_are_one_block_and_sequential_ones_two() -> None:
    assert find_structure(zoo.shared("gpt_neox")).layers == (0, 1, 2, 3)
    assert find_structure(zoo.shared("gpt_neox_sequential")).layers == (0, 0, 1, 1, 2, 2, 3, 3)
    # OLMo2 has no entry norms: the projections of attention and MLP themselves are given the stream.
    names = {type(module).__name__ for readers in find_structure(zoo.shared("olmo2")).readers for module in readers}
    assert names == {"Linear"}


@pytest.mark.parametrize(
    "model_type", ["phi", "cohere", "gptj", "starcoder2", "granite", "stablelm", "falcon", "bloom"]
)
def test_the_reference_reads_families_that_no_table_lists(model_type: str) -> None:
    config = shrink(AutoConfig.for_model(model_type), [0, 1, 2, 3])
    model = random_model(config)
    blocks = len(find_structure(model).layers)
    assert blocks in (len(decoder_layers(model)), 2 * len(decoder_layers(model)))
    ids = random_ids(config, 21)
    with torch.no_grad():
        original = model(ids, use_cache=False).logits
        with ladder_reference(model, [0]):
            first = model(ids, use_cache=False).logits
        with ladder_reference(model, [2, 3]):
            upper = model(ids, use_cache=False).logits
        with ladder_reference(model, []):
            none = model(ids, use_cache=False).logits
    assert torch.equal(none, original)
    assert relative_error(upper, original) >= 1e-3
    parallel = blocks == len(decoder_layers(model))
    assert torch.equal(first, original) is parallel  # a model's first block has nothing to skip


def test_a_layer_that_the_model_lacks_is_refused() -> None:
    with (
        pytest.raises(RewriterError, match=r"layers \[4, 9\], the model has 0 to 3"),
        ladder_reference(zoo.shared("llama"), [1, 4, 9]),
    ):
        pass


# The shrunken copy

LLAMA_70B = dict(
    hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8
)


def test_the_copy_has_both_sides_of_every_transition() -> None:
    config = AutoConfig.for_model("llama", **LLAMA_70B)
    kept = representatives(config, [set(resolve("upper-half", 80))])
    assert kept == [0, 1, 38, 39, 40, 41, 78, 79]
    scattered = representatives(config, [{10, 60}])
    assert {9, 10, 11} <= set(scattered)
    assert representatives(config, []) == [0, 1, 78, 79]


def test_every_kind_of_layer_is_in_the_copy() -> None:
    config = AutoConfig.for_model("gemma3_text", num_hidden_layers=26)
    kept = representatives(config, [set(resolve("last:5", 26))])
    selected = set(resolve("last:5", 26))
    kinds = {(config.layer_types[i], i in selected) for i in range(26)}
    assert {(config.layer_types[i], i in selected) for i in kept} == kinds
    small = shrink(config, kept, 2)
    assert small.layer_types == [config.layer_types[i] for i in kept]
    assert small.sliding_window == WINDOW < 21


def test_listed_layers_follow_to_their_new_places() -> None:
    config = AutoConfig.for_model("qwen3_moe", num_hidden_layers=24, mlp_only_layers=[0, 12])
    kept = representatives(config, [{12}])
    assert shrink(config, kept).mlp_only_layers == [kept.index(0), kept.index(12)]
    dense = AutoConfig.for_model("deepseek_v3")
    kept = representatives(dense, [set(resolve("upper-half", 61))])
    small = shrink(dense, kept)
    assert small.first_k_dense_replace == sum(layer < 3 for layer in kept) > 0
    assert small.num_hidden_layers == len(kept)


def test_a_layer_that_reads_another_ones_keys_follows_it() -> None:
    sources = [0, 1, *[1 + (i + 1) % 2 for i in range(2, 30)]]  # of 30 layers, all but three read those of 1 or 2
    text = {"num_hidden_layers": 30, "kv_source_layers": sources, "indexer_types": ["full"] * 30}
    config = AutoConfig.for_model("mistral_large4", text_config=text)
    kept = representatives(config, [])
    assert {0, 1, 2} <= set(kept)
    assert len(kept) < 12
    small = shrink(config, kept).text_config
    assert [kept[place] for place in small.kv_source_layers] == [sources[layer] for layer in kept]
    assert shrink(config, [0, 5, 6]).text_config.kv_source_layers == [0, 1, 2]  # without its source: its own


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(64, 8), (32, 32), (16, 1), (12, 2), (71, 71), (40, 10)], ids=lambda value: str(value)
)
def test_sizes_divide_as_the_real_ones_do(heads: int, kv_heads: int, ranks: int) -> None:
    config = AutoConfig.for_model(
        "llama",
        **LLAMA_70B | {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": heads * 64},
        vocab_size=50257,
    )
    small = shrink(config, [0, 1, 2, 3], ranks)
    assert (small.num_attention_heads % ranks == 0) is (heads % ranks == 0)
    assert (small.num_key_value_heads % ranks == 0) is (kv_heads % ranks == 0)
    assert (small.num_key_value_heads == small.num_attention_heads) is (heads == kv_heads)
    assert (small.intermediate_size % ranks == 0) is (28672 % ranks == 0)
    assert (small.vocab_size % ranks == 0) is (50257 % ranks == 0)
    assert small.num_attention_heads % small.num_key_value_heads == 0
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(small)
    assert sum(p.numel() for p in model.parameters()) < 10_000_000


def test_weights_of_the_copy_are_degenerate_nowhere() -> None:
    model = random_model(shrink(AutoConfig.for_model("qwen2", num_hidden_layers=4), [0, 1, 2, 3]))
    for name, parameter in model.named_parameters():
        assert float(parameter.detach().std()) > 0.05, name
    seen: list[float] = []
    handle = decoder_layers(model)[0].register_forward_pre_hook(lambda m, a: seen.append(float(a[0].std())))
    model(torch.randint(2, 200, (2, 21)))
    handle.remove()
    assert 0.5 < seen[0] < 2


# The shrunken check


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "gemma2", "mixtral"])
@pytest.mark.fast("llama")
def test_a_right_conversion_passes(family: str) -> None:
    result = check_shrunken(zoo.config(family), [TensorParallel(), Ladder("upper-half")], 2)
    figures = result.figures()
    assert set(figures) == {"trace = original model", "rewritten = its reference", "2 simulated ranks = 1 device"}
    assert all(check.passed and check.limit <= 1e-4 for check in result.checks)


def test_exact_passes_are_compared_with_the_unmodified_model() -> None:
    figures = check_shrunken(zoo.config("llama"), [TensorParallel()], 4).figures()
    assert "rewritten = original model" in figures


@dataclasses.dataclass(frozen=True)
class Faulty(Ladder):
    """A ladder with one seeded fault."""

    fault: str = ""

    def apply(self, program: Program) -> Program:
        chosen = set(resolve(self.layers, program.source.num_layers))
        blocks = [b for b in residual_blocks(program) if b.layer in chosen and b.index]
        stream = stream_values(program.graph)
        graph, env = program.edit()
        for number, block in enumerate(blocks):
            if self.fault == "drained transition" and number == 0:
                continue  # the first ladder block reads everything, as after a drain
            if self.fault == "one block forgotten" and number == len(blocks) - 1:
                continue
            stale = block.index - (2 if self.fault == "too stale" and number == 2 else 1)
            if self.fault == "attention and MLP swapped":
                stale = block.index - (2 if block.kind == "attention" and block.index > 1 else 0)
            for node in block.branch:
                env[node].replace_input_with(env[stream[block.index]], env[stream[stale]])
        return record(program, Ladder(self.layers), self.fault, graph=graph)


@pytest.mark.parametrize(
    "fault", ["drained transition", "one block forgotten", "too stale", "attention and MLP swapped"]
)
@pytest.mark.fast("too stale", "drained transition")
def test_a_seeded_fault_fails_the_shrunken_check(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shrunken_check_module, "single_device", lambda program: program)
    with pytest.raises(VerificationError, match=r"rewritten = its reference: worst at row \d, token \d+"):
        check_shrunken(zoo.config("llama"), [Faulty("upper-half", fault=fault)])


def test_without_a_fault_the_same_pass_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shrunken_check_module, "single_device", lambda program: program)
    check_shrunken(zoo.config("llama"), [Faulty("upper-half")])


def test_a_comparison_that_could_not_fail_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def quiet(config: Any, strength: float = 1.0, trust_remote_code: bool = False) -> Any:
        model = random_model(config, strength, trust_remote_code)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "o_proj" in name or "down_proj" in name:
                    parameter.mul_(1e-4)
        return model

    monkeypatch.setattr(shrunken_check_module, "random_model", quiet)
    with pytest.raises(VerificationError, match="shows nothing: its rewritten form differs from the original by"):
        check_shrunken(zoo.config("llama"), [Ladder("upper-half")])


def test_a_pass_without_reference_is_not_waved_through() -> None:
    @dataclasses.dataclass(frozen=True)
    class Other(Ladder):
        name = "other"  # type: ignore[misc]
        reference_modes = None

    with pytest.raises(RewriterError, match="other: no independent reference"):
        check_shrunken(zoo.config("llama"), [Other("all")])


def test_nothing_stays_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    check_shrunken(zoo.config("llama"), [Ladder("all")])
    assert not [p for p in tmp_path.iterdir() if p.name.startswith("rewriter")]


# Drift


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Program, Any]:
    directory = tmp_path_factory.mktemp("llama")
    model = zoo.save("llama", directory)
    return trace(directory), model


def test_drift_is_what_the_models_themselves_say(traced: tuple[Program, Any]) -> None:
    program, model = traced
    tokens = zoo.batch(1, 300)[0]
    measured = drift(program, Ladder("upper-half").apply(program), tokens)
    divergence, agreement, losses = [], [], {"before": [], "after": []}
    with torch.no_grad():
        for window in tokens.split(zoo.MAX_POSITIONS):
            before = model(window[None], use_cache=False).logits[0].double().log_softmax(-1)
            with ladder_reference(model, {2, 3}):
                after = model(window[None], use_cache=False).logits[0].double().log_softmax(-1)
            divergence += torch.nn.functional.kl_div(after, before, reduction="none", log_target=True).sum(-1).tolist()
            agreement += (before.argmax(-1) == after.argmax(-1)).tolist()
            for name, logits in (("before", before), ("after", after)):
                losses[name] += torch.nn.functional.nll_loss(logits[:-1], window[1:], reduction="none").tolist()
    assert measured.tokens == 300
    assert measured.kl == pytest.approx(sum(divergence) / 300, rel=1e-3)
    assert measured.kl > 0.05
    assert measured.top1_agreement == pytest.approx(sum(agreement) / 300)
    for name, value in (("before", measured.perplexity_before), ("after", measured.perplexity_after)):
        assert value == pytest.approx(math.exp(sum(losses[name]) / len(losses[name])), rel=1e-3)


def test_a_model_does_not_drift_from_itself(traced: tuple[Program, Any]) -> None:
    program, _ = traced
    measured = drift(program, program, zoo.batch(1, 40)[0])
    assert (measured.kl, measured.top1_agreement) == (0.0, 1.0)
    assert measured.perplexity_before == measured.perplexity_after > 1


def test_no_window_is_longer_than_the_model_has_positions(tmp_path: Path) -> None:
    model = zoo.save("gpt2", tmp_path)
    program = trace(tmp_path)
    assert model.config.n_positions < drift_module.WINDOW
    assert drift(program, Ladder("all").apply(program), zoo.batch(1, 300)[0]).tokens == 300


def test_one_token_is_no_text(traced: tuple[Program, Any]) -> None:
    with pytest.raises(RewriterError, match="at least two"):
        drift(traced[0], traced[0], torch.tensor([5]))


def test_without_a_tokenizer_the_tokens_are_random_and_said_to_be(traced: tuple[Program, Any]) -> None:
    tokens, what = calibration_tokens(traced[0])
    assert what == "random tokens, since the checkpoint has no tokenizer"
    assert len(tokens) == 512
    assert len(set(tokens.tolist())) > 100
    assert int(tokens.max()) < 256


def test_golden_logits_are_the_original_models_for_the_original(traced: tuple[Program, Any]) -> None:
    program, model = traced
    ids = golden_tokens(program)
    assert len(set(ids[0].tolist())) >= 12
    logits = golden_logits(program, load_weights(program))
    with torch.no_grad():
        assert relative_error(logits, model(ids, use_cache=False).logits[0, -1]) <= 1e-5


def test_weights_that_do_not_fit_are_reported_in_words(
    traced: tuple[Program, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert too_large(traced[0]) is None
    monkeypatch.setattr(drift_module, "available_memory", lambda: 1_000_000)
    reason = too_large(traced[0])
    assert reason is not None
    assert reason.startswith("the real weights were not run: in fp32 they take")
