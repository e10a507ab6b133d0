"""Commands whose system calls are struck: conversions, a training, a prediction; and how each has to end."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import adapted

from benchmarks.convert.kills import RESUMED, WAYS, Way, differing, ended
from rewriter.cli import main
from rewriter.convert.save_options import SaveOptions
from soak import shim

__all__ = ["RESUMED", "Command", "commands", "differing", "ended", "fault_of_words", "prepare"]

_ADAPT = (
    "--length", "48", "--verify", "none", "--method", "sft", "--too-long", "truncate", "--set", "max_steps=4",
    "--set", "save_steps=1", "--set", "learning_rate=1e-2", "--set", "warmup_steps=1", "--set", "use_cpu=true",
    "--set", "gradient_accumulation_steps=1", "--set", "per_device_train_batch_size=4",
)  # fmt: skip
_OPTIONS = {"tp": "--tp", "link": "--link", "materialize": "--materialize", "dtype": "--dtype"}


@dataclass
class Command(Way):
    """`rewrite WORDS` in a forked process. `strike`: what happens to its system calls, as arguments of `shim.arm`.

    `calls`: how many of them an undisturbed run makes. `number` tells runs apart that go to one place.
    """

    words: tuple[str, ...] = ()
    resumes: bool = True
    strike: tuple[int, ...] = (0,)
    calls: int = 0
    number: int = field(default=0)

    @property
    def messages(self) -> Path:
        return self.place.with_name(f"{self.place.name}.messages-{self.number}")

    def work(self, resume: bool) -> int:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        shim.arm(self.place, *self.strike)
        code = main([*self.words, *["--resume"] * (resume and self.resumes)])
        if self.strike == (0,):
            self.messages.with_suffix(".calls").write_text(str(shim.count()))
        return code

    def left(self) -> dict[str, str]:
        """Files and hashes, but of a training's log, and of what says when, only the names."""
        found = super().left()
        if self.name == "adapt":
            return {
                name: digest if name.endswith((".safetensors", "config.json")) else ""
                for name, digest in found.items()
                if not name.startswith("out/training/")
            }
        if not self.resumes:  # half a page, which no later run reads
            return {name: digest for name, digest in found.items() if not name.startswith(".")}
        return found

    def run(self, resume: bool, strike: tuple[int, ...] = (0,)) -> int:
        """The exit code of a run to its end."""
        self.strike = strike
        return ended(self.start(resume))


def commands(place: Path, known: bool = True) -> list[Command]:
    """Every command at its place below `place`, with what is known of it from `prepare`."""
    source = place / "m"
    found = []
    for name, options in WAYS.items():
        words = [str(source), "--recipe", "tensor-parallel", "--verify", "none"]
        for key, value in options.items():
            given = value if isinstance(value, list) else [value]
            words += [_OPTIONS[key], *([] if value is True else [",".join(map(str, given))])]
        found.append(_command(place, f"convert, {name}", [*words, "--out"]))
    found.append(_command(place, "adapt", [*adapt_words(place, "rewritten"), "--out"]))
    predict = ["predict", str(source), "--recipe", "ladder", "--tp", "2", "--generate", "8", "--html"]
    found.append(_command(place, "predict", predict, resumes=False))
    for command in found if known else ():
        facts = json.loads((place / "facts.json").read_text())[command.name]
        command.expected, command.calls = facts["expected"], facts["calls"]
    return found


def _command(place: Path, name: str, words: list[str], resumes: bool = True) -> Command:
    own = place / name.replace(", ", "-").replace(" ", "-")
    return Command(name, place / "m", own, [], SaveOptions(), words=(*words, str(own / "out")), resumes=resumes)


def adapt_words(place: Path, name: str) -> list[str]:
    """`adapt` of the directory `name` at a place that has texts (`write_texts`), but for --out."""
    data = ["--data", str(place / "text.jsonl"), "--eval", str(place / "eval.jsonl")]
    return ["adapt", str(place / name), *data, *_ADAPT]


def write_texts(place: Path) -> None:
    (place / "text.jsonl").write_bytes(adapted.text_file().read_bytes())
    (place / "eval.jsonl").write_bytes(adapted.text_file(20, 1).read_bytes())


def prepare(place: Path) -> None:
    """A model, data, and an undisturbed run of every command. Raises RuntimeError where two of those differ."""
    adapted.write_source(place / "m")
    write_texts(place)
    assert main([str(place / "m"), "--recipe", "ladder", "--verify", "none", "--out", str(place / "rewritten")]) == 0
    facts = {}
    for command in commands(place, known=False):
        command.place.mkdir()
        command.undisturbed()
        calls = int(command.messages.with_suffix(".calls").read_text())
        facts[command.name] = {"expected": command.expected, "calls": calls}
    (place / "facts.json").write_text(json.dumps(facts))


def fault_of_words(message: str) -> str:
    """What is wrong with what a failed command said: it has to be one error, told without a traceback."""
    errors = [line for line in message.splitlines() if line.startswith("error: ")]
    if "Traceback (most recent call last)" in message:
        return f"a traceback: {message[-1500:]}"
    if len(errors) != 1:
        return f"{len(errors)} errors in place of one: {message[-1500:]!r}"
    return f"a fault of rewriter: {errors[0]}" if "fault of rewriter" in errors[0] else ""
