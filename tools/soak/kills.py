"""SIGKILL at a random system call of convert, adapt and predict, resumed to the same files; and two runs at once."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from soak import shim
from soak.cases import Kind, Outcome, generator
from soak.jobs import RESUMED, Command, commands, differing, ended, fault_of_words, prepare

KILLS = 4  # of a case, before the command may come to its end
TWO_AT_ONCE = 0.15  # of the cases


def case(index: int, place: Path) -> Outcome:
    """A command that is killed several times, or two of them at one place."""
    draw, outcome = generator("kills", index), Outcome()
    known = commands(place)
    command = known[index % len(known)]
    command.clear()
    if draw.random() < TWO_AT_ONCE and command.resumes:
        two_at_once(command, outcome)
    else:
        killed(command, draw, outcome)
    return outcome


def killed(command: Command, draw: random.Random, outcome: Outcome) -> None:
    """Kill, resume, kill again; in the end the files are those of an undisturbed run."""
    for _ in range(KILLS):
        resume = bool(command.left()) and draw.random() < RESUMED
        code = command.run(resume, (draw.randint(1, command.calls),))
        if code < 0:
            outcome.counts[f"killed: {command.name}"] += 1
        else:
            end(command, code, outcome)
    end(command, command.run(resume=bool(command.left())), outcome)


def end(command: Command, code: int, outcome: Outcome) -> None:
    """A run has ended by itself: with all that is expected, or in words that say what to delete."""
    if code == 0:
        found = command.left()
        if found != command.expected:
            outcome.failures.append(f"{command.name}: not as undisturbed: {differing(found, command.expected)}")
        outcome.counts["came to the same files"] += 1
    else:
        message = command.message()
        if wrong := fault_of_words(message):
            outcome.failures.append(f"{command.name}, after a kill: {wrong}")
        elif "delete" not in message or str(command.place) not in message:
            outcome.failures.append(f"{command.name}, exit code {code}, says not what to delete: {message[-600:]}")
        outcome.counts["said what to delete"] += 1
    command.clear()


def two_at_once(command: Command, outcome: Outcome) -> None:
    """One of two runs comes to its end, and the other does too or is refused."""
    both = [command, replace(command, number=1)]
    for one in both:
        one.strike = (0,)
    codes = [ended(pid) for pid in [one.start(resume=False) for one in both]]
    refused = [one for one, code in zip(both, codes, strict=True) if code]
    if len(refused) == 2:
        outcome.failures.append(f"{command.name}: both of two runs were refused: {refused[0].message()[-600:]}")
    for one in refused:
        if wrong := fault_of_words(one.message()):
            outcome.failures.append(f"{command.name}, beside another run: {wrong}")
    if len(refused) < 2 and (found := command.left()) != command.expected:
        outcome.failures.append(f"{command.name}: two runs left {differing(found, command.expected)}")
    outcome.counts[f"two at once: {command.name}"] += 1


KIND = Kind("kills", share=0.12, limit=300, prepare=prepare, run=case, needs=shim.missing)
