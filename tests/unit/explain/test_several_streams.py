"""Streams that are more than x + f(x), in plans, tables and drawings."""

from __future__ import annotations

import pytest
from programs import OVERLAP, tensor_parallel

from rewriter.check.coverage.configs import small_config
from rewriter.explain.inspection import inspect
from rewriter.explain.plan_table import plan_text
from rewriter.ir.layer_drawing import program_drawing
from rewriter.ir.layer_plan import layer_plans
from rewriter.tracing import trace

SLOW = pytest.mark.slow
# streams, and what the blocks of the second layer carry on, as docs/concepts/general-streams.md has it
CARRIED = {
    "bart": (1, ("normed", "normed")),
    "gemma4_text": (1, ("scaled", "as it is", "as it is")),  # the scalar of the layer before
    "zaya": (1, ("scaled", "scaled")),
    "qwen4_exp_text": (4, ("as it is", "as it is")),
    "hy_v4": (4, ("as it is", "as it is")),
    "deepseek_v4": (4, ("mixed", "mixed")),
}
FAST = ("bart", "zaya", "deepseek_v4")


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=SLOW) for n in CARRIED])
def test_what_blocks_carry_on(name):
    program = trace(small_config(name))
    for wiring in (program, tensor_parallel(program, 2, ("ladder", {}), OVERLAP)):
        plan = layer_plans(wiring)[1]
        carried = [block.carries for block in plan.blocks]
        assert (plan.streams, tuple(carried[: len(CARRIED[name][1])])) == CARRIED[name]
    mixes = CARRIED[name][1][0] == "mixed"
    assert wiring.history[-1].summary.endswith("1 of them only with what their block carries on") == mixes


def test_several_streams_are_drawn_as_lines_that_are_mixed():
    drawing = program_drawing(trace(small_config("deepseek_v4")))  # one kind of layer: two blocks are drawn
    assert "one device, 4 streams" in drawing
    assert drawing.count('class="rs rv"') == 2 * 4
    assert drawing.count(">mix<") == 2
    single = program_drawing(trace(small_config("bart")))
    assert "streams" not in single
    assert "rs rv" not in single
    assert ">norm<" in single


def test_plans_and_tables_say_how_many_streams_and_what_becomes_of_them():
    found = inspect(small_config("deepseek_v4"), "ladder", tp=2)
    assert "x is 4 streams" in found.plan
    assert "behind what x becomes" in found.plan  # the last sum: nothing but the mixture is computed meanwhile
    assert "behind 0 block" not in found.plan
    assert {block["carries"] for block in found.data["blocks"]} == {"mixed"}
    assert found.data["model"]["streams"] == 4
    one = plan_text(trace(small_config("llama")))
    assert "streams" not in one
    assert "x itself" not in one
