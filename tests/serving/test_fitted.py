"""Padded sizes in vLLM, without a plugin: the source's tokens on numbers of ranks that its heads do not divide by."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("vllm")

from cases import REAL, Case, of_transformers, prompts, rewritten

ANY = (("fit_ranks.waste", "1000%"),)
TINY = [Case(family, "fit-tp", 3, settings=ANY) for family in ("llama", "qwen3", "qwen3_moe", "gemma3_text")]
# vLLM's collectives in shared memory know 2, 3 and 4 ranks
OWN = {"smollm2": [Case("smollm2", "fit-tp", tp, settings=ANY) for tp in (2, 4)],
       "gemma3": [Case("gemma3", "fit-tp", 3, engine={"hf_overrides": {"num_attention_heads": 6}})]}  # fmt: skip


def check(case, group, ran, root):
    source = root / case.family if case.family not in REAL else os.environ[REAL[case.family]]
    out = rewritten(case, root)
    assert not list(out.glob("*.py"))
    assert ran(tuple(group))[str(case)].get("tokens") == of_transformers(source, prompts(case.family))


@pytest.mark.parametrize("case", TINY, ids=str)
def test_three_ranks_give_the_source_s_tokens(case, ran, root):
    check(case, TINY, ran, root)


@pytest.mark.parametrize("case", [case for cases in OWN.values() for case in cases], ids=str)
def test_real_models(case, ran, root):
    if REAL[case.family] not in os.environ:
        pytest.skip(f"set {REAL[case.family]} to a directory that examples/real_models.py wrote")
    check(case, OWN[case.family], ran, root)
