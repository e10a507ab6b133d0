"""One rank of benchmarks/overlap/run.py, which starts it at its end of the link: emitted modules, timed in turns.

The spec names a directory with, per variant, `VARIANT.py` (the emitted module) and `VARIANT-RANK.safetensors`, and with
`expected.safetensors` (input_ids, and the logits of each variant whose output means something).
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.support.link_ranks import main
from rewriter.runtime import Context, compile_segments
from rewriter.runtime.collectives.small_sums import connect_small_sums
from rewriter.runtime.generation.decode_step import DecodeStep, Sampling

PROMPT, STEPS = 32, 16  # tokens of a decode's prompt, and steps that are timed together


@torch.no_grad()
def measure(spec: dict[str, Any], rank: int) -> dict[str, Any]:
    """Seconds of each forward pass by variant, and the largest relative error of each checked variant's logits."""
    mesh = init_device_mesh("cpu", (spec["ranks"],), mesh_dim_names=("tp",))
    connect_small_sums(mesh.get_group("tp"), torch.device("cpu"))  # as `rewriter.load` does
    root = Path(spec["directory"])
    expected = load_file(root / "expected.safetensors")
    ids = expected.pop("input_ids")
    positions = torch.arange(ids.shape[1]).expand(ids.shape)
    models = {name: build(root, name, rank, mesh, spec["compile"]) for name in spec["variants"]}
    errors: dict[str, float] = {}
    for name, model in models.items():
        for _ in range(spec["warm_up"]):  # the first call compiles
            logits = model(ids, positions, Context())
        if name in expected:
            errors[name] = relative_error(logits, expected[name])
    run = {name: passes(model, ids, positions, spec) for name, model in models.items()}
    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(spec["repetitions"]):
        for name, timed in run.items():
            dist.barrier()
            times[name].append(timed())
    return {"seconds": times, "errors": errors}


def passes(model: nn.Module, ids: Tensor, positions: Tensor, spec: dict[str, Any]) -> Callable[[], float]:
    """A function that returns the seconds of one pass over the prompt, or of one decode step."""
    if spec["phase"] == "prefill":

        def prefill() -> float:
            begin = time.perf_counter()
            model(ids, positions, Context(), logits_to_keep=1)
            return time.perf_counter() - begin

        return prefill
    prompts = ids[:, :PROMPT].expand(spec["sequences"], PROMPT)
    step = DecodeStep(model, len(prompts), PROMPT + STEPS + 1, dist.group.WORLD)

    def decode() -> float:
        step.begin(PROMPT, None, Sampling(), 0, (), 0)
        step.prefill(prompts)
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(STEPS):
            step.run()
        return (time.perf_counter() - begin) / STEPS

    decode()  # compiles
    return decode


def build(root: Path, variant: str, rank: int, mesh: DeviceMesh, compiled: bool) -> nn.Module:
    """The emitted module of a variant with this rank's weights."""
    model: nn.Module = load_module(root / f"{variant}.py").Model(mesh)  # type: ignore[attr-defined]
    model.load_state_dict(load_file(root / f"{variant}-{rank}.safetensors"), strict=True, assign=True)
    model.eval()
    if compiled:
        torch._dynamo.config.fail_on_recompile_limit_hit = True  # eager code would be timed as compiled
        compile_segments(model)
    return model


def load_module(path: Path) -> ModuleType:
    name = f"overlap_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where torch.compile looks a class up
    spec.loader.exec_module(module)
    return module


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest expected value."""
    return ((found - expected).abs().max() / expected.abs().max()).item()


if __name__ == "__main__":
    main(measure)
