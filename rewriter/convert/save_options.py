"""Options of writing and checking an output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from rewriter.common.errors import RewriterError
from rewriter.emit.files import output_files

Level = Literal["none", "shrunken", "full"]


@dataclass(frozen=True)
class SaveOptions:
    """`dtype`: the weights' ("bf16", "fp16", "fp32"), None: as they are stored. `verify`: on a shrunken copy, on the
    real weights too ("full"), or not at all. `dry_run`: report what would be done. `resume`: continue an interrupted
    run. `link`: hard-link unchanged files. `materialize`: write what each rank holds to a file, where ranks would read
    ranges of the adapted checkpoint. `dequantize`: write quantized weights as what they stand for. `drop_unused`: leave
    out tensors that the model does not use. `text`: replaces the packaged calibration text.

    Raises RewriterError for values that do not exist or contradict each other.
    """

    dtype: str | None = None
    verify: Level = "shrunken"
    dry_run: bool = False
    resume: bool = False
    link: bool = False
    materialize: bool = False
    dequantize: bool = False
    drop_unused: bool = False
    text: str | None = None

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in output_files.DTYPES:
            raise RewriterError(
                f"dtype {self.dtype!r}: expected {', '.join(output_files.DTYPES)}, or none to keep what is stored."
            )
        if self.verify not in get_args(Level):
            raise RewriterError(f"verify {self.verify!r}: expected none, shrunken or full.")
        if self.link and (self.dtype is not None or self.dequantize):
            option = "--dequantize" if self.dtype is None else "--dtype"
            raise RewriterError(
                f"--link with {option}: converted files differ from the source's, so they cannot be links."
            )
