"""Prediction against what others count of the same models, and against published orders."""

from __future__ import annotations

import math
import time
from collections import defaultdict

import pytest
import torch
from predict_cases import by_name, small_config
from transformers import AutoModelForCausalLM

from rewriter import api
from rewriter.ir import Program
from rewriter.passes.sequence.distributed_attention import messages, slowest
from rewriter.passes.sequence.sequence_plans import attention_shapes, sequence_plan
from rewriter.predict.attention_cost import attention_items
from rewriter.predict.candidates import all_recipes
from rewriter.predict.forward import Runner
from rewriter.predict.kernel_cost import Kernel
from rewriter.predict.module_cost import active_experts
from rewriter.predict.workload import ForwardPass
from rewriter.tracing import trace

LARGE = dict(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, vocab_size=128256)


@pytest.fixture(scope="module")
def small() -> Program:
    return trace(small_config())


@pytest.fixture(scope="module")
def seventy() -> Program:
    """The sizes of Llama 3 70B."""
    return trace(small_config(**LARGE))


# --- what others count ---


def test_flops_are_those_that_torch_counts() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    config = small_config(num_hidden_layers=2)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model(torch.zeros(2, 64, dtype=torch.int64), use_cache=False)
    counted: dict[str, int] = defaultdict(int)
    for op, flops in counter.get_flop_counts()["Global"].items():
        counted[str(op).split(".")[1] if "." in str(op) else str(op)] += flops
    forward = Runner().run(trace(config), ForwardPass(batch=2, tokens=64, logits=0))
    products = sum(k.flops for k in forward.kernels if k.work == "product")
    attention = sum(k.flops for k in forward.kernels if k.work == "attention")
    # rotary angles, 2,048 FLOP, are a product in some versions of transformers, and glue in others
    assert products == pytest.approx(counted["mm"] + counted["addmm"], rel=1e-5)
    # eager attention computes what the mask hides as well: 64 keys of each query, not 32.5
    assert attention * 64 / 32.5 == pytest.approx(counted["bmm"], rel=0.001)


def test_flops_and_weights_are_those_of_the_formula(seventy: Program) -> None:
    """2 · parameters per token and 4 · layers · heads · head size per visible pair; a rank has an eighth."""
    tokens, past = 1024, 1536
    width, wide, kv, layers, vocabulary = 8192, 28672, 8, 80, 128256
    block = 2 * width * width + 2 * width * kv * 128 + 3 * width * wide
    program = api.rewrite(seventy, "tensor-parallel", tp=8)
    runner = Runner()
    prefill = runner.run(program, ForwardPass(1, tokens)).kernels
    expected = 2 * tokens * layers * block + 2 * width * vocabulary + layers * 4 * width * tokens * (tokens + 1) / 2
    assert sum(k.flops for k in prefill) == pytest.approx(expected / 8, rel=0.01)
    decode = runner.run(program, ForwardPass(4, 1, keys=past)).kernels
    expected = 2 * 4 * (layers * block + width * vocabulary) + 4 * layers * 4 * width * past
    assert sum(k.flops for k in decode) == pytest.approx(expected / 8, rel=0.01)
    embedding = "model.embed_tokens.weight"
    held = sum(math.prod(p.shape) * 2 for name, p in program.parameters.items() if name != embedding)
    assert sum(k.weight_bytes for k in decode) == held
    # keys and values of every sequence are read once, for the rank's one key/value head
    read = sum(k.nbytes for k in decode if k.work == "attention")
    assert read == pytest.approx(layers * 4 * past * 2 * 128 * 2, rel=0.02)


def test_windows_bound_what_decoding_reads_but_not_what_a_masked_kernel_computes() -> None:
    from rewriter.ir.ops import MaskSpec

    def items(mask: MaskSpec, given: ForwardPass) -> list[Kernel]:
        q, k = torch.empty(2, 8, given.tokens, 64, device="meta"), torch.empty(2, 4, given.tokens, 64, device="meta")
        found = attention_items(q, k, k, {"mask": mask, "scale": 1.0}, given, (1, 1))
        return [i for i in found if isinstance(i, Kernel) and i.work == "attention"]

    full, window = MaskSpec("causal"), MaskSpec("window", 128)
    long = ForwardPass(2, 1, keys=4096)
    assert items(full, long)[0].nbytes / items(window, long)[0].nbytes == pytest.approx(32, rel=0.05)
    prompt = ForwardPass(2, 1024)
    pairs = 1024 * 1025 / 2
    assert items(full, prompt)[0].flops == 2 * pairs * 2 * 8 * 128
    assert items(window, prompt)[0].flops == 2 * 1024 * 1024 * 2 * 8 * 128
    assert items(MaskSpec("window", 1024), prompt)[0].flops == 2 * pairs * 2 * 8 * 128


