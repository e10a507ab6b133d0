"""What links and devices cost. A leaf: it imports nothing of ours, and no torch."""

from rewriter.fabric.calls import KINDS, Call, Kind
from rewriter.fabric.delays import Delay, DelayModel
from rewriter.fabric.known import FABRICS
from rewriter.fabric.links import Channel, Device, Fabric, Link
from rewriter.fabric.sharing import Links

__all__ = ["FABRICS", "KINDS", "Call", "Channel", "Delay", "DelayModel", "Device", "Fabric", "Kind", "Link", "Links"]
