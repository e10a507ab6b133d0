"""Rewritten models in vLLM give transformers' tokens: `make test-serving`."""

from __future__ import annotations

import os
from functools import cache

import pytest

pytest.importorskip("vllm")

import tiny_models
from cases import AWQ, LORA_RANK, MEANT, REAL, Case, lora_of, of_transformers, prompts, rewritten, shortfall

FALLS_BACK = {"olmo2"}
# What the plugin says of a bound checkpoint that vLLM's layers cannot compute, and the checkpoint where it has none.
REFUSALS = ("vLLM cannot serve this checkpoint", "where vLLM has layers of its own for this model")
# vLLM 0.32 gives other tokens than transformers for the original tiny DeepSeek on a CPU, so that equality says nothing.
INCOMPARABLE = {"deepseek_v3"}
# No norm that both halves could read; norms over all heads; projections that every rank makes in full.
REFUSED_WHOLE = {("olmo2", "parallel"), ("olmo2", "ladder-own-partial"), ("deepseek_v3", "ladder-own-partial")}
UNBOUND = ("ladder", "ladder-upper-half", "parallel", "mix")
BOUND = ("ladder-own-partial", "desync-2x-sum")
ONE_RANK = [Case(family, "mix") for family in tiny_models.FAMILIES]
COMPILED = [Case(family, "ladder", eager=False) for family in ("llama", "gemma3_text")]
TWO_RANKS = [Case("llama", recipe, tp=2) for recipe in (*UNBOUND, *BOUND, "desync-4x")]
MATRIX = {  # each recipe of each family compiled and not, on one rank or two
    (family, eager): [
        *(
            Case(family, recipe, 1 + (i + j + eager) % 2, eager)
            for j, recipe in enumerate(UNBOUND)
            if (family, recipe) not in REFUSED_WHOLE
        ),
        *(Case(family, recipe, 2, eager) for recipe in BOUND if (family, recipe) not in REFUSED_WHOLE),
    ]
    for eager in (True, False)
    for i, family in enumerate(tiny_models.FAMILIES)
}
SMOLLM2 = [
    *(Case("smollm2", recipe, tp, eager) for recipe in UNBOUND for tp, eager in ((3, True), (3, False), (1, False))),
    *(Case("smollm2", recipe, 3, eager) for recipe in BOUND for eager in (True, False)),
]
NGRAM = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}}
STAGED = {"pipeline_parallel_size": 2}
OPTIONS = [Case("llama", "ladder", tp, engine=NGRAM) for tp in (1, 2)]
# vLLM chooses the size of a block where recurrent states and keys share a cache.
RECURRENT = {"block_size": None, "enable_prefix_caching": False}
HYBRIDS = [
    *(Case(name, "ladder-upper-half", tp, engine=RECURRENT) for name in tiny_models.HYBRIDS_HERE for tp in (1, 2)),
    Case("falcon_h1", "desync-2x-sum", 2, engine=RECURRENT),
]
# The shortest distance of two logits among which rounding chose; the faults below show by 50 times as much.
NEAREST = {"nemotron_h": 2e-3}
HYBRID_FAULTS = [  # in this process: one rank
    Case("granitemoehybrid", "ladder-upper-half", engine=RECURRENT, fault="on time"),
    Case("granitemoehybrid", "ladder-upper-half", engine=RECURRENT, fault="alone"),
]
LORA = {"enable_lora": True, "max_lora_rank": LORA_RANK, "max_loras": 1}
ADAPTED = [Case("llama", "ladder", 2, engine=LORA, adapted=True), Case("llama", "mix", engine=LORA, adapted=True)]
FOUR_BITS = [Case(AWQ, "ladder", tp, engine={"dtype": "bfloat16"}) for tp in (1, 2)]
STAGES = [Case("llama", "ladder", eager=False, engine=STAGED)]  # eager stages fail in vLLM 0.32 on CPUs, of any model
REFUSED = {  # a case, and what is said
    Case("llama", "desync-2x-sum", tp=2, engine={"tensor_parallel_size": 1}): "bound to 2 ranks",
    Case("granite", "ladder", engine=STAGED): "a pipeline stage would begin at layer 2",
    Case("gemma3_text", "desync-2x-sum", tp=2): REFUSALS[0],
    Case("olmo2", "desync-2x-sum", tp=2): REFUSALS[1],
}


