"""A profile of emitted modules on real ranks shows every start and wait where the overlap pass put it."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
import zoo
from emitted import edited
from emitted_ranks import build
from programs import program, runtime_case, weights
from ranks import run_ranks

from rewriter.ir import Program, ops
from rewriter.ir.marks import in_stream, mark, marks

FAMILY = "llama"
BLOCKS = ("self_attn", "mlp")
SELECTIONS = {"standard": set(), "all": {0, 1, 2, 3}, "upper-half": {2, 3}, "scattered": {1, 3}}


@dataclass(frozen=True)
class Step:
    """What the rank's Python thread did, outermost calls only, in order of time: a module of the wiring ("module",
    its path), a collective ("start" or "wait", its name) or another operator ("op", its name). `launches` counts the
    all-reduces handed to gloo meanwhile."""

    kind: str
    name: str
    launches: int = 0


def profiled(group, cases, ids):
    """Per case, the steps of one forward pass. `cases` are (source, this rank's tensors, ties, paths of modules)."""
    from rewriter.runtime import Context

    results = []
    positions = torch.arange(ids.shape[1]).expand(ids.shape)
    for source, tensors, ties, paths in cases:
        model = build(source, tensors[group.rank()], ties, group)
        for path in paths:
            show(model.get_submodule(path), path)
        with torch.no_grad(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            model(ids, positions, Context())
        results.append(outermost([(e.name, e.thread, e.time_range.start, e.time_range.end) for e in profile.events()]))
    return results


def show(module, path):
    """Make `module` appear in profiles under its path."""
    open_ = []

    def copy_to_group(*_):
        open_.append(torch.profiler.record_function(f"module {path}"))
        open_[-1].__enter__()

    module.register_forward_pre_hook(copy_to_group)
    module.register_forward_hook(lambda *_: open_.pop().__exit__(None, None, None))


def outermost(events):
    """The steps in events (name, thread, begin, end): those that no other event of the Python thread encloses."""
    python = next(thread for name, thread, *_ in events if name.startswith("module "))
    mine = sorted((e for e in events if e[1] == python), key=lambda e: (e[2], -e[3]))
    steps, end = [], float("-inf")
    for name, _, begin, finish in mine:
        if begin >= end:
            end = finish
            steps.append(step(name, sum(n == "c10d::allreduce_" and begin <= b < finish for n, _, b, _ in mine)))
    return steps


def step(name: str, launches: int) -> Step:
    for prefix, kind in (
        ("module ", "module"),
        ("rewriter::all_reduce_start", "start"),
        ("rewriter::all_reduce_wait", "wait"),
    ):
        if name.startswith(prefix):
            return Step(kind, name.removeprefix(prefix).strip(), launches)
    return Step("op", name, launches)


def scheduled(sharded: Program) -> list[tuple[str, str]]:
    """What the pass decided, from the wiring: modules of layers, starts, waits and residual adds, in its order.

    An all-reduce that nothing could hide stays whole: it starts and waits ("wait at once") in one place.
    """
    steps = []
    for node in sharded.graph.nodes:
        if node.op == "call_module" and marks(node).layer is not None:
            steps.append(("module", str(node.target)))
        elif node.target is ops.all_reduce_start:
            steps.append(("start", block_of(node)))
        elif node.target is ops.all_reduce_wait:
            steps.append(("wait", block_of(node.args[0])))
        elif node.target is ops.all_reduce and marks(node).layer is not None:
            steps += [("start", block_of(node)), ("wait at once", block_of(node))]
        elif node.target is operator.add and in_stream(node):
            steps.append(("op", "aten::add"))
    return steps


def modules(sharded: Program) -> list[str]:
    return [name for kind, name in scheduled(sharded) if kind == "module"]


def block_of(start) -> str:
    return str(start.args[0].target).rpartition(".")[2]


def check(steps: Sequence[Step], sharded: Program) -> None:
    """Assert that the steps are the schedule, and that each start and wait stands where it hides the most.

    A start comes right after the block whose partial it sums, before anything else; a wait right before the add that
    first uses the sum; and each start, and nothing else in between, hands one all-reduce to the backend.
    """
    first = next(i for i, s in enumerate(steps) if s.kind == "module" and ".layers." in s.name)
    expected = scheduled(sharded)
    inside = list(steps[first : first + len(expected)])
    assert [(s.kind, s.name) for s in inside] == [(kind.removesuffix(" at once"), name) for kind, name in expected]
    blocks = sum(s.kind == "module" and s.name.endswith(BLOCKS) for s in inside)
    assert [s.launches for s in inside if s.kind == "start"] == [1] * blocks
    assert sum(s.launches for s in inside) == blocks
    for (kind, _), before, this, after in zip(expected[1:], inside, inside[1:], inside[2:], strict=False):
        if this.kind == "start":
            assert before.kind == "module", f"{before} stands between a block and its start"
            assert before.name.endswith(f".{this.name}"), f"{before} stands before the start of {this.name}"
        if kind == "wait":
            used = (after.kind, after.name) == ("op", "aten::add")
            assert used, f"{this} stands before {after}, its first use is later"


def wait_of(graph, layer: int, block: str):
    """The wait for the all-reduce of a block."""
    target = f"model.layers.{layer}.{block}"
    return next(n for n in graph.nodes if n.target is ops.all_reduce_wait and n.args[0].args[0].target == target)


def node_of(graph, target: str):
    return next(n for n in graph.nodes if n.target == target)


def before_the_next_block(graph):
    """Layer 1's MLP is waited for before layer 2's attention runs, which should hide it."""
    wait = wait_of(graph, 1, "mlp")
    node_of(graph, "model.layers.2.input_layernorm").prepend(wait)


def right_after_its_start(graph):
    """Layer 2's attention is waited for as soon as it is started, as without a ladder."""
    wait = wait_of(graph, 2, "self_attn")
    wait.args[0].append(wait)
    mark(wait, runs_in=2)


FAULTS = {f.__name__: f for f in (before_the_next_block, right_after_its_start)}


@pytest.fixture(scope="module")
def runs():
    """By label: (program, steps of each rank). All in one start of the ranks."""
    good = {label: program(FAMILY, layers, tp=2) for label, layers in SELECTIONS.items()}
    faulty = {label: edited(good["all"], fault) for label, fault in FAULTS.items()}
    programs = good | faulty
    cases = [(*runtime_case(p, weights(FAMILY)), modules(p)) for p in programs.values()]
    ids = zoo.batch(1, 21, zoo.shared(FAMILY).config.vocab_size)
    by_rank = run_ranks(profiled, 2, cases, ids)
    return {label: (p, [rank[i] for rank in by_rank]) for i, (label, p) in enumerate(programs.items())}


@pytest.mark.parametrize("selection", SELECTIONS)
def test_starts_and_waits_are_where_the_pass_put_them(runs, selection):
    sharded, by_rank = runs[selection]
    for steps in by_rank:
        check(steps, sharded)


def test_a_ladder_runs_a_block_between_start_and_wait_and_the_standard_model_none(runs):
    def hidden(selection: str) -> list[int]:
        """Per all-reduce of the layers, the blocks that run while it is under way."""
        steps = runs[selection][1][0]
        counts = []
        for i, begin in enumerate(steps):
            if begin.kind == "start" and begin.name:
                end = next(j for j in range(i, len(steps)) if (steps[j].kind, steps[j].name) == ("wait", begin.name))
                counts.append(sum(s.kind == "module" and s.name.endswith(BLOCKS) for s in steps[i:end]))
        return counts

    assert hidden("standard") == [0] * 8
    assert hidden("all") == [1] * 7 + [0], "only the last block has nothing to hide behind"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wait_that_comes_too_early_is_found(runs, fault):
    faulty, by_rank = runs[fault]
    for steps in by_rank:
        with pytest.raises(AssertionError):
            check(steps, runs["all"][0])  # not the pass's schedule
        with pytest.raises(AssertionError, match="its first use is later"):
            check(steps, faulty)  # as scheduled, but the schedule is bad
