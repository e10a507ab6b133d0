"""`rewriter.runtime.generation.compile_worker` without the minute of Inductor and the C++ compiler: its files are the
graphs that they would compile, which `loaded` runs. Everything else is as in the real one, processes included."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import torch

from rewriter.runtime.generation import compile_worker

SCRIPT = str(Path(__file__).resolve())


def build(program, file):
    if "TRACED_WORKER_FAILS" in os.environ:
        raise OSError("no space left")
    assert not program.constants, "they would be inputs"
    graph = program.graph_module.graph
    graph._tracer_cls = None  # unpickling would make export's again, which wants more than it is given
    file.write_bytes(pickle.dumps(torch.fx.GraphModule(program.graph_module, graph)))


def loaded(path):
    """Stands in for `cached_step._loaded`."""
    module = pickle.loads(path.read_bytes())
    return lambda tensors: module(*tensors)


if __name__ == "__main__":
    compile_worker._build = build
    compile_worker._NICE = 0  # other tests run beside it
    compile_worker.main()
