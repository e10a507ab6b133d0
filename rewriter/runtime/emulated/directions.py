"""Links that carry both ways at once."""

from __future__ import annotations

from dataclasses import replace

from rewriter.fabric.calls import Call
from rewriter.fabric.delays import Delay


def directed(delay: Delay, call: Call, receives: bool) -> Delay:
    """The delay with each link in two directions: a send and a receive (`receives`) do not wait for each other, and a
    collective takes both."""
    ways = "<>"
    if call.kind == "send":
        ways = "<" if receives else ">"
    return replace(delay, links=tuple(link + way for link in delay.links for way in ways))