@pytest.fixture(scope="module")
def expected(root):
    @cache
    def tokens(family, recipe, tp):
        return of_transformers(rewritten(Case(family, recipe, tp), root), prompts(family))

    return tokens


def check(case, group, ran, expected):
    result = ran(tuple(group))[str(case)]
    if "error" in result and case.recipe in BOUND and any(said in result["log"] for said in REFUSALS):
        pytest.skip("bound, and vLLM's layers cannot compute it: it says so")
    assert "error" not in result, result["error"]
    if case.family in INCOMPARABLE:
        pytest.skip("vLLM's original gives other tokens than transformers' here")
    assert result["tokens"] == expected(case.family, case.recipe, case.tp)
    assert result["cached"] > 0


@pytest.mark.parametrize("case", ONE_RANK, ids=str)
def test_every_family_on_one_rank(case, ran, expected):
    check(case, ONE_RANK, ran, expected)


def test_what_falls_back_says_so(ran):
    for case in ONE_RANK:
        log = ran(tuple(ONE_RANK))[str(case)]["log"]
        assert ("all-reduces of Rewriter" in log) == (case.family not in FALLS_BACK)
        assert "nothing of" not in log


@pytest.mark.parametrize("case", COMPILED, ids=str)
def test_compiled_on_one_rank(case, ran, expected):
    check(case, COMPILED, ran, expected)


@pytest.mark.parametrize("case", TWO_RANKS, ids=str)
def test_every_recipe_on_two_ranks(case, ran, expected):
    check(case, TWO_RANKS, ran, expected)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for group in MATRIX.values() for case in group], ids=str)
def test_every_recipe_of_every_family(case, ran, expected):
    check(case, MATRIX[case.family, case.eager], ran, expected)


@pytest.mark.slow
@pytest.mark.skipif(REAL["smollm2"] not in os.environ, reason="no directory of SmolLM2-135M-Instruct is named")
@pytest.mark.parametrize("case", SMOLLM2, ids=str)
def test_a_real_model(case, ran, expected):
    check(case, SMOLLM2, ran, expected)


@pytest.mark.parametrize("case", OPTIONS, ids=str)
def test_with_what_engines_do(case, ran, expected):
    check(case, OPTIONS, ran, expected)


@pytest.mark.slow
@pytest.mark.parametrize("case", HYBRIDS, ids=str)
def test_recurrent_mixers(case, ran, root):
    result = ran(tuple(HYBRIDS))[str(case)]
    assert "error" not in result, result["log"][-3000:]
    assert "all-reduces of Rewriter" in result["log"]
    assert shortfall(rewritten(case, root), prompts(), result["tokens"]) < NEAREST.get(case.family, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("case", HYBRID_FAULTS, ids=str)
def test_faults_in_the_wiring_change_tokens(case, ran, root):
    result = ran(tuple(HYBRID_FAULTS))[str(case)]
    assert "error" not in result, result["log"][-3000:]
    assert shortfall(rewritten(case, root), prompts(), result["tokens"]) > 0.1


@pytest.mark.parametrize("case", ADAPTED, ids=str)
def test_a_lora_changes_what_its_merged_weights_change(case, ran, expected, root):
    result = ran(tuple(ADAPTED))[str(case)]
    assert "error" not in result, result["log"][-3000:]
    directory = rewritten(case, root)
    assert result["tokens"] == of_transformers(directory, prompts(), lora_of(directory))
    assert result["tokens"] != expected(case.family, case.recipe, case.tp)


@pytest.mark.parametrize("case", FOUR_BITS, ids=str)
def test_quantized_weights(case, ran, root):
    result = ran(tuple(FOUR_BITS))[str(case)]
    assert "error" not in result, result["log"][-3000:]
    assert "all-reduces of Rewriter" in result["log"]
    gap = shortfall(rewritten(Case(MEANT, case.recipe), root), prompts(), result["tokens"])
    assert gap < 0.1  # vLLM computes in bf16
    assert shortfall(root / MEANT, prompts(), result["tokens"]) > 10 * gap  # the standard model's


@pytest.mark.slow
@pytest.mark.parametrize("case", STAGES, ids=str)
def test_pipeline_stages_may_cut_a_ladder(case, ran, expected):
    check(case, STAGES, ran, expected)


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_what_would_be_wrong_is_refused_in_a_sentence(case, ran):
    result = ran(tuple(REFUSED))[str(case)]
    assert "tokens" not in result
    assert REFUSED[case] in result["log"]
