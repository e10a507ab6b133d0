"""Runs recipes on this machine: on real ranks, and on one real rank whose peers are emulated.

On CPUs the delays of the emulated world are calibrated here, on collectives alone, never on the passes that are
compared; on GPUs they are the named fabric's. Launches of both kinds take turns, so that a machine that slows down
slows both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from rewriter.common.errors import RewriterError
from rewriter.common.files import scratch_folder
from rewriter.common.numbers import size
from rewriter.ir import Program
from rewriter.ir.communication import collectives
from rewriter.passes.placement.rank_memory import memory
from rewriter.predict import measurement
from rewriter.predict.measurement import PassSeconds, cores, spec
from rewriter.predict.validation import PASSES, Row, Validation
from rewriter.predict.workload import Cluster, Workload


def how_real(job: Workload, bytes_per_rank: int) -> tuple[str, str]:
    """(device, words) for running all ranks of a job on this machine. Raises RewriterError that says why not."""
    if job.tp < 2:
        raise RewriterError("on 1 rank nothing is communicated. Take --tp 2 or more")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus >= job.tp:
        return "cuda", f"{job.tp} GPUs, NCCL"
    has = f"this machine has {gpus} GPU{'s' * (gpus != 1)}" if gpus else "it has no GPU"
    if not cores(job.tp, "cpu"):
        raise RewriterError(
            f"{job.tp} real ranks need a GPU or a CPU core each; {has}, and fewer cores for this "
            "process. Use fewer ranks, or a larger machine"
        )
    free = measurement.free_memory("cpu")
    if free is not None and job.tp * bytes_per_rank > free:
        raise RewriterError(
            f"{job.tp} ranks need {size(job.tp * bytes_per_rank)}, and {size(free)} are free. Use a smaller model"
        )
    return "cpu", f"{job.tp} ranks on a CPU core each, gloo"


def validate(programs: Sequence[tuple[str, Program]], job: Workload, named: Cluster, launches: int) -> Validation:
    """Run every recipe's program on `job.tp` real ranks, and on one with emulated peers, in turns.

    On GPUs the peers have the delays of the fabric `named`; on CPUs those that real ranks measure first. Where
    this machine cannot run all ranks, the result says why. Raises RewriterError with the reason of a rank that fails.
    """
    try:
        where, words = how_real(job, max(memory(program).parameters_per_rank for _, program in programs))
    except RewriterError as error:
        return Validation("", named.fabric, (), str(error))
    real: dict[str, list[PassSeconds]] = {recipe: [] for recipe, _ in programs}
    predicted: dict[str, list[PassSeconds]] = {recipe: [] for recipe, _ in programs}
    with scratch_folder("validate") as scratch:
        delays, busy = (named, None) if where == "cuda" else _calibrated(programs, job, scratch)
        variants = [
            measurement.variant(program, recipe, scratch / str(index), range(program.mesh.get("tp", 1)))
            for index, (recipe, program) in enumerate(programs)
        ]
        ranks = {recipe: measurement.classes(program) for recipe, program in programs}
        for launch in range(launches):
            # The order turns, so that no recipe is always the first after a start.
            turned = variants[launch % len(variants) :] + variants[: launch % len(variants)]
            asked = spec(turned, job, where, None, cores(job.tp, where))
            for recipe, passes in measurement.run(asked, range(job.tp)).items():
                real[recipe].append(passes)
            asked = spec(turned, job, where, delays, cores(1, where))
            every = sorted(set().union(*ranks.values()))
            by_rank = {rank: measurement.emulated(asked, rank) for rank in every}
            for recipe, seconds in predicted.items():
                seconds.append(measurement.slowest([by_rank[rank][recipe] for rank in ranks[recipe]]))
    rows = tuple(
        Row(recipe, kind, *(tuple(getattr(one, kind) for one in side[recipe]) for side in (predicted, real)))
        for recipe, _ in programs
        for kind in PASSES
    )
    fabric = named.fabric if where == "cuda" else "a fabric calibrated on this machine"
    return Validation(words, fabric, rows, busy=busy)


def _calibrated(programs: Sequence[tuple[str, Program]], job: Workload, directory: Path) -> tuple[Cluster, float]:
    """A fabric of this machine's CPU, of messages as large as the job's, and how busy it is (`Validation.busy`)."""
    per_token = max((c.bytes_per_token for _, program in programs for c in collectives(program)), default=0)
    largest = 1 << max(12, min(26, (job.batch * job.prompt * per_token - 1).bit_length()))
    messages = any(program.mesh.get("sp", 1) > 1 for _, program in programs)  # ranks that share tokens send some
    asked = replace(spec((), job, "cpu", None, cores(job.tp, "cpu")), largest=largest, messages=messages)
    file = directory / "this-machine.yaml"
    text, busy = measurement.calibrate(asked)
    file.write_text(text, encoding="utf-8")
    return Cluster(str(file)), busy
