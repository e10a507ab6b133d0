"""Network namespaces with rate-limited links between them: machines, their ports and the cables, on one machine.

    with Link() as link:                          # two, joined by a cable
        link.set_rate(30e6)                       # bytes a second, in each direction
        subprocess.Popen([*link.inside(0), "python", "rank.py"])

    with Bridge(16) as bridge:                    # sixteen, each with a port of its own on one switch
        bridge.set_rate(30e6)                     # of each port, in each direction

Linux, root, iproute2. Nothing outside the namespaces is touched: every interface is made inside them, addresses exist
nowhere else, and all of it vanishes with the namespaces. Those are deleted when the block is left, however it is left;
what a killed run (kill -9) left behind is deleted by the next one.
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
INTERFACE = "veth"  # in every rank's namespace, which may use the same name
SWITCH = "switch"
# A segment that the kernel splits late (GSO) has up to 64 KB; a smaller bucket would have to cut each of them up.
BURST = 128 << 10
# Room for everything that a socket may have under way: a full queue would drop segments, and TCP would slow down.
QUEUE = 16 << 20
# Cubic does not pace, so that the bucket alone sets the rate. BBR would drain its window every ten seconds to measure
# the round trip, which looks like a slow link.
CONGESTION_CONTROL = ("cubic", "reno")

# On the bridge, for phases much shorter than those between two ends: frames are those of a real wire, jumbo, and not
# put together to larger segments, so that the bucket can be small and the interfaces count what a wire would carry.
FRAME = 9000
# What the bucket may let through at once after a pause, in seconds at the rate: a pause must not be a gift of bytes.
BURST_SECONDS = 1e-3
# Most that one socket may have under way. The round trip takes microseconds where queues are empty, so this suffices
# for any rate here; what is more would only stand in the queue of a port to which many send at once.
WINDOW = 512 << 10


class LinkError(Exception):
    """The link cannot be made on this machine; the message says what to do."""


class Network:
    """Namespaces with a limit on both directions of each link. A context manager.

    `rate` is None (no limit) until `set_rate`, then bytes per second. `ends` are the namespaces to run in.
    """

    def __init__(self, ends: int, *others: str) -> None:
        self.ends = tuple(f"{PREFIX}-{os.getpid()}-{end}" for end in range(ends))
        self.others = tuple(f"{PREFIX}-{os.getpid()}-{name}" for name in others)
        self.rate: float | None = None

    def __enter__(self) -> Self:
        require()
        delete_stale()
        try:
            for name in (*self.ends, *self.others):
                run("ip", "netns", "add", name)
            self._connect()
            for name in self.ends:
                _write(name, "tcp_congestion_control", *CONGESTION_CONTROL)
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
        return ["ip", "netns", "exec", self.ends[end]]

    def set_rate(self, rate: float | None) -> None:
        """Limit every link to `rate` bytes per second in each direction; None for no limit."""
        for name, interface in self._limited():
            if rate is not None:
                burst, queue = self._bucket(rate)
                # fmt: off
                run("tc", "-n", name, "qdisc", "replace", "dev", interface, "root", "tbf",
                    "rate", f"{round(rate * 8)}bit", "burst", str(burst), "limit", str(queue))
                # fmt: on
            elif self.rate is not None:
                run("tc", "-n", name, "qdisc", "delete", "dev", interface, "root")
        self.rate = rate

    def dropped(self) -> int:
        """Segments that the limit has dropped since `set_rate`: more than a few spoil a measurement."""
        shown = "".join(run("tc", "-n", name, "-s", "qdisc", "show", "dev", port) for name, port in self._limited())
        return sum(map(int, re.findall(r"\(dropped (\d+)", shown)))

    def _connect(self) -> None:
        """Make the interfaces, give them addresses and set them up."""
        raise NotImplementedError

    def _limited(self) -> list[tuple[str, str]]:
        """(namespace, interface) of every limit: one for each direction of each link."""
        raise NotImplementedError

    def _bucket(self, rate: float) -> tuple[int, int]:
        """Bytes that may pass at once after a pause, and bytes that may wait."""
        return BURST, QUEUE

    def _delete(self) -> None:
        existing = namespaces()
        for name in (*self.ends, *self.others):
            if name in existing:
                run("ip", "netns", "delete", name)


class Link(Network):
    """Ends 0 and 1 of a cable."""

    def __init__(self) -> None:
        super().__init__(2)

    def _connect(self) -> None:
        a, b = self.ends
        run("ip", "link", "add", INTERFACE, "netns", a, "type", "veth", "peer", "name", INTERFACE, "netns", b)
        for end, name in enumerate(self.ends):
            _set_up(name, end)

    def _limited(self) -> list[tuple[str, str]]:
        return [(name, INTERFACE) for name in self.ends]


class Bridge(Network):
    """A switch, in a namespace of its own, with one port for each of `ports` ends; a port's two directions are limited
    each for itself, as a full-duplex network card's are. The switch itself has no limit."""

    def __init__(self, ports: int) -> None:
        super().__init__(ports, SWITCH)

    def _connect(self) -> None:
        (switch,) = self.others
        # Without multicast snooping and IPv6 addresses nobody talks but the ranks.
        run("ip", "-n", switch, "link", "add", SWITCH, "type", "bridge", "mcast_snooping", "0", "forward_delay", "0")
        run("ip", "-n", switch, "link", "set", SWITCH, "addrgenmode", "none", "mtu", str(FRAME), "up")
        for end, name in enumerate(self.ends):
            port = f"port{end}"
            run("ip", "link", "add", INTERFACE, "netns", name, "type", "veth", "peer", "name", port, "netns", switch)
            wire = ("mtu", str(FRAME), "gso_max_segs", "1", "addrgenmode", "none")
            run("ip", "-n", name, "link", "set", INTERFACE, *wire)
            run("ip", "-n", switch, "link", "set", port, *wire, "master", SWITCH, "up")
            _set_up(name, end)
            for direction in ("tcp_rmem", "tcp_wmem"):
                _write(name, direction, f"4096 131072 {WINDOW}")

    def _limited(self) -> list[tuple[str, str]]:
        (switch,) = self.others
        return [(name, INTERFACE) for name in self.ends] + [(switch, f"port{i}") for i in range(len(self.ends))]

    def _bucket(self, rate: float) -> tuple[int, int]:
        # All others may send to one port at a time, and what they have under way must find room there.
        return max(2 * FRAME, round(rate * BURST_SECONDS)), 2 * WINDOW * len(self.ends)


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
        found = re.fullmatch(rf"{PREFIX}-(\d+)-(\d+|{SWITCH})", name)
        if found and not os.path.exists(f"/proc/{found.group(1)}"):
            run("ip", "netns", "delete", name)


def run(*command: str) -> str:
    """Run a command; returns what it prints. Raises LinkError with what it says on failure."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LinkError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout


def _set_up(namespace: str, end: int) -> None:
    run("ip", "-n", namespace, "address", "add", f"10.0.0.{end + 1}/24", "dev", INTERFACE)
    run("ip", "-n", namespace, "link", "set", "lo", "up")
    run("ip", "-n", namespace, "link", "set", INTERFACE, "up")


def _write(namespace: str, setting: str, *values: str) -> None:
    """The first of `values` that this kernel takes. The setting belongs to the namespace; the host's stays as it is."""
    script = 'for value in "$@"; do echo "$value" > "$0" 2>/dev/null && exit 0; done; exit 1'
    run("ip", "netns", "exec", namespace, "sh", "-c", script, f"/proc/sys/net/ipv4/{setting}", *values)
