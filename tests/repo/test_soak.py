"""The soak: a few cases of each kind, and the seeded fault that each has to find; its page is its tally's."""

from __future__ import annotations

import json
import os
import random
import stat
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import draws
import faults
import pytest
from job_processes import RANK, is_gone, until
from repository import ROOT
from soak import fuzz, inputs, options, programs, ranks, shim, tally
from soak.cases import Kind, Outcome, generator, in_process, run_case

from rewriter.common.errors import RewriterError
from rewriter.weights.header import read_header

needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="it asks /proc")

# Cases


def kind(run: Any, limit: float = 300.0) -> Kind:
    return Kind("test", share=1.0, limit=limit, prepare=lambda place: None, run=run)


def test_a_case_is_what_it_counts_and_finds(tmp_path: Path) -> None:
    def run(index: int, place: Path) -> Outcome:
        outcome = Outcome(failures=["a fault"])
        outcome.counts["seen"] += index
        return outcome

    assert run_case(kind(run), 3, tmp_path / "p") == Outcome(Counter(seen=3), ["a fault"])


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (lambda index, place: 1 / 0, "ZeroDivisionError"),
        (lambda index, place: os._exit(7), "ended with 7"),
        (lambda index, place: subprocess.run(["sleep", "600"]), "did not end in 0.5 s"),
    ],
    ids=["raises", "dies", "hangs"],
)
def test_a_case_that_raises_dies_or_hangs_is_a_failure(run: Any, said: str, tmp_path: Path) -> None:
    (failure,) = run_case(kind(run, 0.5 if "end in" in said else 300.0), 0, tmp_path / "p").failures
    assert said in failure


def test_nothing_of_a_case_outlives_it(tmp_path: Path) -> None:
    def run(index: int, place: Path) -> Outcome:
        (tmp_path / "pid").write_text(str(subprocess.Popen(["sleep", "600"]).pid))
        return Outcome()

    assert isinstance(in_process(lambda: run(0, tmp_path), tmp_path / "o", 20.0), Outcome)
    assert until(lambda: is_gone(int((tmp_path / "pid").read_text())))


# Inputs

fuzzes = pytest.mark.skipif(bool(fuzz.missing()), reason=fuzz.missing())


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("soak")
    inputs.prepare(root)
    return root


@fuzzes
@pytest.mark.parametrize("reader", inputs.READERS, ids=lambda reader: reader.name)
@pytest.mark.fast("headers")
def test_damaged_inputs_are_read_or_refused(reader: inputs.Reader, place: Path) -> None:
    few = replace(reader, batch=min(reader.batch, 40 if reader.name == "configs" else 150))
    outcome = inputs.batch(few, 1, place)
    assert outcome.failures == []
    assert sum(outcome.counts.values()) == few.batch
    assert min(outcome.counts[f"{reader.name}: read"], outcome.counts[f"{reader.name}: refused"]) > 0


@fuzzes
@pytest.mark.slow
def test_inputs_that_come_to_new_code_are_damaged_further_and_follow_from_the_seed(place: Path) -> None:
    few = replace(inputs.READERS[1], batch=400)  # headers are checked by safetensors, whose code is not watched
    counts, corpora = [], []
    for seed in (1, 1, 2):
        counts.append(inputs.batch(few, seed, place).counts)
        corpora.append({path.name for path in (place / "fuzz" / "corpus").iterdir()})
    assert counts[0] == counts[1]
    assert corpora[0] == corpora[1] != corpora[2]
    assert len(corpora[0]) > 2 * len(few.examples(place))


def read_carelessly(place: Path, file: Path) -> None:
    """A reader that believes in the first tensor's name."""
    header = read_header(file)
    header.tensors["w"]


def refuse_blaming_rewriter(place: Path, file: Path) -> None:
    raise RewriterError("KeyError: 'x'. This is a fault of rewriter.")


@fuzzes
@pytest.mark.parametrize(
    ("read", "said"), [(read_carelessly, "KeyError: 'w'"), (refuse_blaming_rewriter, "as a fault of rewriter")]
)
def test_a_careless_reader_is_found(read: Any, said: str, place: Path) -> None:
    outcome = inputs.batch(replace(inputs.READERS[0], read=read, batch=300), 1, place)
    assert any(said in failure for failure in outcome.failures)


