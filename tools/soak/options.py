"""Commands with options that nobody would mean: each runs, or is refused in one line that does not blame rewriter."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import typer
import zoo
from refusals import listing
from tiny_tokenizer import add_tokenizer

from rewriter.cli import main
from rewriter.cli.app import commands, conversion
from rewriter.convert.conversion import convert
from rewriter.convert.save_options import SaveOptions
from soak.cases import Kind, Outcome, generator
from soak.inputs import wrong_words

COMMANDS: dict[str, tuple[str, ...]] = {
    "convert": ("m", "--recipe", "ladder", "--tp", "2", "--out", "new", "--dry-run"),
    "inspect": ("inspect", "m", "--recipe", "ladder", "--tp", "2"),
    "predict": ("predict", "m", "--recipe", "ladder", "--tp", "2", "--fabric", "pcie-gen4"),
    "generate": ("generate", "out", "--prompt", "x", "--max-new-tokens", "2"),
    "adapt": ("adapt", "out", "--out", "new", "--data", "data.jsonl", "--tokens", "64", "--verify", "none"),
    "verify": ("verify", "out"),
    "reshard": ("reshard", "copy", "--tp", "4", "--verify", "none"),
    "serve": ("serve", "out", "--engine", "transformers", "--dry-run"),
    "diff": ("diff", "out", "--source", "m"),
    "recipes": ("recipes", "show", "ladder"),
    "fabrics": ("fabrics", "show", "pcie-gen4"),
}
"""What runs as it is, by the command whose options are drawn."""
VALUES = (
    "", " ", "0", "-1", "1", "2", "3", "7", "1e3", "1.5", "nan", "inf", "-inf", "9" * 24, "-" + "9" * 24, "9" * 5000,
    "0x10", "²", "１", "1,2", "2,2", ",", "=", "a=b", "x.y=z", "ladder.layers=[1", "ladder.layers=99", "tp=2", "true",
    "null", "{}", "[]", "[" * 200, "\n", "\t", "💥", "\udcff", "$(x)", "%s", "{0}", "a" * 300, "self:1", "self:0", "1%",
    "m", "out", "new", "folder", "loop", "empty", "absent", "../..", "/", "/dev/null", "/dev/zero", "data.jsonl",
    "m/config.json", "ladder", "desync-2x", "tensor-parallel", "pcie-gen4", "bf16", "int8", "distill", "sft", "full",
)  # fmt: skip
GIVEN = ("m", "out")  # what no command may change
BATCH = 6
SLOW = 120.0  # seconds of a command, on a machine that does other things too
MEMORY = 24 << 30  # bytes of addresses: a command that asks for more is told so, and the machine stays as it is
LEFT_OUT = {"--help", "--measure", "--wire", "--validate", "--trust-remote-code"}


def options_of(name: str) -> list[click.Parameter]:
    """The options of a command, of its first subcommand's that COMMANDS names where it has such."""
    group = typer.main.get_command(commands)
    command = typer.main.get_command(conversion) if name == "convert" else group.commands[name]  # type: ignore[attr-defined]
    inner = getattr(command, "commands", {}).get(COMMANDS[name][1])
    return [p for p in (inner or command).params if p.param_type_name == "option" and not LEFT_OUT & {*p.opts}]


def drawn(draw: random.Random) -> tuple[str, list[str]]:
    """(a command's name, its words): one that runs, with up to three options more, or words that are exchanged."""
    name = draw.choice(list(COMMANDS))
    words = list(COMMANDS[name])
    known = options_of(name)
    for _ in range(draw.randint(1, 3)):
        kind = draw.random()
        if kind < 0.7 and known:
            option = draw.choice(known)
            flag = getattr(option, "is_flag", False)
            words += [draw.choice(option.opts), *([] if flag else [draw.choice(VALUES)])]
        elif kind < 0.9 and len(words) > 1:
            words[draw.randrange(1, len(words))] = draw.choice(VALUES)
        elif len(words) > 1:
            del words[draw.randrange(1, len(words))]
    return name, words


def prepare(place: Path) -> None:
    """A model, an output of it, and what stands where files belong."""
    zoo.save("llama", place / "m")
    add_tokenizer(place / "m")
    convert(place / "m", "ladder", out=place / "out", tp=2, options=SaveOptions(verify="none"))
    (place / "folder").mkdir()
    (place / "loop").symlink_to("loop")
    (place / "empty").touch()
    (place / "data.jsonl").write_text('{"text": "def f(x): return x"}\n' * 8, encoding="utf-8")


def case(index: int, place: Path) -> Outcome:
    """A few commands, one after another, in this process."""
    draw, outcome = generator("options", index), Outcome()
    os.chdir(place)
    os.environ |= {"XDG_CACHE_HOME": str(place / "cache"), "OMP_NUM_THREADS": "1"}
    os.environ.pop("REWRITER_DEBUG", None)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    kept = given(place)
    for number in range(BATCH):
        name, words = drawn(draw)
        shutil.rmtree("copy", ignore_errors=True)
        if "copy" in words:
            shutil.copytree("out", "copy")
        begun = time.monotonic()
        code, said = ran(words, place / f"said-{number}")
        wrong = judged(code, said, time.monotonic() - begun)
        if given(place) != kept:
            wrong = wrong or "it changed what it was given"
        outcome.counts[f"{name}: {'ran' if code == 0 else 'refused'}"] += 1
        if wrong:
            outcome.failures.append(f"{wrong:.3000}\nof rewrite {words!r:.2000}")
        for left in (*place.glob("new*"), *place.glob(".new*")):
            shutil.rmtree(left, ignore_errors=True)
    return outcome


def given(place: Path) -> list[object]:
    """What no command may change: the model, the output, and the devices that stand for files."""
    devices = [stat.S_IFMT(os.stat(path).st_mode) for path in ("/dev/null", "/dev/zero")]
    return [*(listing(place / folder) for folder in GIVEN), *devices]


def ran(words: Sequence[str], file: Path) -> tuple[object, str]:
    """(exit code, what stderr was told)."""
    with (
        open(file, "w") as told,
        open(os.devnull, "w") as nowhere,
        redirected(2, told.fileno()),
        redirected(1, nowhere.fileno()),
    ):
        try:
            code: object = main(list(words))
        except BaseException as error:
            code = f"{type(error).__name__}: {error}"
    text = file.read_text(encoding="utf-8", errors="replace")
    file.unlink()
    return code, text


@contextlib.contextmanager
def redirected(descriptor: int, to: int) -> Iterator[None]:
    """What is written to `descriptor`, by processes that are started too, goes to `to`."""
    kept = os.dup(descriptor)
    os.dup2(to, descriptor)
    try:
        yield
    finally:
        os.dup2(kept, descriptor)
        os.close(kept)


def judged(code: object, said: str, seconds: float) -> str:
    """What is wrong with how a command ended; "": nothing."""
    if code not in (0, 2, 3):
        return f"exit code {code}: {said[-2000:]}"
    if "Traceback" in said:
        return f"a traceback: {said[-2000:]}"
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    if code and len(errors) != 1:
        return f"{len(errors)} errors in place of one: {said[-2000:]}"
    if code and (words := wrong_words(errors[0])):
        return words
    return f"it took {seconds:.0f} s" if seconds > SLOW else ""


KIND = Kind("options", share=0.1, limit=BATCH * SLOW, prepare=prepare, run=case)
