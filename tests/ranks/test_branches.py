"""A block in a branch beside the next one: which blocks, that neither reads the other's values, bits, and streams."""

from __future__ import annotations

import ast
import random
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import draws
import pytest
import torch
import zoo
from emitted_ranks import PAD, build
from programs import MERGE, OVERLAP, applied, runtime_case, tensor_parallel, traced, weights
from ranks import run_ranks
from torch import fx

from rewriter.emit.module import emit_runtime_module
from rewriter.ir import Program, ops, reachable
from rewriter.ir.marks import marks
from rewriter.runtime import streams as module
from rewriter.tracing import trace

BRANCHES = ("overlap", {"branches": 2})
LADDER = ("ladder", {})


def two_branches(family: str, *steps: Any, ranks: int = 2) -> Program:
    return tensor_parallel(traced(family), ranks, *(steps or (LADDER,)), BRANCHES)


def beside(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if marks(n).beside]


def shared(graph: fx.Graph) -> list[str]:
    """Values of a branch that what runs beside it reads, or the other way round."""
    nodes = list(graph.nodes)
    order = {n: i for i, n in enumerate(nodes)}
    found = []
    for start in (n for n in beside(graph) if n.target is ops.all_reduce_start):
        own = set(reachable([start], lambda n: (s for s in n.all_input_nodes if marks(s).beside)))
        first = min(order[n] for n in own)
        found += [n.name for n in own - {start} if any(user not in own for user in n.users)]
        found += [s.name for n in own for s in n.all_input_nodes if s not in own and order[s] > first]
        ends = next(
            i for i, n in enumerate(nodes) if i > order[start] and n.target in (ops.all_reduce_start, ops.all_reduce)
        )
        found += [n.name for n in nodes[order[start] + 1 : ends] if start in n.all_input_nodes]
    return found


def test_attention_of_every_ladder_layer_runs_beside_the_mlp() -> None:
    program = two_branches("llama")
    paths = [str(n.target) for n in beside(program.graph) if n.op == "call_module"]
    assert paths == [f"model.layers.{i}.{m}" for i in range(4) for m in ("input_layernorm", "self_attn")]
    assert program.history[-1].summary.endswith(", 4 blocks beside the next one")
    assert shared(program.graph) == []


def test_what_needs_the_block_before_has_no_branch() -> None:
    assert beside(two_branches("llama", MERGE).graph) == []
    mixed = two_branches("llama", ("ladder", {"layers": [2, 3]}))
    assert {marks(n).layer for n in beside(mixed.graph)} == {2, 3}
    assert beside(tensor_parallel(traced("llama"), 2, LADDER, OVERLAP).graph) == []
    assert beside(two_branches("gpt_neox", MERGE, LADDER).graph) == [], "a layer of one block"


@pytest.mark.parametrize("seed", [pytest.param(n, marks=[pytest.mark.slow] * (n > 4)) for n in range(12)])
@pytest.mark.fast("0", "1")
def test_branches_of_random_mixes_share_nothing(seed: int) -> None:
    rng = random.Random(seed)
    drawn = draws.architecture(rng, rng.choice(["llama", "gpt2", "gemma2", "mixtral"]))
    chosen = draws.mix(rng, drawn, 2)
    plain = draws.rewrite(rng, trace(drawn.config), drawn, chosen)
    if plain.history[-1].name == "overlap":
        return
    program = applied(plain, BRANCHES)
    assert shared(program.graph) == []
    if not any(mode.mode in ("own_partial", "desync") for _, mode in chosen.runs):
        assert reads_before_join(emit_runtime_module(program)) == []


def test_a_shared_value_is_found() -> None:
    graph = two_branches("llama").graph
    own = next(n for n in beside(graph) if n.name.startswith("add"))
    other = next(n for n in graph.nodes if marks(n).stream is not None and n.args == own.args)
    other.replace_all_uses_with(own)
    assert shared(graph) == [own.name]


def reads_before_join(source: str) -> list[str]:
    """Names that forward gives a value in a branch and reads before it is joined."""
    found = []
    for function in (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)):
        made: set[str] = set()
        for statement in function.body:
            if isinstance(statement, ast.With):
                made = {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
                made -= {"branch"}
            elif ast.unparse(statement) == "branch.join()":
                made = set()
            else:
                names = [n for n in ast.walk(statement) if isinstance(n, ast.Name) and n.id in made]
                found += [n.id for n in names if isinstance(n.ctx, ast.Load)]
    return found


def test_generated_code_reads_a_branch_after_its_join() -> None:
    source = emit_runtime_module(two_branches("llama"))
    assert source.count("with fork(") == source.count("branch.join()") == 3, "a class for the first, middle and last"
    assert reads_before_join(source) == []
    early = source.replace("        branch.join()\n        return", "        return")
    assert "self_attn_pending" in reads_before_join(early)


# --- bits


def on_rank(group: Any, cases: list[Any], ids: torch.Tensor, prompts: list[list[int]]) -> list[Any]:
    """Per case: logits, and greedy tokens with a cache."""
    from rewriter.runtime import Context, generate

    found = []
    for source, tensors, ties in cases:
        model = build(source, tensors[group.rank()], ties, group)
        with torch.no_grad():
            logits = model(ids, torch.arange(ids.shape[1]).expand(ids.shape), Context())
        found.append((logits, generate(model, prompts, 6, pad_token_id=PAD)))
    return found


@pytest.mark.slow
def test_two_branches_give_the_bits_of_one() -> None:
    families = ("llama", "gpt2", "gemma3_text", "qwen3_moe")
    steps = [(MERGE, LADDER, ("fuse_projections", {}), last) for last in (OVERLAP, BRANCHES)]
    cases = [runtime_case(tensor_parallel(traced(f), 2, *chosen), weights(f)) for chosen in steps for f in families]
    assert ["with fork(" in source for source, _, _ in cases] == [False] * 4 + [True] * 4
    for found in run_ranks(on_rank, 2, cases, zoo.batch(), zoo.prompts(3)):
        for family, one, two in zip(families, found[:4], found[4:], strict=True):
            assert torch.equal(one[0], two[0]), family
            assert one[1] == two[1], family


# --- streams


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was asked of the device, in order."""
    found: list[str] = []

    @contextmanager
    def stream(which: Any) -> Any:
        found.append(f"on {which.name}")
        yield
        found.append("back")

    def named(name: str) -> Any:
        return SimpleNamespace(
            name=name,
            device=torch.device("cpu"),
            wait_stream=lambda other: found.append(f"{name} waits for {other.name}"),
        )

    main, side = named("main"), named("side")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(module, "_side_stream", lambda device: side)
    monkeypatch.setattr(module, "on_streams", lambda x: not torch.is_grad_enabled())
    return found


def test_a_branch_begins_after_what_was_launched_and_is_waited_for_at_its_join(done: list[str]) -> None:
    x = torch.ones(2)
    with torch.no_grad(), module.fork(x) as branch:
        done.append("launch")
    assert branch._read == (x,), "its memory is not given to others"
    branch.join()
    assert branch._read == ()
    assert done == ["side waits for main", "on side", "launch", "back", "main waits for side"]


def test_with_gradients_and_on_a_cpu_there_is_one_stream(done: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with module.fork(torch.ones(2)) as branch:
        pass
    branch.join()
    monkeypatch.undo()
    with torch.no_grad(), module.fork(torch.ones(2)) as branch:
        pass
    branch.join()
    assert done == []
