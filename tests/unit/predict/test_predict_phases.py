"""Prediction of recipes that rewire the prompt alone: a prefill in calls of both wirings, and an exact decode step."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from predict_cases import by_name, small_config
from programs import MERGE, OVERLAP, Step, tensor_parallel

from rewriter import api
from rewriter.ir import Program
from rewriter.ir.communication import model_dtype_bytes
from rewriter.passes.phases import exact_wiring
from rewriter.predict.analytic import Predictor
from rewriter.predict.as_json import to_json
from rewriter.predict.forward import Forward, Runner
from rewriter.predict.kernel_cost import Kernel
from rewriter.predict.workload import FIRST_TOKEN_PROMPTS, Cluster, ForwardPass, Workload
from rewriter.recipes import Recipe
from rewriter.tracing import trace

LAYERS, WIDTH, WIDE, HEADS, KV_HEADS, VOCABULARY = 4, 256, 512, 16, 8, 512
TP = 4
FUSE: Step = ("fuse_projections", {})
PHASED: dict[str, tuple[str, dict[str, Any]]] = {
    "ladder": ("ladder", {}),
    "own-partial": ("ladder", {"variant": "own_partial"}),
    "desync": ("desync", {"n": 2, "resync": "sum"}),
    "drop": ("drop_sync", {"layers": "all"}),
    "parallel": ("parallel_block", {"norm": "own"}),
    "one-norm": ("parallel_block", {"norm": "attention"}),
    "int8": ("quantize_collectives", {"format": "int8"}),
}


@pytest.fixture(scope="module")
def small() -> Program:
    return trace(small_config())


def made(traced: Program, name: str | None, *more: Step, **phase: Any) -> Program:
    """The model on four ranks after one pass of PHASED, or none, with options of its phase."""
    middle = [] if name is None else [(PHASED[name][0], {**PHASED[name][1], **phase})]
    early = [middle.pop()] if name in ("parallel", "one-norm") else []
    return tensor_parallel(traced, TP, *early, MERGE, *middle, *more, OVERLAP)


def predictor(prompt: int = 4096, **load: Any) -> Predictor:
    return Predictor(Workload(prompt=prompt, tp=TP, **load), Cluster("pcie-gen5"))


def flops(forward: Forward) -> float:
    return sum(kernel.flops for kernel in forward.kernels)


def by_node(forward: Forward) -> dict[str, Any]:
    return {work.node.name: work.items for work in forward.works}


# --- the body of a prompt ---


@pytest.mark.parametrize("name", PHASED)
def test_rewired_tokens_cost_what_they_cost_where_all_are(small: Program, name: str) -> None:
    """Node by node, but for the last attention, of which keys and values are left, and what it alone fed."""
    runner = Runner()
    phased, everywhere = made(small, name, phase="prompt"), made(small, name)
    given = ForwardPass(1, 2048)
    body = by_node(runner.run(phased, ForwardPass(1, 2048, cache_only=True)))
    whole = by_node(runner.run(everywhere, given))
    assert whole == by_node(runner.run(phased, given))
    last = f"model_layers_{LAYERS - 1}_self_attn"
    assert {node for node in body if body[node] != whole[node]} == {last}
    assert not any(isinstance(i, Kernel) and i.work == "attention" for i in body[last])
    assert [k for k in body[last] if k.name == "cache"]
    left_out = {n for n in whole if n not in body}
    assert {"model_norm", "lm_head", f"model_layers_{LAYERS - 1}_mlp"} <= left_out
    kept = {f"model_layers_{n}_self_attn" for n in range(LAYERS)} | {f"model_layers_{n}_mlp" for n in range(LAYERS - 2)}
    assert kept <= set(body)


@pytest.mark.parametrize("fused", [False, True])
def test_the_last_layer_spares_what_a_formula_says(small: Program, fused: bool) -> None:
    """Projections of queries (unless one product makes queries, keys and values), attention, its output projection,
    the MLP and the head of one token."""
    tokens, runner = 1024, Runner()
    program = made(small, "int8", *[FUSE] * fused, phase="prompt")
    whole, body = (flops(runner.run(program, ForwardPass(1, tokens, cache_only=only))) for only in (False, True))
    projections = WIDTH * WIDTH * (1 if fused else 2) + 3 * WIDTH * WIDE
    spared = 2 * tokens * projections + 4 * WIDTH * tokens * (tokens + 1) / 2 + 2 * WIDTH * VOCABULARY
    assert whole - body == pytest.approx(spared / TP, rel=1e-6)


def test_a_ladder_leaves_the_mlp_before_the_last_layer_out_too(small: Program) -> None:
    """The last attention reads the stream without it, and nothing else of the prompt is read."""
    body = by_node(Runner().run(made(small, "ladder", phase="prompt"), ForwardPass(1, 64, cache_only=True)))
    assert f"model_layers_{LAYERS - 2}_mlp" not in body
    body = by_node(Runner().run(made(small, "int8", phase="prompt"), ForwardPass(1, 64, cache_only=True)))
    assert f"model_layers_{LAYERS - 2}_mlp" in body


# --- calls ---


@pytest.mark.parametrize("name", PHASED)
def test_a_decode_step_is_exactly_the_standard_models(small: Program, name: str) -> None:
    """And the wiring over the modules of the program runs the same kernels."""
    one = predictor()
    phased, standard = made(small, name, FUSE, phase="prompt"), made(small, None, FUSE)
    found, wanted = one.simulate(phased), one.simulate(standard)
    assert found.decode == wanted.decode
    step = ForwardPass(1, 1, keys=4608)
    over, own = (Runner().run(p, step) for p in (exact_wiring(phased), standard))
    assert Counter(over.kernels) == Counter(own.kernels)
    assert found.prefill != wanted.prefill


def test_a_prefill_is_the_sum_of_its_calls(small: Program) -> None:
    one = predictor()
    program = made(small, "desync", phase="prompt", exact_tail=16, exact_head=4)
    done = one.simulate(program)
    head, body, tail = done.steps[0]
    assert done.prefill.seconds == pytest.approx(
        sum(one._phase(program, [call], record=False).seconds for call in (head, body, tail))
    )
    last = done.prefill.spans[-1]
    assert max(span.end for span in done.prefill.spans) <= done.prefill.seconds
    assert last.start > one._phase(program, [head, body], record=False).seconds
    # two sums a layer and those of embedding and head in the exact calls; of the body one a layer, but of the last
    sums = [one._phase(program, [call], record=False).collectives for call in (head, body, tail)]
    assert sums == [2 * (LAYERS - 1) + 1, (LAYERS - 1) + 1, 2 * LAYERS + 2]


def test_a_few_exact_tokens_before_a_long_prompt_are_cheap(small: Program) -> None:
    """Attention of those behind them needs no mask."""
    one = predictor(32768)
    programs = [made(small, "desync", phase="prompt", exact_tail=16, exact_head=n) for n in (0, 8)]
    (body, _), (head, after, _) = (one.simulate(program).steps[0] for program in programs)
    alone, first, behind = (
        one._phase(programs[1], [call], record=False).compute_seconds for call in (body, head, after)
    )
    assert first < 0.1 * alone
    assert behind == pytest.approx(alone, rel=0.02)


def test_messages_of_the_prompt_alone_are_quantized_in_its_body(small: Program) -> None:
    one = predictor(8192)
    program = made(small, "int8", phase="prompt", exact_tail=4096)  # the tail's messages are long enough, too
    body, tail = one.simulate(program).steps[0]
    assert 4096 * WIDTH * model_dtype_bytes(program) >= 1 << 20

    def quantized(call: Any) -> set[bool]:
        return {len(step.parts) > 1 for step in call if getattr(step, "reduction", False) and step.layer is not None}

    assert (quantized(body), quantized(tail)) == ({True}, {False})


@pytest.mark.parametrize("name", ["int8", "drop"])
def test_time_to_first_token_rises_with_the_prompt(small: Program, name: str) -> None:
    one = predictor()
    program, standard = made(small, name, phase="prompt", exact_tail=8), made(small, None)
    times = [one.first_token(program, n).seconds for n in (9, 64, 512, 2048, 8192, 32768)]
    assert times == sorted(times)
    assert len(set(times)) == len(times)
    # a prompt with no token to rewire is computed in one call
    for n in (1, 8):
        assert one.first_token(program, n).seconds == one.first_token(standard, n).seconds


# --- what is reported ---


def recipe(name: str, **phase: Any) -> Recipe:
    passed = {"pass": PHASED[name][0], **PHASED[name][1], **phase}
    passes = [{"pass": "tensor_parallel"}, {"pass": "merge_reductions", "optional": True}, passed]
    passes += [{"pass": "fuse_projections", "optional": True}, {"pass": "overlap", "optional": True}]
    return Recipe.model_validate({"name": f"all-{name}", "summary": "Test.", "paper": "None.", "passes": passes})


def test_every_recipe_has_times_to_first_token(small: Program) -> None:
    prompt = recipe("drop", phase="prompt").model_copy(update={"name": "prompt-drop"})
    load = Workload(prompt=FIRST_TOKEN_PROMPTS[1], generate=8, tp=TP)
    found = api.predict(small, ["tensor-parallel", recipe("drop"), prompt], load, Cluster("pcie-gen4"))
    for p in found.predictions:
        assert [one.prompt for one in p.time_to_first_token] == list(FIRST_TOKEN_PROMPTS)
        assert p.time_to_first_token[1].seconds == pytest.approx(p.prefill.seconds)
    objects = json.loads(json.dumps(to_json(found)))
    assert [set(one["time_to_first_token"][0]) for one in objects] == [{"prompt", "seconds", "fits"}] * 3
    named = by_name(found)
    assert named["prompt-drop"].decode == named["tensor-parallel"].decode
    assert named["all-drop"].seconds_per_token < named["prompt-drop"].seconds_per_token
    assert named["prompt-drop"].prefill.seconds < named["tensor-parallel"].prefill.seconds
    assert any("It rewires the prompt but its last token." in note for note in named["prompt-drop"].notes)
    assert not any("It rewires" in note for note in named["all-drop"].notes)
