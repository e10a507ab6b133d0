"""How gpt-fast and the code of Ladder Residual run: plain attention, whole heads, all logits; and what servers differ
in."""

from __future__ import annotations

import importlib
import math
from collections import defaultdict
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from grouped import predicting
from transformers import AutoModelForCausalLM, LlamaConfig

from rewriter import api
from rewriter.check.shrunken_check import check_shrunken
from rewriter.common.errors import RewriterError
from rewriter.ir import Program
from rewriter.ir.ops import MaskSpec
from rewriter.passes.tensor_parallel import TensorParallel
from rewriter.predict.analytic import bytes_per_rank
from rewriter.predict.attention_cost import attention_items
from rewriter.predict.forward import Runner
from rewriter.predict.kernel_cost import Kernel
from rewriter.predict.uncertainty import COVERED, SERVER
from rewriter.predict.workload import ForwardPass
from rewriter.tracing import trace

WIDTH, VOCABULARY = 4096, 128256
HEADS, KV_HEADS, SIZE = 8, 2, 64


def config(**changes: Any) -> LlamaConfig:
    sizes: dict[str, Any] = dict(
        hidden_size=WIDTH, intermediate_size=14336, num_hidden_layers=2, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=VOCABULARY, max_position_embeddings=4096, tie_word_embeddings=False, dtype="bfloat16",
    )  # fmt: skip
    return LlamaConfig(**(sizes | changes))


@pytest.fixture(scope="module")
def model() -> Program:
    return trace(config())


def kernels(given: ForwardPass) -> dict[str, list[Kernel]]:
    q = torch.empty(given.batch, HEADS, given.tokens, SIZE, device="meta", dtype=torch.bfloat16)
    k = torch.empty(given.batch, KV_HEADS, given.tokens, SIZE, device="meta", dtype=torch.bfloat16)
    found: dict[str, list[Kernel]] = defaultdict(list)
    for item in attention_items(q, k, k, {"mask": MaskSpec("causal"), "scale": 1.0}, given, (1, 1)):
        assert isinstance(item, Kernel)
        found[item.name].append(item)
    return found


# --- attention that no kernel fuses ---


def test_plain_attention_computes_what_torch_counts_of_an_eager_model() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    small = config(hidden_size=128, intermediate_size=256, vocab_size=512, num_attention_heads=8, num_key_value_heads=2)
    model = AutoModelForCausalLM.from_config(small, attn_implementation="eager")
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model(torch.zeros(2, 64, dtype=torch.int64), use_cache=False)
    counted = sum(n for op, n in counter.get_flop_counts()["Global"].items() if "bmm" in str(op))
    listed = Runner().run(trace(small), ForwardPass(2, 64, plain=64)).kernels
    assert sum(k.flops for k in listed if k.name in ("scores", "values")) == pytest.approx(counted, rel=1e-6)


def test_one_query_reads_keys_once_per_query_head_and_repeats_none() -> None:
    keys, batch = 1536, 4
    found = kernels(ForwardPass(batch, 1, keys=keys, plain=keys))
    assert "attention" not in found
    assert "repeat" not in found
    repeated = batch * HEADS * keys * SIZE * 2
    scores = batch * HEADS * keys * 2
    small = batch * HEADS * SIZE * 2
    assert [k.nbytes for k in found["scores"]] == [repeated + scores + small]
    assert [k.nbytes for k in found["values"]] == [repeated + scores + small]
    copied = kernels(ForwardPass(batch, 1, keys=keys, fused=False, plain=keys))["repeat"]
    assert [k.nbytes for k in copied] == [repeated + repeated / (HEADS / KV_HEADS)] * 2


def test_a_plain_prefill_goes_over_the_whole_cache() -> None:
    alone, over = (kernels(ForwardPass(2, 1024, plain=keys)) for keys in (1024, 1536))
    for name in ("scores", "softmax", "repeat"):
        assert over[name][0].nbytes / alone[name][0].nbytes == pytest.approx(1.5, rel=0.05)
    assert over["scores"][0].flops == 2.0 * 2 * HEADS * 1024 * 1536 * SIZE


def test_a_longer_step_makes_the_same_saving_a_smaller_gain(model: Program) -> None:
    def gain(**design: Any) -> float:
        found = api.predict(
            model,
            ["tensor-parallel", "ladder"],
            **predicting(tp=8, batch=64, prompt=1024, generate=64, library="nccl", **design),
        ).predictions
        return found[1].end_to_end

    usual, plain = gain(), gain(attention="plain")
    whole = gain(set={"tensor_parallel.vocabulary": False})
    assert 1.0 < plain < usual
    assert 1.0 < whole < usual


def test_attention_of_another_name_is_refused(model: Program) -> None:
    with pytest.raises(RewriterError, match="--attention flash: expected fused or plain"):
        api.predict(model, ["tensor-parallel"], api.Workload(attention="flash"))  # type: ignore[arg-type]


def test_scores_and_all_logits_take_memory(model: Program) -> None:
    program = api.rewrite(model, "tensor-parallel", tp=8)
    usual = bytes_per_rank(program, 3, 1024, 8)
    assert bytes_per_rank(program, 3, 1024, 8, plain=True) - usual == 3 * 4 * 1024**2 * (2 + 4 + 2)
    assert bytes_per_rank(program, 3, 1024, 8, all_logits=True) - usual == 3 * 1023 * VOCABULARY * 2


# --- heads, and logits ---


