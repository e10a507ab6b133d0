"""Arguments and options that several commands share, with one wording."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A Hugging Face model directory or a hub id.", show_default=False)
]
Output = Annotated[
    Path, typer.Argument(metavar="DIR", help="A directory that `rewrite MODEL` wrote.", show_default=False)
]
Ranks = Annotated[int, typer.Option("--tp", min=1, metavar="N", help="Tensor-parallel ranks.")]
SequenceRanks = Annotated[
    int, typer.Option("--sp", min=1, metavar="N", help="Sequence-parallel ranks: each holds part of the tokens.")
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run the model's own Python files. Never done without.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout and nothing else.")]
