"""Models that rewire tokens of the prompt alone, in vLLM: each token by its own wiring, whatever is in its batch."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from functools import cache

import tiny_models
from cases import Case, of_transformers, of_vllm, prompts, rewritten, shortfall

LADDER, DESYNC, QUANTIZED = "prefill-ladder-upper-half", "prefill-desync-2x-sum", "prefill-int8"
DESYNC_QUANTIZED = "prefill-desync-2x-sum-int8"
COARSE = "int4-hadamard@32"
OF_QUANTIZED = (
    ("quantize_collectives.exact_tail", 3),
    ("quantize_collectives.exact_head", 2),
    ("quantize_collectives.min_bytes", 0),
    ("quantize_collectives.format", COARSE),
)
ENDS = {
    LADDER: (("ladder.exact_tail", 3), ("ladder.exact_head", 2)),
    DESYNC: (("desync.exact_tail", 3), ("desync.exact_head", 2)),
}
ENDS |= {QUANTIZED: OF_QUANTIZED, DESYNC_QUANTIZED: (*ENDS[DESYNC], *OF_QUANTIZED)}


def phased(recipe, tp, eager=True, family="llama", **others):
    return Case(family, recipe, tp, eager, settings=ENDS[recipe], **others)


ALONE = phased(LADDER, 1, engine={"max_num_seqs": 1})  # chunks of one prompt, all of whose tokens are rewired
CROWDED = phased(
    LADDER, 1, engine={"num_gpu_blocks_override": 7, "max_model_len": 160}
)  # a cache that four requests do not fit
ONE_RANK = [phased(LADDER, 1, every=3), phased(LADDER, 1, eager=False, every=3), ALONE, CROWDED]
FAULTS = [phased(LADDER, 1, every=3, fault="shifted")]
BF16 = phased(LADDER, 1, every=3, engine={"dtype": "bfloat16"})
SHARED = (*ONE_RANK, *FAULTS, BF16)  # one process
TURNS = [phased(LADDER, 1, engine={"max_num_seqs": 1}, fault=fault) for fault in (None, "unsalted")]
TWO_RANKS = {recipe: [phased(recipe, 2, eager, every=3) for eager in (True, False)] for recipe in (LADDER, DESYNC)}
THREE_RANKS = [phased(recipe, 3, family="llama@3", every=3) for recipe in (LADDER, DESYNC)]
THREE_COMPILED = [phased(recipe, 3, False, "llama@3", every=3) for recipe in (LADDER, DESYNC)]
# OLMo 2 has no layers of its own in vLLM; the original DeepSeek gives other tokens there than in transformers
APART = ("llama", "olmo2", "deepseek_v3")
OTHERS = [phased(LADDER, 1, family=f, every=3) for f in tiny_models.FAMILIES if f not in APART]
EXPERTS = [phased(recipe, 2, family="qwen3_moe", every=3) for recipe in (LADDER, DESYNC)]
PLUGIN = {"hf_overrides": {"architectures": ["RewriterLlamaForCausalLM"]}}  # as `rewrite serve` passes
FEW_BITS = [phased(QUANTIZED, 2, engine=PLUGIN), phased(QUANTIZED, 2, False, engine=PLUGIN), phased(QUANTIZED, 2)]
LONG_ONLY = {"hf_overrides": {"rewriter_quantized": [{"format": COARSE, "min_bytes": 1 << 20}]}}  # no message here
FEW_BITS_AND_SUMS = [
    *(phased(DESYNC_QUANTIZED, 2, eager) for eager in (True, False)),
    phased(DESYNC_QUANTIZED, 2, engine=LONG_ONLY),
]


@pytest.fixture(scope="module")
def expected(root):
    @cache
    def tokens(recipe, tp, family="llama"):
        return of_transformers(rewritten(phased(recipe, tp, family=family), root), prompts(family))

    return tokens


def check(case, group, ran, expected):
    result = ran(tuple(group))[str(case)]
    assert "error" not in result, result["log"][-3000:]
    assert result["tokens"] == expected(case.recipe, case.tp, case.family)
    assert result["cached"] > 0 or case is CROWDED  # where blocks have to go
    assert "all-reduces of Rewriter" in result["log"]
    return result


@pytest.mark.parametrize("case", ONE_RANK, ids=str)
def test_one_rank(case, ran, expected):
    kinds = check(case, SHARED, ran, expected)["batches"]
    assert kinds["exact"] > 0
    assert kinds["rewired" if case is ALONE else "both"] > 0
    assert (kinds.get("preempted", 0) > 0) == (case is CROWDED)


@pytest.mark.parametrize("case", [case for group in TWO_RANKS.values() for case in group], ids=str)
def test_two_ranks(case, ran, expected):
    check(case, TWO_RANKS[case.recipe], ran, expected)


@pytest.mark.parametrize("case", THREE_RANKS, ids=str)
def test_three_ranks(case, ran, expected):
    check(case, THREE_RANKS, ran, expected)


@pytest.mark.slow
@pytest.mark.parametrize("case", THREE_COMPILED, ids=str)
def test_compiled_on_three_ranks(case, ran, expected):
    check(case, THREE_COMPILED, ran, expected)


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS, ids=str)
def test_every_family(case, ran, expected):
    check(case, OTHERS, ran, expected)


@pytest.mark.slow
@pytest.mark.parametrize("case", EXPERTS, ids=str)
def test_experts_on_two_ranks(case, ran, expected):
    check(case, EXPERTS, ran, expected)


@pytest.mark.parametrize("case", FAULTS, ids=str)
def test_a_fault_shows(case, ran, expected):
    result = ran(SHARED)[str(case)]
    assert result["tokens"] != expected(case.recipe, case.tp)


def test_bf16(ran, root):
    result = ran(SHARED)[str(BF16)]
    assert "error" not in result, result["log"][-3000:]
    assert result["batches"]["both"] > 0
    gap = shortfall(rewritten(BF16, root), prompts(), result["tokens"])
    assert gap < 0.1
    assert shortfall(root / "llama", prompts(), result["tokens"]) > 10 * gap  # the standard model's


def test_a_second_turn_computes_the_first_answer_again(root):
    """The answer was exact when it was generated; in the next prompt it is rewired."""
    directory, first = rewritten(TURNS[0], root), prompts()[1]
    asked = [first, first + of_transformers(directory, [first])[0][:56] + [5, 6, 7]]
    wanted = of_transformers(directory, asked)
    right, unsalted = of_vllm(TURNS, root, {LADDER: asked})
    assert right["tokens"] == wanted
    assert right["cached"] == 32  # what is rewired in both
    assert unsalted["cached"] > 32
    assert unsalted["tokens"] != wanted


def test_sums_of_rewired_tokens_travel_quantized(root, ran, expected):
    """The adapted checkpoint is the original's; what ranks make of it differs by the quantization."""
    exact = expected(QUANTIZED, 2)
    *quantized, plain = (ran(tuple(FEW_BITS))[str(case)] for case in FEW_BITS)
    assert plain["tokens"] == exact
    for result in quantized:
        assert "error" not in result, result["log"][-3000:]
        assert "8 of 8 all-reduces travel as int4-hadamard@32" in result["log"]
        assert result["tokens"] != exact
        assert result["tokens"][5] == exact[5]  # the prompt of one token, which is exact
        assert shortfall(rewritten(FEW_BITS[0], root), prompts(), result["tokens"]) < 1.0


