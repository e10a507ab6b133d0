"""What was written, run in processes of its own and compared module by module with the program it was written from."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import fx

from rewriter.common.errors import VerificationError
from rewriter.common.processes import Processes, environment, placed, write_json
from rewriter.explain.bisect.finding import Bisection, Fault, Step
from rewriter.explain.bisect.recording import Record
from rewriter.explain.bisect.statements import layer_of_path
from rewriter.explain.bisect.values import Ranks, difference, relation
from rewriter.ir import Program
from rewriter.verify.subprocess_logits import TIMEOUT

UNSEEN = "the logits differ, and no module is given or gives other values"


@dataclass(frozen=True)
class Seen:
    """What the modules of a run were given and returned, by path, a tensor per rank; `order` is that of their calls."""

    given: Mapping[str, Ranks]
    returned: Mapping[str, Ranks]
    order: tuple[str, ...]
    logits: Ranks


def run_checkpoint(directory: Path, ids: torch.Tensor, trust_remote_code: bool = True) -> Seen:
    """A checkpoint, loaded by transformers in fp32. Raises VerificationError where it fails, with its reason."""
    return _run("checkpoint", directory, ids, 1, lambda rank: environment(), trust_remote_code)


def run_ranks(directory: Path, ids: torch.Tensor, ranks: int) -> Seen:
    """The sharded module on `ranks` gloo processes. Raises VerificationError where it fails, with its reason."""
    return _run("ranks", directory, ids, ranks, placed(ranks), True)


def _run(
    kind: str,
    directory: Path,
    ids: torch.Tensor,
    ranks: int,
    variables: Callable[[int], Mapping[str, str]],
    trust_remote_code: bool,
) -> Seen:
    with Processes() as job:
        request, result = job.scratch / "request.json", job.scratch / "seen"
        write_json(
            request,
            {
                "directory": str(directory.resolve()),
                "ids": ids.tolist(),
                "trust_remote_code": trust_remote_code,
            },
        )
        own = {"HF_MODULES_CACHE": str(job.scratch / "modules"), "HF_HUB_OFFLINE": "1"}
        words = ["-m", "rewriter.explain.bisect.watch_modules", kind, str(request), str(result)]
        for rank in range(ranks):
            job.fork(f"rank {rank}", words, {**variables(rank), **own})
        failure = job.wait(TIMEOUT)
        if failure is not None:
            what = "the adapted checkpoint" if kind == "checkpoint" else f"the module on {ranks} ranks"
            raise VerificationError(f"{what} fails: {failure.line}")
        return _read([Path(f"{result}.{rank}") for rank in range(ranks)])


def _read(files: list[Path]) -> Seen:
    sides: dict[str, list[dict[str, torch.Tensor]]] = {"given": [], "returned": []}
    logits, order = [], ()
    for path in files:
        with safe_open(path, "pt") as file:
            names = list(file.keys())
            for side, ranks in sides.items():
                ranks.append({n.partition("|")[2]: file.get_tensor(n) for n in names if n.startswith(f"{side}|")})
            logits.append(file.get_tensor("logits"))
            order = tuple(json.loads(file.metadata()["order"]))
    merged = {
        side: {name: _same(tuple(r[name] for r in ranks)) for name in ranks[0] if all(name in r for r in ranks)}
        for side, ranks in sides.items()
    }
    return Seen(merged["given"], merged["returned"], order, _same(tuple(logits)))


def _same(values: Ranks) -> Ranks:
    """One tensor where all ranks have the same."""
    return values[:1] if all(torch.equal(v, values[0]) for v in values[1:]) else values


def compare_written(
    name: str, seen: Seen, program: Program, right: Record, logits: Ranks, limit: float, found: Bisection
) -> bool:
    """Whether a run computes the `logits` of `program`, whose values are `right`; else `found` gets the fault."""
    error = difference(seen.logits, logits, partial=False)
    found.steps.append(Step(name, error <= limit, error))
    if error <= limit:
        return True
    for factor in (1.0, 0.1, 0.01):
        if (fault := first_parting(name, seen, program, right, limit * factor)) is not None:
            found.fault = fault
            return False
    found.fault = Fault(name, None, "", "", UNSEEN, error=error)
    return False


def _name(value: object) -> str:
    return value.name if isinstance(value, fx.Node) else ""


def first_parting(name: str, seen: Seen, program: Program, right: Record, limit: float) -> Fault | None:
    """The first module, in the order of the program, that is given or gives other values than there."""
    before = ""
    for key, node in right.nodes.items():
        if node.op != "call_module":
            continue
        prefix, path = key[0], key[0] + str(node.target)
        first = right.values.get((prefix, _name(node.args[0]))) if node.args else None
        for side, expected in (("given", first), ("returned", right.values[key])):
            actual = getattr(seen, side).get(path)
            if actual is None or expected is None:
                continue
            error = difference(actual, expected)
            if error <= limit or (error == float("inf") and all(bool(v.isfinite().all()) for v in actual)):
                continue  # of another shape: not the same value
            layer, how = layer_of_path(program, path), relation(actual, expected, limit)
            how = f"; {how}" if how else ""
            if side == "returned":
                cause = f"{path} gives something else for what it should be given{how}"
                return Fault(name, layer, path.rpartition(".")[2], path, cause, node.name, error=error)
            between = f"between {before} and {path}" if before else f"before {path}"
            cause = f"what {path} is given differs{how}; the modules before it are right, so the fault is {between}"
            return Fault(name, layer, f"what {path} is given", path, cause, node.name, error=error)
        before = path
    return None
