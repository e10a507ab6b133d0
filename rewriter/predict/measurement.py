"""A prediction whose computing is measured: one rank's shard runs for real, its peers are emulated.

The emitted runtime module runs twice: with the fabric's delays, and with none. The second is what a rank computes and
launches; what the first takes longer is exposed communication.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from rewriter.common.errors import RewriterError
from rewriter.common.files import scratch_folder
from rewriter.common.numbers import size
from rewriter.common.processes import Processes, run_ranks
from rewriter.emit.module import emit_runtime_module
from rewriter.ir import Program
from rewriter.ir.communication import model_dtype
from rewriter.passes.sequence.sequence_plans import sequence_plan
from rewriter.predict.rank_worker import Spec, Variant
from rewriter.predict.results import Phase, Prediction, RecipeComparison, generation_seconds
from rewriter.predict.workload import Cluster, Workload
from rewriter.weights import Checkpoint, ShardPlan, convert_files

REPETITIONS = 5
TIMEOUT = 3600.0  # seconds of one launch: a big shard is read, and a pass may take long on a CPU


@dataclass(frozen=True)
class PassSeconds:
    """Seconds of one recipe's passes: medians over repetitions, each as long as its slowest rank takes. The silent ones
    are those whose collectives took no time, None where they were not asked for."""

    prefill: float
    decode: float
    silent_prefill: float | None = None
    silent_decode: float | None = None


def run(spec: Spec, ranks: Sequence[int]) -> dict[str, PassSeconds]:
    """Start these ranks of `spec.job.tp`, together, and return what each recipe's passes take.

    Raises RewriterError with the reason of a rank that failed, and after `TIMEOUT`. No rank outlives this.
    """
    results = _results(spec, ranks)
    return {variant.recipe: _together([passes[variant.recipe] for passes in results]) for variant in spec.variants}


def calibrate(spec: Spec) -> tuple[str, float]:
    """The YAML of a fabric that all ranks of `spec.job.tp` measure, and for which share of the time something
    else had their cores (see `calibration.calibrated`). Raises RewriterError as `run` does."""
    result = _results(spec, range(spec.job.tp))[0]
    return result["fabric"], result["taken"]


def slowest(ranks: Sequence[PassSeconds]) -> PassSeconds:
    """Seconds of ranks that ran in turn: a pass takes as long as the slowest."""
    every = [asdict(seconds) for seconds in ranks]
    return PassSeconds(
        **{name: max(one[name] for one in every) for name, value in every[0].items() if value is not None}
    )


def _together(ranks: Sequence[Mapping[str, Sequence[float]]]) -> PassSeconds:
    """Seconds of ranks that ran at once: in each repetition, those of the slowest."""
    return PassSeconds(
        **{
            name.replace(" ", "_"): median(map(max, zip(*(passes[name] for passes in ranks), strict=True)))
            for name in ranks[0]
        }
    )


def _results(spec: Spec, ranks: Sequence[int]) -> list[dict[str, Any]]:
    return run_ranks([sys.executable, "-m", "rewriter.predict.rank_worker"], asdict(spec), ranks, timeout=TIMEOUT)


def classes(program: Program) -> tuple[int, ...]:
    """One rank of each kind. Tensor-parallel ranks have equal shards; ranks that share tokens see other parts of a
    causal mask, by their place in the grid's rows and columns."""
    plan = sequence_plan(program)
    if plan is None:
        return (0,)
    _, rows, columns = plan.grid
    return tuple(place * program.mesh.get("tp", 1) for place in range(rows * columns))


def variant(program: Program, recipe: str, directory: Path, ranks: Sequence[int]) -> Variant:
    """Write a program's module, and from its checkpoint, if it has one, the shards of these tensor-parallel ranks."""
    directory.mkdir(parents=True)
    module = directory / "module.py"
    module.write_text(emit_runtime_module(program), encoding="utf-8")
    weights: dict[str, str] = {}
    if program.source.path is not None:
        plans = [
            ShardPlan(
                directory / f"rank-{rank}.safetensors",
                {name: (spec.on_rank(rank), None) for name, spec in program.parameters.items()},
                {"format": "pt"},
            )
            for rank in ranks
        ]
        convert_files(Checkpoint.open(Path(program.source.path)), [], plans)
        weights = {str(rank): str(plan.path) for rank, plan in zip(ranks, plans, strict=True)}
    plan = sequence_plan(program)
    dtype = str(model_dtype(program)).removeprefix("torch.")
    grid = None if plan is None else plan.grid
    return Variant(recipe, str(module), weights, dtype, program.mesh.get("tp", 1), grid)


def spec(
    variants: Sequence[Variant], job: Workload, where: str, cluster: Cluster | None, cores: Sequence[int],
    wire: bool = False,
) -> Spec:  # fmt: skip
    values = None
    if cluster is not None:
        values = {
            "world_size": job.tp, "fabric": cluster.fabric, "what_if": list(cluster.what_if),
            "graphed": job.graphed and where == "cuda", "mode": "wire" if wire else "delay",
            **({} if cluster.library is None else {"library": cluster.library}),
        }  # fmt: skip
    return Spec(
        tuple(variants), job, where, store="", emulation=values, silent=False, cores=tuple(cores),
        repetitions=REPETITIONS,
    )  # fmt: skip