def test_damage_is_drawn_from_the_case_alone(place: Path) -> None:
    for reader in inputs.READERS:
        example = reader.examples(place)[0]
        first, again, other = (reader.damage(generator("test", n), example) for n in (0, 0, 1))
        assert first == again != other


# Programs


@pytest.mark.parametrize("ranks", [3, 8])
@pytest.mark.slow
def test_random_programs_on_three_and_eight_ranks_take_the_step_of_the_reference(ranks: int, tmp_path: Path) -> None:
    assert programs.training_step(generator("test", 0), "llama", ranks, tmp_path) == {f"P={ranks}": 1}


def test_a_wrong_program_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shares of ranks are not taken where a sum over ranks is."""
    rewrite = draws.rewrite
    monkeypatch.setattr(draws, "rewrite", lambda *given: faults.shares_forgotten(rewrite(*given)))
    monkeypatch.setattr(
        draws,
        "mix",
        lambda *_: draws.Mix(2, (((0, 1), draws.LayerMode("desync")),), {0: (False, True), 1: (True, True)}),
    )
    for check in (programs.training_step, programs.logits):
        with pytest.raises(AssertionError):
            check(generator("test", 0), "llama", 2, tmp_path)


# Kills and disks. The library that strikes system calls is loaded when a process starts.

STRUCK = """
import json, random, sys
from dataclasses import replace
from pathlib import Path
from soak import disks, jobs, kills
from soak.cases import Outcome
from rewriter.convert.save_options import SaveOptions
from rewriter.emit.files.output_directory import OutputDirectory

class Writes(jobs.Command):
    lost = False
    raises = False

    def work(self, resume):
        from soak import shim
        shim.arm(self.place, *self.strike)
        try:
            with OutputDirectory(self.out, resume, {"job": 1}) as output:
                for name in ("a", "b", "c"):
                    if not output.complete and not (self.lost and resume and name == "b"):
                        output.write(name, name * 1000)
                if not output.complete:
                    output.manifest({"files": {}})
        except Exception as error:
            if self.raises:
                raise
            print(f"error: {error}. Or delete {self.place}.", file=sys.stderr, flush=True)
            return 1
        if self.strike == (0,):
            self.messages.with_suffix(".calls").write_text(str(shim.count()))
        return 0

