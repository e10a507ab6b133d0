"""What collectives, links and devices cost: α-β models, measured tables, fabrics as YAML. A leaf: it imports nothing of
ours but how errors are reported and YAML is read, and no torch.

`calls` says what is asked and `delays` what is answered; `measured`, `alpha_beta`, `composed` and `what_if` are models;
`fabric` puts figures and models together, `schema` reads them from `library/*.yaml`.
"""

from rewriter.fabric.calls import KINDS, Call, Kind
from rewriter.fabric.delays import Delay, DelayModel
from rewriter.fabric.fabric import Fabric
from rewriter.fabric.links import Channel, Device, Link
from rewriter.fabric.sharing import Links
from rewriter.fabric.shipped_fabrics import fabrics, load_fabric
from rewriter.fabric.what_if import WhatIf

__all__ = [
    "KINDS",
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
