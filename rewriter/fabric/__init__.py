"""Costs of collectives, links and devices: α-β models, measured tables, fabrics as YAML. No torch.

`calls` has what a model is asked and what it answers; `measured_delays`, `alpha_beta` and `what_if` are models;
`fabric` puts figures and models together, `schema` reads them from `library/*.yaml`.
"""

from rewriter.fabric.calls import KINDS, SOCKETS, Call, Delay, DelayModel, Kind, Links
from rewriter.fabric.fabric import Fabric
from rewriter.fabric.links import Channel, Device, Link
from rewriter.fabric.schema import fabrics, load_fabric
from rewriter.fabric.what_if import WhatIf

__all__ = [
    "KINDS",
    "SOCKETS",
    "Call",
    "Channel",
    "Delay",
    "DelayModel",
    "Device",
    "Fabric",
    "Kind",
    "Link",
    "Links",
    "WhatIf",
    "fabrics",
    "load_fabric",
]
