"""Weights of fewer bits: which config says which format, and what products then read and compute."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from predict_cases import small_config

from rewriter import api
from rewriter.common.errors import RewriterError
from rewriter.fabric import load_fabric
from rewriter.fabric.kernel_tables import kernel_table
from rewriter.predict.analytic import Predictor, bytes_per_rank
from rewriter.predict.candidates import Candidates
from rewriter.predict.kernel_cost import Kernel
from rewriter.predict.kernel_time import computed_in, rates_of, seconds
from rewriter.predict.weight_formats import parameters_of_format, stored_weights
from rewriter.predict.workload import Cluster, Draft, ForwardPass, Workload
from rewriter.recipes.apply import load_recipe
from rewriter.tracing import trace_skeleton
from rewriter.tracing.meta_model import build_skeleton


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ({"quant_method": "fp8"}, "float8"), ({"quant_method": "fbgemm_fp8"}, "float8"),
        ({"quant_method": "awq", "bits": 4}, "int4"), ({"quant_method": "gptq", "bits": 8}, "int8"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "int4"), ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"), ({"quant_method": "gptq", "bits": 3}, None),
        ({"config_groups": {"a": {"weights": {"num_bits": 8, "type": "float"}}}}, "float8"),
        ({"quant_method": "quanto"}, None), (None, None),
    ],
)  # fmt: skip
def test_the_format_is_that_of_the_config(said: Any, name: str | None) -> None:
    found = stored_weights(None, said)
    assert (None if found is None else found.name) == name
    assert stored_weights("int4", said).name == "int4"  # type: ignore[union-attr]


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(RewriterError, match="--weights 'int5': expected float8"):
        Workload(weights="int5")  # type: ignore[arg-type]
    with pytest.raises(RewriterError, match="--cache 'int8': expected float8"):
        Workload(cache="int8")  # type: ignore[arg-type]


def quantized(**said: Any) -> Any:
    config = small_config(dtype="bfloat16", num_hidden_layers=2)
    if said:
        config.quantization_config = said
    return trace_skeleton(build_skeleton(config))


def test_layers_read_as_many_bits_as_the_format_has() -> None:
    """Of a step's weights: those of layers a quarter and an eighth's share of scales, the head all of them."""
    plain, four = (
        Candidates(program).one(load_recipe("tensor-parallel"), 2).program
        for program in (quantized(), quantized(quant_method="awq", bits=4))
    )
    read = []
    for program in (plain, four):
        predictor = Predictor(Workload(tp=2), Cluster("rtx-3090-p2p"))
        read.append(predictor.simulate(program).decode.weight_bytes)
    stored = stored_weights("int4", None)
    assert stored is not None
    elements = sum(plain.parameters[name].shape[0] * plain.parameters[name].shape[1]
                   for name in parameters_of_format(plain, stored))  # fmt: skip
    assert read[0] - read[1] == pytest.approx(elements * (2 - 4.25 / 8), abs=100)
    spared = bytes_per_rank(plain, 1, 64, 64) - bytes_per_rank(four, 1, 64, 64)
    assert spared == pytest.approx(elements * (2 - 4.25 / 8), abs=100)


def test_what_a_config_keeps_is_kept() -> None:
    program = quantized(quant_method="awq", bits=4, modules_to_not_convert=["self_attn"])
    stored = stored_weights(None, {"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["self_attn"]})
    assert stored is not None
    names = parameters_of_format(program, stored)
    assert names
    assert all("mlp" in name for name in names)
    assert stored_weights(None, {"quant_method": "awq", "lm_head": True}).head  # type: ignore[union-attr]


def test_products_of_few_rows_read_less_and_those_of_many_compute_as_long() -> None:
    table = kernel_table("l40s")
    few, many = ((rows, 8192, 8192, "bfloat16", None) for rows in (1, 8192))
    assert table.product(*few, 4.25) < 0.45 * table.product(*few)  # type: ignore[operator]
    assert table.product(*many, 4.25) == pytest.approx(table.product(*many), rel=0.15)


def test_float8_is_computed_where_the_device_has_it() -> None:
    stored = stored_weights("float8", None)
    assert stored is not None
    product = Kernel("gate", "product", 8192**2 * 5.0, 2.0 * 8192**3, 8192**2, 1, 8192, 8192, 8192, stored=stored)
    seconds_on = {}
    for name in ("rtx-3090-p2p", "rtx-4090-p2p"):
        rates = rates_of(load_fabric(name).device, "bfloat16", True)
        seconds_on[name] = [seconds(kernel, rates) for kernel in (product, replace(product, stored=None))]
        assert (
            computed_in(product, rates) == {"rtx-3090-p2p": ("bfloat16", 8.0), "rtx-4090-p2p": ("float8", None)}[name]
        )
    assert seconds_on["rtx-3090-p2p"][0] == pytest.approx(seconds_on["rtx-3090-p2p"][1], rel=0.05)
    assert seconds_on["rtx-4090-p2p"][0] < 0.8 * seconds_on["rtx-4090-p2p"][1]


def test_a_cache_of_eight_bits_is_read_in_half_the_time() -> None:
    program, long = quantized(), Workload(tp=1, batch=64, prompt=16384, generate=2)
    steps = [
        api.predict(program, ["tensor-parallel"], work, Cluster("h100-nvlink")).predictions[0].decode.seconds
        for work in (long, Workload(tp=1, batch=64, prompt=16384, generate=2, cache="float8"))
    ]
    assert steps[1] < 0.75 * steps[0]


def test_a_draft_yields_the_tokens_of_the_formula() -> None:
    assert Draft(1, 0.5).expected_tokens == pytest.approx(1.5)
    assert Draft(3, 0.0).expected_tokens == 1.0
    assert Draft(2, 0.8).expected_tokens == pytest.approx(1 + 0.8 + 0.64)
    for tokens, rate in ((0, 0.5), (2, 1.0), (2, -0.1)):
        with pytest.raises(RewriterError, match="--draft"):
            Draft(tokens, rate)


def test_a_forward_pass_of_several_tokens_takes_longer_than_one() -> None:
    program = quantized()
    predictor = Predictor(Workload(tp=1), Cluster("h100-nvlink"))
    one, four = (predictor.seconds_of(program, ForwardPass(1, n, keys=1024, logits=0)) for n in (1, 4))
    assert one <= four < 2 * one
