"""Entries of config.json by which an engine knows of sums that travel quantized."""

from __future__ import annotations

import pytest
from programs import tensor_parallel, traced

from rewriter.emit.huggingface import emit_huggingface
from rewriter.emit.wiring_config import quantized_config
from rewriter.passes.phases import single_device

PROMPT = {"phase": "prompt", "exact_tail": 3, "exact_head": 2}
INT8 = {"format": "int8", "min_bytes": 7}
STANDARD = {"rewriter_delays": [[0, 0]] * 4}
ENDS = {"rewriter_phase": {"exact_tail": 3, "exact_head": 2}}
LADDER = ("ladder", {"layers": "all"})
CASES = {
    "all tokens": ([("quantize_collectives", INT8)], STANDARD | {"rewriter_quantized": [INT8]}),
    "the prompt": ([("quantize_collectives", INT8 | PROMPT)], STANDARD | ENDS | {"rewriter_quantized": [INT8]}),
    "a layer": (
        [("quantize_collectives", INT8 | {"layers": [1]})],
        STANDARD | {"rewriter_quantized": [INT8 | {"layers": [1]}]},
    ),
    "a ladder": ([LADDER, ("quantize_collectives", INT8)], {"rewriter_quantized": [INT8]}),
    "a ladder of the prompt": (
        [("ladder", {"layers": "all"} | PROMPT), ("quantize_collectives", INT8 | PROMPT)],
        ENDS | {"rewriter_quantized": [INT8]},
    ),
    "a ladder of all tokens, sums of the prompt": ([LADDER, ("quantize_collectives", INT8 | PROMPT)], {}),
    "nothing": ([LADDER], {}),
}


@pytest.mark.parametrize("name", CASES)
def test_config_says_which_sums_are_quantized(name):
    steps, wanted = CASES[name]
    program = tensor_parallel(traced("llama"), 2, ("merge_reductions", {}), *steps, ("overlap", {}))
    assert quantized_config(program, emit_huggingface(single_device(program)).config) == wanted


def test_config_says_what_rewires_exact_tokens_too():
    late = {"layers": [1], "variant": "paper"}, {"layers": [2, 3]} | PROMPT
    program = tensor_parallel(traced("llama"), 2, ("merge_reductions", {}), *(("ladder", given) for given in late))
    config = emit_huggingface(single_device(program)).config
    assert config["rewriter_delays"] == [[0, 0], [1, 1], [1, 1], [1, 1]]
    assert config["rewriter_exact"]["rewriter_delays"] == [[0, 0], [1, 1], [0, 0], [0, 0]]


@pytest.mark.parametrize("step", [("ladder", {"layers": "all"}), ("desync", {"n": 2, "resync": "sum"})], ids=str)
def test_config_says_nothing_of_tokens_that_are_the_original_s(step):
    name, options = step
    program = tensor_parallel(traced("llama"), 2, ("merge_reductions", {}), (name, options | PROMPT))
    config = emit_huggingface(single_device(program)).config
    assert config["rewriter_phase"] == ENDS["rewriter_phase"]
    assert "rewriter_exact" not in config
