"""What links and devices cost. A leaf: it imports nothing of ours, and no torch."""

from rewriter.fabric.known import FABRICS
from rewriter.fabric.links import Channel, Device, Fabric, Link

__all__ = ["FABRICS", "Channel", "Device", "Fabric", "Link"]
