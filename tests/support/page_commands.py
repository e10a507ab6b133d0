"""Runs the commands and the Python of a page in an empty folder, with the substitutes of `page_substitutes`.

    run = PageRun(page, folder)
    run.all()                       # raises PageError with the line of the page that failed
    run.said["rewrite generate …"]  # what each command wrote to stdout, by its text on the page

`rewrite` runs in a process forked from one that has imported torch; other programs are stood in for by methods.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
import tomllib
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import page_blocks
from page_blocks import Block, Command
from page_substitutes import NAMES, NOT_RUN, PREPARED, SMALLER, Names, NotRun
from ranks import _context, run_ranks
from repository import ROOT
from subprocesses import load_module

from rewriter.cli.app import COMMANDS

PORT = r"(?<=:)(?:8|29)\d{3}\b|^8\d{3}$"
LIMIT = 400.0  # seconds of a command
SETTINGS = {"COLUMNS": "100", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "HF_DATASETS_OFFLINE": "1"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


class PageError(AssertionError):
    """A command or a block of a page failed."""


def not_run(page: str, text: str) -> NotRun | None:
    """The entry for a command or a block, if it does not run."""
    return next((entry for entry in NOT_RUN if entry.page == page and re.search(entry.pattern, text)), None)


def smaller(line: str) -> str:
    """A command line at the sizes of here."""
    for entry in SMALLER:
        if re.search(entry.where, line):
            line = re.sub(entry.pattern, entry.text, line)
    return line


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def _listening(port: int) -> str:
    """Wait until somebody listens on `port`."""
    for _ in range(600):
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            return ""
        time.sleep(0.1)
    raise PageError(f"nobody listens on port {port} after a minute")


@dataclass
class PageRun:
    """One run of a page in `place`. `ports`: those of the page, and the free ones that stand in for them."""

    page: Path
    place: Path
    said: dict[str, str] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)
    beside: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return page_blocks.name_of(self.page)

    def all(self) -> None:
        """Run every block of the page, in order."""
        blocks = page_blocks.blocks(self.page)
        self._prepare(blocks)
        try:
            for block in blocks:
                self._block(block)
        finally:
            for process in self.beside:
                process.terminate()
                process.wait(60)

    def _prepare(self, blocks: Sequence[Block]) -> None:
        shutil.copytree(ROOT / "examples/evaluation", self.place / "examples/evaluation")
        text = "\n".join(block.text for block in blocks)
        for name, maker in (PREPARED[""] | PREPARED.get(self.name, {})).items():
            used = re.search(rf"(?<![\w./-]){re.escape(name)}(?![\w-])", text)
            if used and text.endswith("--out ", 0, used.start()):
                continue  # the page writes it
            if used or name == "examples/tiny-llama":
                (self.place / name).parent.mkdir(parents=True, exist_ok=True)
                maker(self.place / name)

    def _block(self, block: Block) -> None:
        try:
            if not_run(block.page, block.text):
                return
            named = re.match(r"# ([\w.]+\.py)\n|name: (\w+)\n", block.text)
            file = block.title or (named[1] or f"{named[2]}.yaml" if named else "")
            if file and block.language in ("python", "yaml", "toml"):
                (self.place / file).write_text(block.text, encoding="utf-8")
            elif block.language == "python":
                self._code(block)
            elif block.language == "bash":
                for line in page_blocks.lines(block.text):
                    self.line(line)
        except Exception as error:
            raise PageError(f"{block.page}:{block.line}: {error}") from error

    def _code(self, block: Block) -> None:
        found = [n for n in NAMES if n.page == block.page and n.within in block.text]
        names = found[0] if found else Names(block.page, "", "")
        text = block.text
        for old, new in names.replaced:
            if old not in text:
                raise PageError(f"tests/support/page_substitutes.py: {old} is not in the block of {names.within}")
            text = text.replace(old, new)
        code = f"{names.code}\n{text}"
        if names.ranks > 1:
            run_ranks(_on_rank, names.ranks, code, str(self.place), timeout=LIMIT)
        else:
            self._forked(_execute, code)

    # --- commands

    def line(self, line: str) -> None:
        """Run one line of a shell. A command that writes `--out NAME` again replaces what an earlier one wrote."""
        for command in page_blocks.commands(line):
            if not_run(self.name, shlex.join(command.words)):
                continue
            [small] = page_blocks.commands(smaller(shlex.join(command.words)))
            words = [re.sub(PORT, lambda m: str(self._port(m[0])), word) for word in small.words]
            self._clear(words)
            program = getattr(self, f"_{words[0]}", None)
            if program is None:
                raise PageError(f"{line}: no stand-in for {words[0]} in tests/support/page_commands.py")
            with self._set(dict(command.variables)):
                said = program(words, command)
            self.said[command.text] = said
            if command.output:
                (self.place / command.output).write_text(said, encoding="utf-8")

    def _clear(self, words: Sequence[str]) -> None:
        """Remove what an earlier command of the page wrote to the place that this one writes to."""
        if "--out" in words:
            name = words[list(words).index("--out") + 1]
            if f"--out {name}" not in " ".join(self.said):
                return
        elif words[0] == "rewrite" and "--recipe" in words and words[1] not in COMMANDS:
            name = f"{words[1]}-*-tp*"
        else:
            return
        for written in self.place.glob(name):
            shutil.rmtree(written) if written.is_dir() else written.unlink()

    def _port(self, named: str) -> int:
        return self.ports.setdefault(named, free_port())

    def _rewrite(self, words: list[str], command: Command) -> str:
        if words[1] == "serve":
            return self._serve(words)
        return self._forked(_rewrite_main, words[1:])

    def _serve(self, words: list[str]) -> str:
        """The engine's command. The server of transformers is not started if its packages are not installed."""
        split = words.index("--") if "--" in words else len(words)
        dry = words if "--dry-run" in words else [*words[:split], "--dry-run", *words[split:]]
        transformers = "transformers" in words[:split]
        refused = "" if not transformers or find_spec("uvicorn") else "pip install 'rewriter[serve]'"
        return self._forked(_rewrite_main, dry[1:], refused, stand_in=None if transformers else "vllm")

    def _python(self, words: list[str], command: Command) -> str:
        if words[1].startswith("examples/"):
            return self._example(words)
        return self._script(words[1:])

    def _script(self, words: list[str]) -> str:
        run: Any = dict(cwd=self.place, env=self._environment() | {"PYTHONPATH": str(ROOT)}, text=True)
        if "--serve" in words:  # the next command needs it
            self.beside.append(subprocess.Popen([sys.executable, *words], **run))
            return _listening(int(words[words.index("--serve") + 1].rpartition(":")[2]))
        done = subprocess.run([sys.executable, *words], capture_output=True, timeout=LIMIT, **run)
        return _checked(shlex.join(words), done.returncode, done.stdout, done.stderr)

    def _example(self, words: list[str]) -> str:
        """`python examples/real_models.py NAME DIR` downloads; a small model is at DIR instead."""
        known = load_module("real_models", ROOT / "examples/real_models.py").MODELS
        if words[1:2] != ["examples/real_models.py"] or words[2] not in known:
            raise PageError(f"{words}: expected examples/real_models.py and one of {', '.join(known)}")
        if not (self.place / words[3]).exists():
            raise PageError(f"{words}: tests/support/page_substitutes.py has no model for {words[3]}")
        return ""

    def _make(self, words: list[str], command: Command) -> str:
        done = subprocess.run(["make", "-n", "-C", str(ROOT), *words[1:]], capture_output=True, text=True, timeout=60)
        return _checked(shlex.join(words), done.returncode, "", done.stderr)

    def _pip(self, words: list[str], command: Command) -> str:
        if words[1] != "install":
            raise PageError(f"{command.text}: only `pip install` is known")
        extras = PROJECT["optional-dependencies"]
        for word in (word for word in words[2:] if re.match(r"\.|rewriter\b", word)):
            for name in re.findall(r"[\w-]+", (re.findall(r"\[([\w,-]+)\]", word) or [""])[0]):
                if name not in extras:
                    raise PageError(f"{command.text}: there is no extra {name} in pyproject.toml")
        return ""

    def _source(self, words: list[str], command: Command) -> str:
        if words[1:] != [".venv/bin/activate"]:
            raise PageError(f"{command.text}: expected .venv/bin/activate")
        return ""

    def _cd(self, words: list[str], command: Command) -> str:
        return ""

    def _torchrun(self, words: list[str], command: Command) -> str:
        """One process per node, all of them here."""
        nodes = int(words[words.index("--nnodes") + 1]) if "--nnodes" in words else 1
        launcher = [sys.executable, "-m", "torch.distributed.run", *words[1:]]
        environment = self._environment() | {"PYTHONPATH": str(ROOT)}
        pipes: Any = dict(cwd=self.place, env=environment, text=True)
        logs = [self.place / f".node{node}.log" for node in range(nodes)]
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(log.open("w")) for log in logs]
            started = [subprocess.Popen(launcher, stdout=f, stderr=subprocess.STDOUT, **pipes) for f in files]
            try:
                codes = [process.wait(LIMIT) for process in started]
            finally:
                for process in started:
                    process.terminate()
        said = "".join(log.read_text() for log in logs)
        return _checked(shlex.join(words), max(codes), said, said)

    def _lm_eval(self, words: list[str], command: Command) -> str:
        environment = {"HF_DATASETS_CACHE": str(self.place / ".cache")}
        with self._set(environment):
            return self._script(["-m", "lm_eval", *words[1:]])

    def _vllm(self, words: list[str], command: Command) -> str:
        """In the environment of vLLM alone (tests/serving/test_served_pages.py)."""
        return ""

    def _curl(self, words: list[str], command: Command) -> str:
        """In the environment of vLLM alone; here its body must be JSON."""
        for flag, body in pairwise(words):
            if flag == "-d":
                json.loads(body)
        return ""

    # --- processes

    def _environment(self) -> dict[str, str]:
        return os.environ | SETTINGS | {"XDG_CACHE_HOME": str(self.place / ".cache")}

    @contextlib.contextmanager
    def _set(self, variables: dict[str, str]) -> Iterator[None]:
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name, None) if value is None else os.environ.update({name: value})

    def _forked(self, function: Any, given: Any, refused: str = "", stand_in: str | None = None) -> str:
        """`function(given)` in a process of its own; its stdout. With `refused` it must fail with this message, and
        `stand_in` is a program on its path that does nothing."""
        environment = self._environment()
        if stand_in:
            program = self.place / ".bin" / stand_in
            program.parent.mkdir(exist_ok=True)
            program.write_text("#!/bin/sh\n", encoding="utf-8")
            program.chmod(0o755)
            environment["PATH"] = f"{program.parent}{os.pathsep}{environment['PATH']}"
        out, err = self.place / ".stdout", self.place / ".stderr"
        process = _context.Process(
            target=_child, args=(function, given, str(self.place), environment, str(out), str(err))
        )
        process.start()
        process.join(LIMIT)
        if process.is_alive():
            process.terminate()
            process.join()
            raise PageError(f"{given}: not done after {LIMIT} s")
        said = out.read_text(encoding="utf-8", errors="replace")
        complaint = err.read_text(encoding="utf-8", errors="replace")
        if refused:
            if process.exitcode == 2 and refused in complaint:
                return ""
            raise PageError(f"{given}: expected to be refused with {refused}: {process.exitcode}, {complaint[-2000:]}")
        return _checked(str(given), process.exitcode or 0, said, complaint)


def _checked(what: str, code: int, said: str, complaint: str) -> str:
    if code:
        raise PageError(f"{what} ended with {code}:\n{complaint[-3000:]}")
    return said


def _child(function: Any, given: Any, place: str, environment: dict[str, str], out: str, err: str) -> None:
    """Run `function(given)` in `place`, its stdout and stderr in files, and end with its exit code."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(place)
    sys.path.insert(0, place)
    for file, number in ((out, 1), (err, 2)):
        opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(opened, number)
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(os.fdopen(n, "wb", 0, closefd=False), write_through=True) for n in (1, 2)
    )
    try:
        code = function(given)
    except BaseException:
        traceback.print_exc()
        code = 1
    os._exit(code or 0)


def _rewrite_main(words: list[str]) -> int:
    from rewriter.cli import main

    sys.argv = ["rewrite", *words]
    return main(words)


def _execute(code: str) -> int:
    exec(compile(code, "page", "exec"), {"__name__": "page"})
    return 0


def _on_rank(group: Any, code: str, place: str) -> None:
    os.chdir(place)
    _execute(code)