def test_the_sums_that_desync_keeps_travel_quantized(root, ran, expected):
    """The adapted checkpoint leaves out the same sums; what ranks make of it differs by the quantization."""
    exact = expected(DESYNC_QUANTIZED, 2)
    results = [ran(tuple(FEW_BITS_AND_SUMS))[str(case)] for case in FEW_BITS_AND_SUMS]
    for result in results:
        assert "error" not in result, result["log"][-3000:]
        assert f"4 of 4 all-reduces travel as {COARSE}" in result["log"]
    *quantized, long_only = (result["tokens"] for result in results)
    assert long_only == exact
    for tokens in quantized:
        assert tokens != exact
        assert tokens[5] == exact[5]  # the prompt of one token, which is exact
        assert shortfall(rewritten(FEW_BITS_AND_SUMS[0], root), prompts(), tokens) < 1.0


def test_the_other_model_runner_is_not_taken(root):
    """vLLM has two; prompts' lengths are read from one of them."""
    from vllm import EngineArgs

    def config(recipe):
        directory = rewritten(Case("llama", recipe, settings=ENDS.get(recipe, ())), root)
        return EngineArgs(str(directory), skip_tokenizer_init=True, trust_remote_code=True).create_engine_config()

    assert any("rewriter" in why for why in config(LADDER)._get_v2_model_runner_unsupported_features())
    assert not any("rewriter" in why for why in config("ladder")._get_v2_model_runner_unsupported_features())
