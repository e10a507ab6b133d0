"""Two network namespaces, joined by a veth pair whose ends are rate-limited: two machines and the cable between them.

    with Link() as link:
        link.set_rate(30e6)                       # bytes a second, in each direction
        subprocess.Popen([*link.inside(0), "python", "rank.py"])

Linux, root, iproute2. Nothing outside the two namespaces is touched: the pair is made inside them, its addresses exist
nowhere else, and both vanish with the namespaces. Those are deleted when the block is left, however it is left; what a
killed run (kill -9) left behind is deleted by the next one.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from types import TracebackType
from typing import Self

PREFIX = "rewriter-link"
INTERFACE = "veth"  # in both namespaces, which may use the same name
ADDRESSES = ("10.0.0.1", "10.0.0.2")
# A segment that the kernel splits late (GSO) has up to 64 KB; a smaller bucket would have to cut each of them up.
BURST = 128 << 10
# Room for everything that a socket may have under way: a full queue would drop segments, and TCP would slow down.
QUEUE = 16 << 20
# Cubic does not pace, so that the bucket alone sets the rate. BBR would drain its window every ten seconds to measure
# the round trip, which looks like a slow link.
CONGESTION_CONTROL = ("cubic", "reno")


class LinkError(Exception):
    """The link cannot be made on this machine; the message says what to do."""


class Link:
    """Ends 0 and 1 of a cable. A context manager; `rate` is None until `set_rate`, then bytes per second."""

    def __init__(self) -> None:
        self.names = tuple(f"{PREFIX}-{os.getpid()}-{end}" for end in (0, 1))
        self.rate: float | None = None

    def __enter__(self) -> Self:
        require()
        delete_stale()
        try:
            for name in self.names:
                run("ip", "netns", "add", name)
            a, b = self.names
            run("ip", "link", "add", INTERFACE, "netns", a, "type", "veth", "peer", "name", INTERFACE, "netns", b)
            for name, address in zip(self.names, ADDRESSES, strict=True):
                run("ip", "-n", name, "address", "add", f"{address}/30", "dev", INTERFACE)
                run("ip", "-n", name, "link", "set", "lo", "up")
                run("ip", "-n", name, "link", "set", INTERFACE, "up")
                _choose_congestion_control(name)
        except BaseException:
            self._delete()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._delete()

    def inside(self, end: int) -> list[str]:
        """The words to put before a command that is to run at this end."""
        return ["ip", "netns", "exec", self.names[end]]

    def set_rate(self, rate: float) -> None:
        """Limit both directions to `rate` bytes per second."""
        bits = f"{round(rate * 8)}bit"
        for name in self.names:
            # fmt: off
            run("tc", "-n", name, "qdisc", "replace", "dev", INTERFACE, "root", "tbf",
                "rate", bits, "burst", str(BURST), "limit", str(QUEUE))
            # fmt: on
        self.rate = rate

    def dropped(self) -> int:
        """Segments that the limit has dropped since `set_rate`: more than a few spoil a measurement."""
        shown = "".join(run("tc", "-n", name, "-s", "qdisc", "show", "dev", INTERFACE) for name in self.names)
        return sum(map(int, re.findall(r"\(dropped (\d+)", shown)))

    def _delete(self) -> None:
        existing = namespaces()
        for name in self.names:
            if name in existing:
                run("ip", "netns", "delete", name)


def require() -> None:
    """Raise LinkError where a link cannot be made."""
    if sys.platform != "linux":
        raise LinkError("rate-limited links need Linux's network namespaces")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise LinkError(f"{' and '.join(missing)} not found: install iproute2 (Debian: apt-get install iproute2)")
    if os.geteuid() != 0:
        raise LinkError("network namespaces need root: run this benchmark with sudo")


def namespaces() -> set[str]:
    """Names of all network namespaces of this machine."""
    return {line.split()[0] for line in run("ip", "netns", "list").splitlines() if line.strip()}


def delete_stale() -> None:
    """Delete the namespaces of runs that no longer exist."""
    for name in namespaces():
        found = re.fullmatch(rf"{PREFIX}-(\d+)-[01]", name)
        if found and not os.path.exists(f"/proc/{found.group(1)}"):
            run("ip", "netns", "delete", name)


def run(*command: str) -> str:
    """Run a command; returns what it prints. Raises LinkError with what it says on failure."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LinkError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout


def _choose_congestion_control(namespace: str) -> None:
    # The setting belongs to the namespace; the host's stays as it is.
    setting = "/proc/sys/net/ipv4/tcp_congestion_control"
    script = f'for name in "$@"; do echo "$name" > {setting} 2>/dev/null && exit 0; done; exit 1'
    run("ip", "netns", "exec", namespace, "sh", "-c", script, "sh", *CONGESTION_CONTROL)
