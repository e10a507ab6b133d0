"""Links as one rank sees them."""

from __future__ import annotations

from dataclasses import replace

from rewriter.fabric.calls import Call
from rewriter.fabric.delays import Delay
from rewriter.fabric.rank_groups import links_of


def directed(delay: Delay, call: Call, rank: int, receives: bool) -> Delay:
    """The delay with the links that global rank `rank` has a part in, each in two directions: a send and a receive
    (`receives`) do not wait for each other, and a collective takes both."""
    ways = "<>"
    if call.kind == "send":
        ways = "<" if receives else ">"
    return replace(delay, links=tuple(link + way for link in links_of(rank, delay.links) for way in ways))
