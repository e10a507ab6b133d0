"""Ranks that are killed, paused and slowed in generate, adapt and the verification of a conversion, and the
command itself killed or ended.

Every run ends in bounded time, with one message where it fails, and leaves no process, and no
temporary folder unless the command was killed.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import adapted
from job_processes import descendants, is_gone, until
from repository import ROOT

from rewriter.api import convert
from rewriter.common.processes import environment
from rewriter.convert.save_options import SaveOptions
from soak.cases import Kind, Outcome, generator
from soak.jobs import adapt_words, fault_of_words, write_texts

# Seconds from a fault, or its end, to the end of the command: 30 of a rank's grace, and more.
BOUND = 90.0
START = 120.0
MOMENT = 6.0  # the latest, after the first rank
GONE = 10.0  # in which processes and folders go, after the command's end
COMMAND = (sys.executable, "-m", "rewriter.cli")
FAULTS = ("killed", "paused", "slowed", "command killed", "command ended")
FIRST = {
    "killed": signal.SIGKILL, "paused": signal.SIGSTOP,
    "command killed": signal.SIGKILL, "command ended": signal.SIGTERM,
}  # fmt: skip
ENDED = "error: ended by SIGTERM.\n"
PAUSE = 2.0
SLICE = 0.05  # a slowed rank stands still every other slice


def prepare(place: Path) -> None:
    adapted.write_source(place / "m")
    convert(place / "m", "ladder", out=place / "out", tp=2, options=SaveOptions(verify="none"))
    write_texts(place)


def words(place: Path, what: str) -> list[str]:
    if what == "generate":
        return ["generate", str(place / "out"), "--prompt", "def return if", "--max-new-tokens", "30"]
    if what == "convert":
        return [str(place / "m"), "--recipe", "ladder", "--tp", "2", "--out", str(place / "case/out")]
    return [*adapt_words(place, "out"), "--tp", "2", "--out", str(place / "case/out")]


def case(index: int, place: Path) -> Outcome:
    """One command, one fault of it or of one rank at a random moment."""
    draw = generator("ranks", index)
    what, fault = ("generate", "adapt", "convert")[index % 3], FAULTS[index // 3 % len(FAULTS)]
    shutil.rmtree(place / "case", ignore_errors=True)
    (place / "case/tmp").mkdir(parents=True)
    with started(place, words(place, what)) as job:
        wrong, struck = ended(job, draw, fault, place)
    name = f"{fault}: {what}"
    return Outcome(Counter({name if struck else f"ended before it was {name}": 1}), [f"{name}: {w}" for w in wrong])


@contextlib.contextmanager
def started(place: Path, arguments: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """`rewrite ARGUMENTS` in a session of its own, with a temporary directory of its own; nothing of it stays."""
    with (place / "case/messages").open("wb") as messages:
        job = subprocess.Popen(
            [*COMMAND, *arguments], cwd=ROOT, start_new_session=True,
            env=environment(2, TMPDIR=str(place / "case/tmp")), stdout=subprocess.DEVNULL, stderr=messages,
        )  # fmt: skip
        try:
            yield job
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
            job.wait()


def ended(job: subprocess.Popen[bytes], draw: random.Random, fault: str, place: Path) -> tuple[list[str], bool]:
    """What is wrong with how a job ended that has `fault`, or one rank of it, and whether it met it in time."""
    until(lambda: job.poll() is not None or bool(ranks_of(job)), START)
    time.sleep(draw.uniform(0, MOMENT))
    family = [*descendants(job.pid), *ranks_of(job)]
    ranks = ranks_of(job)
    if job.poll() is None and not ranks:
        return [f"no rank was seen in {START:g} s"], False
    struck = job.poll() is None and strike(job.pid if "command" in fault else draw.choice(ranks), fault, job)
    wrong = []
    if not until(lambda: job.poll() is not None, BOUND):
        return [f"it did not end in {BOUND:g} s"], struck
    said = (place / "case/messages").read_text(errors="replace")
    if job.returncode and not (struck and fault == "command killed"):  # which has no time to say anything
        if problem := fault_of_words(said):
            wrong.append(problem)
        elif fault in ("paused", "slowed") or not struck:
            wrong.append(f"exit code {job.returncode}: {said[-1500:]}")
        elif fault == "command ended" and (job.returncode != 143 or not said.endswith(ENDED)):
            wrong.append(f"exit code {job.returncode} after SIGTERM, not 143: {said[-1500:]}")
    if alive := [pid for pid in family if not until(lambda pid=pid: is_gone(pid), GONE)]:
        wrong.append(f"{len(alive)} processes are left")
    if not (struck and fault == "command killed") and any((place / "case/tmp").glob("rewriter-*")):
        wrong.append(f"left in the temporary directory: {sorted(p.name for p in (place / 'case/tmp').iterdir())}")
    return wrong, struck


def ranks_of(job: subprocess.Popen[bytes]) -> list[int]:
    """The processes of a job that were started as its ranks."""
    return [pid for pid in descendants(job.pid) if _is_rank(pid)]


def _is_rank(pid: int) -> bool:
    try:
        return b"REWRITER_REPORT=" in Path(f"/proc/{pid}/environ").read_bytes() and not is_gone(pid)
    except OSError:
        return False


def strike(pid: int, fault: str, job: subprocess.Popen[bytes]) -> bool:
    """Let `fault` happen to a process of the job; whether it was there to meet it."""
    try:
        if fault == "slowed":
            while job.poll() is None and not is_gone(pid):
                for number in (signal.SIGSTOP, signal.SIGCONT):
                    os.kill(pid, number)
                    time.sleep(SLICE)
        else:
            os.kill(pid, FIRST[fault])
            if fault == "paused":
                time.sleep(PAUSE)
                os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        return fault == "slowed"
    return True


KIND = Kind(
    "ranks", share=0.16, limit=START + 2 * BOUND + 60, prepare=prepare, run=case,
    needs=lambda: "" if sys.platform == "linux" else "it asks /proc",
)  # fmt: skip
