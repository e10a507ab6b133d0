"""The process that compiles the parts of a decode step and puts them into the user's cache.

    python -m rewriter.runtime.generation.compile_worker KEY.spec.json [background]

It makes the module without its weights, traces each part that differs from the others, and has AOTInductor compile
what it has not compiled before. It communicates with nobody; a kill leaves a usable cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from zipfile import ZipFile

from rewriter.runtime.generation import step_cache

LIMIT_SECONDS = 1800
_NICE = 10  # a tenth of what a process without it gets; at 19 it would stand still while another computes
_PLAIN = ("aten", "prims", "_operator", "math")  # where operators come from that keep to themselves


def compile_step(spec: Mapping[str, Any]) -> None:
    """Unless another process has done so."""
    folder, key = Path(spec["folder"]), str(spec["key"])
    with step_cache.alone(folder):
        if step_cache.find(folder, key) is not None:
            return
        scratch, begin = mkdtemp(prefix="partial-", dir=folder), time.monotonic()
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.environ["TMPDIR"] = scratch  # read when it is first used
        try:
            parts = _compiled(spec, folder, Path(scratch))
            step_cache.store(folder, key, parts, time.monotonic() - begin)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _compiled(spec: Mapping[str, Any], folder: Path, scratch: Path) -> dict[str, tuple[str, bool]]:
    """By name of a part its file in `folder`, and whether it returns one tensor."""
    import torch

    from rewriter.runtime.generation.step_parts import PartCall, parts_of, structure

    torch.set_num_threads(spec["threads"])
    model = _skeleton(spec)
    calls = {name: PartCall.read(said) for name, said in spec["calls"].items()}
    made: dict[str, tuple[str, bool]] = {}
    by_kind: dict[object, tuple[str, bool] | None] = {}
    for part in parts_of(model):
        if (call := calls.get(part.name)) is None:
            continue
        kind = (structure(part), call)
        if kind not in by_kind:
            try:
                traced = _traced(part, call)
            except Exception as error:  # of any kind: this part stays as it is
                sys.stderr.write(f"{part.name} is not compiled: {error}\n")
                traced = None
            by_kind[kind] = None if traced is None else (_package(traced[0], folder, scratch), traced[1])
        if (compiled := by_kind[kind]) is not None:
            made[part.name] = compiled
    return made


def _skeleton(spec: Mapping[str, Any]) -> Any:
    """The module of the rank without its weights. Its process groups have the rank's place and no others in them:
    torch's "fake" backend, which it makes for tests of one process."""
    import torch.distributed as dist

    from rewriter.runtime.loading import skeleton

    if spec["world"] > 1:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=spec["rank"], world_size=spec["world"], store=FakeStore())
    model = skeleton(spec["directory"], dp=spec["dp"])
    if vars(model)["origin"].code != spec["code"]:
        raise SystemExit(f"{spec['directory']}: its module has changed since")
    return model.eval()


def _traced(part: Any, call: Any) -> tuple[Any, bool]:
    """The graph of a part, and whether it returns one tensor. Raises what tracing does."""
    import torch
    from torch import Tensor, nn

    from rewriter.runtime.compiled import Reductions
    from rewriter.runtime.generation.step_parts import tensors_of

    single = [False]
    names = [f"part.{name}" for name in tensors_of(part.module)]

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = part.module

        def forward(self, arguments: list[Any]) -> Any:
            return getattr(self.part, part.method)(*arguments)

    class FlatStep(nn.Module):
        def forward(self, inputs: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
            given = (call.arguments(inputs, part.slots),)
            with Reductions():
                result = torch.func.functional_call(holder, dict(zip(names, weights, strict=True)), given)
            single[0] = isinstance(result, Tensor)
            outputs = [result] if single[0] else list(result)
            if not all(isinstance(x, Tensor) for x in outputs):
                raise TypeError("it returns other things than tensors")
            return outputs

    holder = Holder()
    given = [
        [torch.empty_strided(x.shape, x.strides, dtype=getattr(torch, x.dtype)) for x in inputs]
        for inputs in (call.inputs, call.weights)
    ]
    growing = {2: torch.export.Dim.DYNAMIC}
    shapes = ([growing if x.grows else None for x in call.inputs], [None for _ in call.weights])
    with torch.no_grad():
        program = torch.export.export(FlatStep(), tuple(given), dynamic_shapes=shapes, strict=False)
    for node in program.graph.nodes:
        if node.op == "call_function" and _origin(node.target) not in _PLAIN:
            raise TypeError(f"it calls {node.target}")
    return program, single[0]


def _origin(target: Any) -> str:
    return str(getattr(target, "namespace", None) or getattr(target, "__module__", ""))


def _package(program: Any, folder: Path, scratch: Path) -> str:
    """The name of the shared library in `folder` that computes `program`. Raises what Inductor and the compiler do."""
    import torch

    inputs = [str(node.meta["val"]) for node in program.graph.nodes if node.op == "placeholder"]
    digest = hashlib.sha256(json.dumps([program.graph_module.code, inputs, torch.get_num_threads()]).encode())
    for name, constant in sorted(program.constants.items()):
        digest.update(f"{name} {constant.dtype} {constant.tolist()}".encode())
    # and the toolchain
    digest.update(json.dumps([torch.__version__, step_cache.key_of({}), sorted(OPTIONS.items())]).encode())
    file = folder / f"{digest.hexdigest()[:32]}.so"
    if not file.exists():
        _build(program, scratch / file.name)
        (scratch / file.name).replace(file)
    return file.name


def _build(program: Any, file: Path) -> None:
    """Compile `program` to the shared library `file`."""
    import torch
    from torch._inductor import aoti_compile_and_package

    package = file.with_suffix(".pt2")
    with torch.no_grad():
        aoti_compile_and_package(program, package_path=str(package), inductor_configs=OPTIONS)
    with ZipFile(package) as archive:
        (library,) = (name for name in archive.namelist() if name.endswith(".so"))
        file.write_bytes(archive.read(library))


# As eager code rounds: after every operator, not only what a fused loop stores.
OPTIONS = {"emulate_precision_casts": True}


def give_way() -> None:
    """Leave the cores to other processes. With Linux's autogroups, which most desktops have on, a session's niceness is
    its group's: that of its processes counts only among them."""
    os.nice(_NICE)
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(_NICE), encoding="ascii")


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    if "background" in sys.argv[2:]:
        give_way()
    else:
        from rewriter.common.processes import end_with_parent

        end_with_parent()
    signal.alarm(LIMIT_SECONDS)
    try:
        compile_step(spec)
    except Exception as error:
        line = next((line for line in reversed(str(error).splitlines()) if line.strip()), "")
        (Path(spec["folder"]) / f"{spec['key']}.failed").write_text(f"{type(error).__name__}: {line.strip()[:300]}")
        raise


if __name__ == "__main__":
    main()