@pytest.mark.slow
def test_a_whole_vocabulary_is_the_same_function() -> None:
    rewrite = TensorParallel(vocabulary=False)
    check_shrunken(config(), [rewrite], 2)  # raises where they differ
    program = rewrite.apply(trace(config(num_hidden_layers=1)).with_(mesh={"tp": 2}))
    assert program.parameters["lm_head.weight"].shape == (VOCABULARY, WIDTH)
    assert program.parameters["model.embed_tokens.weight"].shape == (VOCABULARY, WIDTH)
    assert program.parameters["model.layers.0.mlp.up_proj.weight"].shape == (14336 // 2, WIDTH)


def test_a_whole_head_is_read_by_every_rank_and_nothing_is_gathered(model: Program) -> None:
    split, whole = (
        api.predict(
            model, ["tensor-parallel"], api.Workload(tp=8), set={"tensor_parallel.vocabulary": given}
        ).predictions[0]
        for given in (True, False)
    )
    names = {kind: {s.name for s in p.decode.spans} for kind, p in (("split", split), ("whole", whole))}
    assert any("all-gather" in name for name in names["split"])
    assert not any("all-gather" in name for name in names["whole"])
    longer = whole.decode.compute_seconds - split.decode.compute_seconds
    promised = 7 / 8 * VOCABULARY * WIDTH * 2 / 3.35e12  # seven more eighths of the head, at the data sheet's bandwidth
    assert promised < longer < 1.5 * promised


def test_all_logits_are_a_product_of_every_position(model: Program) -> None:
    program = api.rewrite(model, "tensor-parallel", tp=8)
    last, every = (Runner().run(program, ForwardPass(2, 128, logits=n)).kernels for n in (1, 0))
    more = sum(k.flops for k in every) - sum(k.flops for k in last)
    assert more == 2 * 2 * 127 * WIDTH * VOCABULARY / 8
    slower = [
        api.predict(model, ["tensor-parallel"], api.Workload(tp=8, all_logits=n)).predictions[0] for n in (False, True)
    ]
    assert slower[0].prefill.seconds < slower[1].prefill.seconds
    assert slower[0].decode.seconds == slower[1].decode.seconds


# --- what servers differ in ---


def test_a_servers_interval_holds_one_more_deviation_and_the_quotient_none(model: Program) -> None:
    found = {
        served: api.predict(model, ["tensor-parallel", "ladder"], api.Workload(tp=8, served=served)).predictions
        for served in (False, True)
    }
    for usual, wider in zip(found[False], found[True], strict=True):
        assert (usual.seconds_per_token, usual.end_to_end_interval) == (
            wider.seconds_per_token,
            wider.end_to_end_interval,
        )
        deviations = []
        for p in (usual, wider):
            assert p.seconds_per_token_interval is not None
            deviations.append(math.log(p.seconds_per_token_interval[1] / p.seconds_per_token) / 1.2815516)
        assert deviations[1] ** 2 - deviations[0] ** 2 == pytest.approx(SERVER**2, rel=1e-5)


@pytest.fixture(scope="module")
def engines() -> ModuleType:
    return importlib.import_module("benchmarks.predict.engines")


def test_one_engines_deviation_is_found_from_pairs(engines: ModuleType) -> None:
    random = np.random.default_rng(0)
    one, other = (random.normal(0.0, 0.1, 20_000) for _ in range(2))
    assert engines.deviation(list(one - other)) == pytest.approx(0.1, rel=0.02)
    held = np.abs(one) < 1.2815516 * engines.deviation(list(one - other))
    assert held.mean() == pytest.approx(COVERED, abs=0.01)


def row(name: str, backend: str, tpot: float, **changes: str) -> dict[str, str]:
    return {
        "id": name, "silicon_data_source": "silicon_concurrency=4; x", "backend": backend, "mode": "agg",
        "model_path": "meta-llama/Llama-3.1-70B", "system": "h200_sxm", "precision": "fp8", "isl": "1024",
        "osl": "1024", "batch_size": "4", "tp_size": "8", "pp_size": "1", "attention_dp_size": "1", "moe_tp_size": "1",
        "moe_ep_size": "1", "silicon_tpot_ms": str(tpot),
    } | changes  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [{"precision": "fp4"}, {"model_path": "deepseek-ai/DeepSeek-R1"}, {"mode": "disagg"},
     {"model_path": "Qwen/Qwen3-32B", "system": "h100_sxm", "precision": ""}],
)  # fmt: skip
def test_only_runs_that_the_backtest_does_not_count_are_paired(engines: ModuleType, changes: dict[str, str]) -> None:
    points = engines.read_published().points
    kept = [row("a", "vllm", 8.0), row("b", "trtllm", 6.0), row("c", "trtllm", 6.5)]
    ((_, difference),) = engines.paired(kept, points)
    assert difference == pytest.approx(math.log(6.25 / 8.0))
    quoted = next(p.entry.quote.partition(",")[0] for p in points if p.entry.id.startswith("vllm-h100-qwen3-32b"))
    counted = row(quoted, "vllm", 9.0, model_path="Qwen/Qwen3-32B", system="h100_sxm", precision="")
    others = [row("d", "vllm", 8.0, **changes), row("e", "trtllm", 1.0, **changes)]
    assert len(list(engines.paired([*kept, *others, counted], points))) == 1
    shown = next(p.entry.quote.partition(",")[0] for p in points if p.entry.id.startswith("trtllm-h200"))
    assert list(engines.paired([kept[0], row(shown, "trtllm", 6.0)], points)) == []
    assert len(list(engines.paired([kept[0], row("f", "trtllm", 6.0)], points))) == 1