root = Path(sys.argv[1])
found = {}
for lost, raises, modules in ((False, False, (kills, disks)), (True, False, (kills,)), (False, True, (disks,))):
    command = Writes("writes", root, root / "w", [], SaveOptions())
    command.place.mkdir(exist_ok=True)
    command.undisturbed()
    command.calls = int(command.messages.with_suffix(".calls").read_text())
    command.lost, command.raises = lost, raises
    jobs.commands = kills.commands = disks.commands = lambda place, command=command: [command]
    for module in modules:
        outcome = Outcome()
        for index in range(6):
            one = module.case(index, root)
            outcome.counts += one.counts
            outcome.failures += one.failures
        found[f"{module.__name__} {lost} {raises}"] = [sum(outcome.counts.values()), outcome.failures]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def struck(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("struck")
    settings = shim.variables(root)
    if settings is None:
        pytest.skip("no C compiler, or no LD_PRELOAD")
    settings["PYTHONPATH"] = os.pathsep.join(str(ROOT / name) for name in ("tools", "tests/support", "."))
    ran = subprocess.run(
        [sys.executable, "-c", STRUCK, str(root)],
        env=settings,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("module", ["soak.kills", "soak.disks"])
def test_what_is_struck_is_resumed_or_started_over_to_the_same_files(struck: dict[str, Any], module: str) -> None:
    count, failures = struck[f"{module} False False"]
    assert failures == []
    assert count >= 15


@pytest.mark.slow
def test_a_resumed_run_that_loses_a_file_is_found(struck: dict[str, Any]) -> None:
    failures = struck["soak.kills True False"][1]
    assert failures
    assert all("not as undisturbed: out/b" in failure for failure in failures)


@pytest.mark.slow
def test_a_failing_disk_that_ends_in_a_traceback_is_found(struck: dict[str, Any]) -> None:
    assert any("0 errors in place of one" in failure for failure in struck["soak.disks False True"][1])


# Ranks. A command stands in for `rewrite`: it starts two ranks as `rewrite` does, and one of its lines may be wrong.

STAND_IN = """
import os, subprocess, sys, tempfile, time
from rewriter.common import processes
{first}
try:
    with processes.leaving_on_signals(), processes.Processes() as job:
        for rank in range(2):
            job.start(f"rank {{rank}}", [sys.executable, "-c", {rank!r}], processes.environment())
        failure = job.wait()
except SystemExit:
    sys.stderr.write("error: ended by SIGTERM.\\n")
    raise
{last}
if failure is not None:
    sys.exit(f"error: {{failure.name}} {{failure.how}}")
"""
ORPHAN = "subprocess.Popen(['sleep', '600'])"
FOLDER = "tempfile.mkdtemp(prefix='rewriter-')"
HANGS = "time.sleep(600)"
CODE = "processes._leave = lambda *_: sys.exit(1)"


@pytest.fixture
def struck_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """The outcome of a case of the kind, quicker than in the soak, for a command with these lines."""
    for name, seconds in {"START": 300.0, "MOMENT": 0.5, "PAUSE": 0.3}.items():
        monkeypatch.setattr(ranks, name, seconds)

    def outcome(fault: str, first: str = "", last: str = "") -> Outcome:
        monkeypatch.setattr(ranks, "BOUND", 4.0 if last == HANGS else 300.0)
        monkeypatch.setattr(ranks, "GONE", 3.0 if ORPHAN in first or FOLDER in last else 300.0)
        goes_on = fault in ("paused", "slowed")  # to its end
        program = RANK.replace("600", "4") if goes_on else RANK
        lines = {"rank": program, "first": first, "last": last}
        command = (sys.executable, "-c", STAND_IN.format(**lines))
        monkeypatch.setattr(ranks, "COMMAND", command)
        return run_case(ranks.KIND, 3 * ranks.FAULTS.index(fault), tmp_path / "place")

    return outcome


@needs_proc
@pytest.mark.parametrize("fault", ranks.FAULTS)
@pytest.mark.fast("command killed")
def test_a_command_that_ends_in_order_when_a_rank_is_struck_passes(
    fault: str, struck_rank: Callable[..., Outcome]
) -> None:
    assert struck_rank(fault) == Outcome(Counter({f"{fault}: generate": 1}), [])


@needs_proc
@pytest.mark.parametrize(
    ("fault", "lines", "said"),
    [
        ("killed", {"first": ORPHAN}, "1 processes are left"),
        ("killed", {"last": FOLDER}, "left in the temporary directory: ['rewriter-"),
        ("killed", {"last": HANGS}, "it did not end in 4 s"),
        ("killed", {"last": "1 / 0"}, "a traceback: "),
        ("paused", {"last": "sys.exit('error: a rank paused')"}, "exit code 1: error: a rank paused"),
        ("command killed", {"first": ORPHAN}, "1 processes are left"),
        ("command ended", {"first": CODE}, "exit code 1 after SIGTERM, not 143"),
    ],
    ids=["orphan", "folder", "hangs", "traceback", "gives up", "orphan of the killed", "code"],
)
@pytest.mark.fast("traceback", "code")
def test_a_command_that_does_not_end_in_order_is_found(
    fault: str, lines: dict[str, str], said: str, struck_rank: Callable[..., Outcome]
) -> None:
    (failure,) = struck_rank(fault, **lines).failures
    assert failure.startswith(f"{fault}: generate: {said}")


# Options


@pytest.mark.parametrize(
    ("code", "said", "wrong"),
    [
        (0, "", ""), (2, "error: --tp 0: expected 1 or more\n", ""), (1, "error: x\n", "exit code 1"),
        ("KeyError: 'a'", "", "exit code KeyError"), (2, "error: a\nTraceback (most\n", "a traceback"),
        (2, "error: a\nerror: b\n", "2 errors"), (2, "", "0 errors"), (2, "error: a fault of rewriter\n", "as a fault"),
    ],
)  # fmt: skip
def test_how_a_command_ended_is_judged(code: object, said: str, wrong: str) -> None:
    found = options.judged(code, said, 1.0)
    assert found == wrong if not wrong else wrong in found
    assert options.judged(0, "", 1e4) == "it took 10000 s"


@pytest.mark.slow
def test_options_of_every_command_are_drawn_and_what_a_command_changes_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert all(options.options_of(name) for name in options.COMMANDS if name not in ("verify", "recipes"))
    assert {options.drawn(random.Random(seed))[0] for seed in range(200)} == set(options.COMMANDS)
    (tmp_path / "m").mkdir()
    (tmp_path / "m/config.json").write_text("{}")

    def spoils(words: list[str]) -> int:
        Path("m/config.json").write_text(f"{words}")
        return 0

    monkeypatch.setattr(options, "main", spoils)
    monkeypatch.setattr(options.resource, "setrlimit", lambda *_: None)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    outcome = options.case(0, tmp_path)
    assert len(outcome.failures) == options.BATCH
    assert all("it changed what it was given" in failure for failure in outcome.failures)
    kinds = dict.fromkeys(("/dev/null", "/dev/zero"), stat.S_IFREG)
    before, real = options.given(tmp_path), os.stat
    monkeypatch.setattr(os, "stat", lambda path, **how: replaced(real(path, **how), kinds.get(path)))
    assert options.given(tmp_path) != before


def replaced(found: os.stat_result, kind: int | None) -> os.stat_result:
    return found if kind is None else os.stat_result((kind, *found[1:]))


# The pages


def test_the_pages_are_the_tallys_and_the_one_in_docs_is_short() -> None:
    assert tally.PAGE.read_text(encoding="utf-8") == tally.page(tally.runs())
    assert tally.RESULTS.read_text(encoding="utf-8") == tally.results(tally.runs())
    assert len(tally.page(tally.runs()).splitlines()) <= 30


def test_counts_of_runs_add_up() -> None:
    kinds = {"inputs": {"first": 0, "behind": 2, "seconds": 1.0, "counts": {"headers: read": 5, "recipes: refused": 2}}}
    run = {"date": "2026-01-01", "commit": "abc", "seconds": 3600.0, "kinds": kinds, "failures": []}
    failed = run | {"failures": [{"case": "inputs:1", "what": "KeyError"}]}
    page, tables = tally.page([run, failed]), tally.results([run, failed])
    assert "| safetensors headers | 10 | 1,000,000 |" in page
    assert "| other damaged inputs | 4 | 10,000 |" in page
    assert "2.0 hours of a process in 2 runs: 1 failure, 1 of them left." in page
    assert "- `inputs:1` at abc: KeyError\n" in tables
    assert "| | read | refused |\n|---|---:|---:|\n| headers | 10 |  |\n| recipes |  | 4 |\n" in tables
    assert "not reached yet: programs × recipes × ranks" in page


def test_a_failure_that_passes_when_repeated_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tally, "TALLY", tmp_path / "tally.json")
    monkeypatch.setattr(tally, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(tally, "RESULTS", tmp_path / "results.md")
    failures = [{"case": f"inputs:{n}", "what": "KeyError"} for n in (1, 2, 2)]
    tally.add({"date": "2026-01-01", "commit": "abc", "seconds": 3600.0, "kinds": {}, "failures": failures})
    tally.mend("inputs:2", "def")
    assert "3 failures, 1 of them left." in tally.PAGE.read_text(encoding="utf-8")
    tables = tally.RESULTS.read_text(encoding="utf-8")
    assert "- `inputs:1` at abc: KeyError\n" in tables
    assert "- `inputs:2` at abc: KeyError. It passes at def. (2 times)\n" in tables
    assert "| 2026-01-01 | abc | 1.00 | not recorded | 3 |" in tables


@pytest.mark.slow
def test_the_command_runs_every_kind(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "soak", "--cases", "1", "--state", str(tmp_path)]
    settings = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in ("tools", "tests/support", "tests", ".")),
    }
    ran = subprocess.run(words, cwd=ROOT, env=settings, capture_output=True, text=True, check=False, timeout=600)
    assert ran.returncode == 0, ran.stdout
    assert all(f"{name}:" in ran.stdout for name in ("inputs", "programs", "kills", "disks", "ranks"))
