"""Options of writing and checking an output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from rewriter.common.errors import RewriterError

Level = Literal["none", "shrunken", "full"]
Dtype = Literal["bf16", "fp16", "fp32"]


@dataclass(frozen=True)
class SaveOptions:
    """`dtype`: the weights' ("bf16", "fp16", "fp32"), None: as they are stored. `verify`: on a shrunken copy, on the
    real weights too ("full"), or not at all. `dry_run`: report what would be done. `resume`: continue an interrupted
    run. `link`: hard-link unchanged files. `materialize`: write what each rank holds to a file, where ranks would read
    ranges of the adapted checkpoint. `dequantize`: write quantized weights as what they stand for. `drop_unused`: leave
    out tensors that the model does not use. `text`: replaces the packaged calibration text.

    Raises RewriterError for values that do not exist or contradict each other.
    """

    dtype: Dtype | None = None
    verify: Level = "shrunken"
    dry_run: bool = False
    resume: bool = False
    link: bool = False
    materialize: bool = False
    dequantize: bool = False
    drop_unused: bool = False
    text: str | None = None

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in get_args(Dtype):
            raise RewriterError(
                f"dtype {self.dtype!r}: expected {', '.join(get_args(Dtype))}, or none to keep what is stored."
            )
        if self.verify not in get_args(Level):
            raise RewriterError(f"verify {self.verify!r}: expected none, shrunken or full.")
        if self.link and (self.dtype is not None or self.dequantize):
            option = "--dequantize" if self.dtype is None else "--dtype"
            raise RewriterError(
                f"--link with {option}: converted files differ from the source's, so they cannot be links."
            )

    @property
    def copies_files(self) -> bool:
        """True if a new output is likely to hold the source's weight files as they are."""
        cast = self.dtype is not None or self.dequantize or self.drop_unused
        return not (cast or self.dry_run or self.resume or self.materialize)
