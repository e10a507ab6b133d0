"""Output of nccl-tests: https://github.com/NVIDIA/nccl-tests, of the out-of-place times."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rewriter.common.errors import RewriterError, did_you_mean
from rewriter.common.yaml_documents import read_file
from rewriter.fabric.calls import KINDS, Kind

MAX_BYTES = 8 << 20

_NAMES = {"all_to_all": "alltoall", "send": "sendrecv"}  # where a program is called otherwise
PROGRAMS: dict[str, Kind] = {f"{_NAMES.get(kind, kind)}_perf": kind for kind in KINDS if kind != "barrier"}
_PROGRAM = re.compile(rf"(?<![a-z_])({'|'.join(PROGRAMS)})(?![a-z_])")
_PREFIX = re.compile(r"^\[\d+,\d+\]<std(?:out|err)>:")  # mpirun --tag-output
_RANK = re.compile(r"#\s*Rank\s+(\d+)\s+(?:Group\s+\d+\s+)?Pid\s+\d+ on\s+(\S+)\s+device")
_VERSION = re.compile(r"NCCL version\s*:?\s*v?(\d+\.\d+(?:\.\d+)?)")
_TYPE = re.compile(r"[a-z][a-z0-9_]{0,15}")


@dataclass(frozen=True)
class Log:
    """One run: a collective among `ranks`, `per_node` of them on each host; rows of (bytes, seconds)."""

    source: str
    kind: Kind
    ranks: int
    per_node: int
    version: str
    dtype: str
    rows: tuple[tuple[int, float], ...]


def read_log(path: Path, kind: Kind | None = None) -> Log:
    """A log from a file. `kind` says which collective it is of, where neither the text nor the file's name does."""
    if not path.is_file():
        raise RewriterError(f"{path}: no such file. Give what nccl-tests printed, as text.")
    return parse_log(read_file(path, "nccl-tests log", MAX_BYTES), str(path), kind)


def parse_log(text: str, source: str, kind: Kind | None = None) -> Log:
    """A log from its text; `source` names it in messages.

    Raises RewriterError, with the line, for what is no log of one run of nccl-tests.
    """

    def fail(line: int, why: str) -> RewriterError:
        return RewriterError(f"{source}, line {line}: {why}")

    hosts: dict[int, str] = {}
    programs: set[str] = set()
    version, dtype = "", ""
    columns: list[str] = []
    rows: list[tuple[int, float]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        line = _PREFIX.sub("", line)
        programs.update(_PROGRAM.findall(line))
        if named := _VERSION.search(line):
            version = named[1]
        if listed := _RANK.match(line.strip()):
            rank = int(listed[1])
            if rank in hosts:
                raise fail(number, f"rank {rank} again: a second run. Give each run a separate file.")
            hosts[rank] = listed[2]
        elif re.match(r"\s*#\s+size\s+count\s+type\b.*\stime\b", line):
            columns = line.strip(" #\t").split()
        elif columns and re.match(r"\s*\d+\s+\d+\s", line):
            row = line.split()
            time = columns.index("time")
            if len(row) <= time or not _TYPE.fullmatch(row[2]):
                raise fail(number, f"not a row of {', '.join(columns[: time + 1])}: {line.strip()!r:.80}.")
            if len(row[0]) > 18:
                raise fail(number, f"size {row[0]:.30}: larger than any message.")
            nbytes, seconds = int(row[0]), _microseconds(row[time])
            if seconds is None:
                raise fail(number, f"time {row[time]!r:.20} is no number of microseconds above 0.")
            dtype = dtype or row[2]
            if nbytes:
                rows.append((nbytes, seconds))
    last = max(1, len(text.splitlines()))
    if not columns:
        raise fail(last, "no header `# size count type …`: this is no output of nccl-tests.")
    if not rows:
        raise fail(last, "no rows below the header: the run ended before it measured anything.")
    if sorted(hosts) != list(range(len(hosts))) or len(hosts) < 2:
        raise fail(last, f"`# Rank` lines of {len(hosts)} ranks; expected those of all ranks 0, 1, … of two or more.")
    per_node = Counter(hosts.values())
    if len(set(per_node.values())) > 1:
        raise fail(last, f"hosts with unequally many ranks: {dict(per_node)}. Import a run with as many on each.")
    chosen = kind or _kind(programs or set(_PROGRAM.findall(Path(source).name)), source)
    each = next(iter(per_node.values()))
    ranks = 2 if chosen == "send" else len(hosts)  # sendrecv_perf: each rank sends to its neighbour
    return Log(source, chosen, ranks, each, version or "unknown", dtype, tuple(rows))


def _kind(programs: set[str], source: str) -> Kind:
    if len(programs) == 1:
        return PROGRAMS[programs.pop()]
    if programs:
        raise RewriterError(f"{source}: names several programs: {', '.join(sorted(programs))}. Say which with --op.")
    raise RewriterError(
        f"{source}: which collective it is of is not in it. Say it with --op, or name the file after the program, "
        "such as all_reduce_perf.log."
    )


def _microseconds(text: str) -> float | None:
    if not re.fullmatch(r"\d+(\.\d*)?(e[-+]?\d{1,2})?", text):
        return None
    seconds = float(text) * 1e-6
    return seconds if 0 < seconds < 1e6 else None


def op_named(name: str) -> Kind:
    """The collective called `name`, or by nccl-tests' program. Raises RewriterError for neither."""
    kinds = {kind: kind for kind in PROGRAMS.values()} | PROGRAMS
    if name not in kinds:
        raise RewriterError(f"--op {name!r:.40}: no collective. {did_you_mean(name, tuple(PROGRAMS.values()))}")
    return kinds[name]


def per_node(logs: Sequence[Log]) -> int:
    """Ranks on a host: of the log with most. Raises RewriterError where logs of several hosts differ in it."""
    spanning = {log.per_node for log in logs if log.ranks > log.per_node}
    most = max(log.per_node for log in logs)
    if spanning and spanning != {most}:
        raise RewriterError(
            f"logs of several hosts have {', '.join(map(str, sorted(spanning)))} ranks per host, and the largest host "
            f"has {most}. Import those with equally many together."
        )
    return most
