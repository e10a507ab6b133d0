"""A full disk, and one that fails, from a random system call of convert, adapt and predict on; then it works again."""

from __future__ import annotations

import errno
from pathlib import Path

from soak import shim
from soak.cases import Kind, Outcome, generator
from soak.jobs import commands, differing, fault_of_words, prepare

FAULTS = 3  # of a case
STRIKES = ((errno.ENOSPC, shim.FOREVER), (errno.EIO, 1), (errno.EIO, shim.FOREVER))


def case(index: int, place: Path) -> Outcome:
    """A command meets a fault, says so or gets around it, and then comes to the files of an undisturbed run."""
    draw, outcome = generator("disks", index), Outcome()
    known = commands(place)
    command = known[index % len(known)]
    for _ in range(FAULTS):
        command.clear()
        error, times = draw.choice(STRIKES)
        first = draw.randint(1, command.calls)
        about = f"{command.name}, {errno.errorcode[error]} at call {first} of {command.calls}"
        code = command.run(resume=False, strike=(first, times, error))
        outcome.counts[f"{errno.errorcode[error]}: {command.name}"] += 1
        if code < 0:
            outcome.failures.append(f"{about}: ended by signal {-code}")
        elif code and (wrong := fault_of_words(command.message())):
            outcome.failures.append(f"{about}: {wrong}")
        elif code and command.out.exists() and command.left() != command.expected:
            outcome.failures.append(f"{about}: half an output is left: {differing(command.left(), command.expected)}")
        if code and not command.out.exists():
            code = command.run(resume=bool(command.left()))
            if code:
                outcome.failures.append(f"{about}: after it, exit code {code}: {command.message()[-600:]}")
        if not code and (found := command.left()) != command.expected:
            outcome.failures.append(f"{about}: not as undisturbed: {differing(found, command.expected)}")
    command.clear()
    return outcome


KIND = Kind("disks", share=0.12, limit=400, prepare=prepare, run=case, needs=shim.missing, beside="kills")
