"""Marks for Dynamo that do not import it say what torch's public ones say; a rank that generates never imports it."""

from __future__ import annotations

import subprocess
import sys

import torch
from repository import ROOT

from rewriter.runtime.torch_marks import assume_constant_result, not_compiled


def test_a_constant_is_marked_as_torch_marks_it() -> None:
    def one() -> int:
        return 1

    def other() -> int:
        return 1

    assert vars(assume_constant_result(one)) == vars(torch.compiler.assume_constant_result(other)) != {}


def test_what_is_not_compiled_breaks_the_graph_and_computes() -> None:
    graphs: list[torch.fx.GraphModule] = []

    @not_compiled
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compiled = torch.compile(lambda x: doubled(x + 1) + 1, backend=backend)
    assert compiled(torch.ones(2)).tolist() == [5.0, 5.0]
    targets = [node.target.__name__ for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    assert targets == ["add", "add"]


def test_a_rank_starts_without_dynamo() -> None:
    """It takes a second to import: the runtime, and what builds an emitted module."""
    asked = """
import sys, torch
import rewriter.runtime.generation.worker
from rewriter.runtime.loading import _EmptyOnMeta
with _EmptyOnMeta():
    torch.nn.Linear(4, 4), torch.nn.Embedding(4, 4), torch.nn.LayerNorm(4)
print(*sorted({"torch._dynamo", "torch._inductor", "transformers"} & {*sys.modules}))
"""
    ran = subprocess.run([sys.executable, "-c", asked], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == ""