def emulated(asked: Spec, rank: int) -> dict[str, PassSeconds]:
    """Measurements of this rank, all others emulated; in wire mode by an environment process, which lasts as long."""
    assert asked.emulation is not None
    values = {**asked.emulation, "real": [rank]}
    if values["mode"] == "delay":
        return run(replace(asked, emulation=values), [rank])
    from rewriter.emulation import EmulationConfig
    from rewriter.emulation.launcher import with_environment

    with Processes() as job:
        config = with_environment(job, EmulationConfig.of(**values))
        return run(replace(asked, emulation={**values, "environment": config.environment}), [rank])


def measure(
    programs: Sequence[tuple[str, Program]],
    predicted: RecipeComparison,
    job: Workload,
    cluster: Cluster,
    wire: bool = False,
) -> RecipeComparison:
    """`predicted` with passes as a real rank measures them, for recipes by name and their programs. `wire`: on the CPU,
    and its collectives are messages to an environment process.

    Where ranks are of several classes, one of each runs, in turn, and the slowest counts. Raises RewriterError where
    memory lacks, and with the reason of a rank that fails.
    """
    where = "cuda" if torch.cuda.is_available() and not wire else "cpu"
    by_name = dict(programs)
    measured: dict[str, PassSeconds] = {}
    for p in predicted.predictions:
        program = by_name[p.recipe]
        require_memory(p, where)
        with scratch_folder("predict") as scratch:
            ranks = classes(program)
            shards = sorted({rank % program.mesh.get("tp", 1) for rank in ranks})
            made = variant(program, p.recipe, scratch / "rank", shards)
            asked = replace(spec([made], job, where, cluster, cores(1, where), wire), silent=True)
            measured[p.recipe] = slowest([emulated(asked, rank)[p.recipe] for rank in ranks])
    return with_measured(predicted, measured, where, wire)


def with_measured(
    predicted: RecipeComparison, measured: Mapping[str, PassSeconds], where: str, wire: bool = False
) -> RecipeComparison:
    """The comparison with these seconds of each recipe's passes, the silent ones among them."""
    gives = "sets the pace of messages over TCP" if wire else "gives delays only"
    predictions: list[Prediction] = []
    for p in predicted.predictions:
        passes = measured[p.recipe]
        assert passes.silent_prefill is not None
        assert passes.silent_decode is not None
        prefill = _phase(p.prefill, passes.prefill, passes.silent_prefill)
        decode = _phase(p.decode, passes.decode, passes.silent_decode)
        first = predictions[0] if predictions else None
        tokens = p.batch * p.generate / generation_seconds(prefill, decode, p.generate)
        note = (
            f"Passes are those of one real rank on this machine's {where}; {p.fabric} {gives}. Computing is "
            "a pass whose collectives take no time; the rest is waiting."
        )
        predictions.append(
            replace(
                p, prefill=prefill, decode=decode, tokens_per_second=tokens,
                decode_speedup=first.decode.seconds / decode.seconds if first else 1.0,
                prefill_speedup=first.prefill.seconds / prefill.seconds if first else 1.0,
                end_to_end=tokens / first.tokens_per_second if first else 1.0, break_even_seconds=None,
                break_even_note="not measured", break_even_prefill_seconds=None,
                seconds_per_token_interval=None, prefill_interval=None, end_to_end_interval=None,
                break_even_prefill_note="not measured", time_to_first_token=(),
                notes=(*p.notes, note), graphed=p.graphed and where == "cuda",
            )
        )  # fmt: skip
    return replace(predicted, predictions=tuple(predictions), pareto={})


def _phase(phase: Phase, seconds: float, silent: float) -> Phase:
    computing = min(seconds, silent)
    return replace(
        phase, seconds=seconds, compute_seconds=computing, exposed_seconds=seconds - computing, host_seconds=0.0,
        exposed_by_layer={}, spans=(),
    )  # fmt: skip


def cores(ranks: int, where: str) -> tuple[int, ...]:
    """A separate core for each rank that computes on the CPU, where this process may use enough; else none."""
    if where != "cpu" or not hasattr(os, "sched_getaffinity"):
        return ()
    usable = sorted(os.sched_getaffinity(0))
    return tuple(usable[:ranks]) if len(usable) >= ranks else ()


def require_memory(p: Prediction, where: str) -> None:
    needed, free = p.memory_bytes_per_rank, free_memory(where)
    if free is not None and needed > free:
        raise RewriterError(
            f"--measure: a rank of {p.recipe} needs {size(needed)}, but this machine's {where} has {size(free)} free. "
            "Use more ranks, or predict without running one"
        )


def free_memory(where: str) -> int | None:
    """Bytes; None where the system does not say."""
    if where == "cuda":
        return torch.cuda.mem_get_info()[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