def test_only_experts_that_are_chosen_are_read() -> None:
    assert active_experts(8, 2, 1) == pytest.approx(2)
    assert active_experts(8, 2, 10**6) == pytest.approx(8)
    draws = torch.rand(2000, 16, 64).topk(4, dim=-1).indices  # 16 tokens choose 4 of 64
    measured = torch.tensor([len(set(d.flatten().tolist())) for d in draws[:400]], dtype=torch.float64).mean()
    assert active_experts(64, 4, 16) == pytest.approx(float(measured), rel=0.02)


def test_sequence_parallel_recipes_send_what_was_planned(small: Program) -> None:
    found = api.predict(
        small, ["tensor-parallel", "ulysses", "ring-attention"], api.Workload(tp=4, prompt=1000, generate=8)
    )
    for recipe in ("ulysses", "ring-attention"):
        program = api.rewrite(small, recipe, tp=1, sp=4)
        plan = sequence_plan(program)
        assert plan is not None
        shape = attention_shapes(program)[0]
        planned = [m for m in messages(plan, shape, 1000, slowest(plan)) if not m.backward]
        prediction = by_name(found)[recipe]
        assert (prediction.sp, prediction.tp) == (4, 1)
        spans = [s for s in prediction.prefill.spans if s.lane == "communication" and "last tokens" not in s.name]
        hops = sum(m.peers for m in planned) if recipe == "ring-attention" else len(planned)
        assert len(spans) == 4 * hops
        # an all-to-all among 4 counts a rank's own part as well
        sent = sum(m.nbytes for m in planned) if recipe == "ring-attention" else sum(m.nbytes for m in planned) * 4 / 3
        assert sum(s.nbytes for s in spans) == pytest.approx(4 * sent, rel=1e-6)
    ring = by_name(found)["ring-attention"].prefill
    assert ring.exposed_seconds < ring.communication_seconds  # blocks travel while tiles run


def test_quantized_messages_run_kernels_on_the_communication_stream(small: Program) -> None:
    exact, int8 = api.predict(
        small, ["tensor-parallel", "tensor-parallel-int8"], api.Workload(tp=8, batch=8, prompt=1024)
    ).predictions
    spans = [s for s in int8.prefill.spans if s.lane == "communication" and s.layer == 0]
    assert [s.name.split(": ")[1] for s in spans[:5]] == [
        "quantize", "all-to-all", "sum and quantize", "all-gather", "dequantize",
    ]  # fmt: skip
    whole = next(s.nbytes for s in exact.prefill.spans if s.lane == "communication" and s.layer == 0)
    assert 0.5 * whole < spans[1].nbytes < 0.53 * whole
    # short messages stay exact
    assert int8.decode.collectives == exact.decode.collectives


# --- published orders ---


def test_gains_come_in_the_order_of_the_paper(seventy: Program) -> None:
    """Ladder Residual (arXiv 2501.06589), 70B on 8 H100: 1.24 to 1.3 with NVLink, up to 1.6 without; an upper bound
    above; parallel blocks below ladder."""
    recipes = ["tensor-parallel", "parallel", "ladder", "upper-bound"]
    nvlink, host = (
        by_name(api.predict(seventy, recipes, api.Workload(tp=8, batch=4), api.Cluster(fabric=fabric, library=library)))
        for fabric, library in (("h100-nvlink", "nccl"), ("h100-no-p2p", None))
    )
    for found in (nvlink, host):
        assert 1.0 < found["parallel"].end_to_end < found["ladder"].end_to_end < found["upper-bound"].end_to_end
    assert host["ladder"].end_to_end > nvlink["ladder"].end_to_end
    assert 1.15 < nvlink["ladder"].end_to_end < 1.6
    assert 1.3 < host["ladder"].end_to_end < 2.2
    # without P2P the prefill's messages are too long to hide: ladder gains less there than in decode
    gain = host["tensor-parallel"].prefill.seconds / host["ladder"].prefill.seconds
    assert gain < host["tensor-parallel"].decode.seconds / host["ladder"].decode.seconds
    assert nvlink["ladder"].break_even_seconds is not None
    assert nvlink["ladder"].break_even_seconds < 5e-6
    assert nvlink["ladder"].fits
    assert nvlink["ladder"].memory_bytes_per_rank == pytest.approx(18.3e9, rel=0.05)


@pytest.mark.slow
def test_a_70b_model_with_all_recipes_takes_seconds() -> None:
    config = small_config(**LARGE)
    api.predict(small_config(num_hidden_layers=1), ["tensor-parallel"], api.Workload(tp=2))  # imports
    began = time.process_time()
    found = api.predict(config, all_recipes(), api.Workload(tp=8))
    assert len(found.predictions) == len(all_recipes())
    assert not found.skipped
    # 7 s of a core; a machine that does other things counts more of it as ours
    assert time.process_time() - began < 25
