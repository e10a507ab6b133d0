"""rewrite.json: what an output directory is, what made it from what, and what was compared."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rewriter.common.errors import RewriterError
from rewriter.common.files import read_json, refuse_adapter
from rewriter.output.names import MANIFEST

# A safetensors file. Engines take every *.safetensors for the model's weights, a download from the hub at any depth.
GOLDEN = "verification/golden.tensors"
FORMER_GOLDEN = "golden.safetensors"  # where earlier versions wrote it; the manifest says which one an output has
SCHEMA = 1
CLOSE, CLOSE_KL = 0.01, 0.05  # a loss above the original's as a share of it, and nats: within both, no need to heal


Requirement = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9.+!_-]+$")]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", populate_by_name=True)


class PassEntry(_Part):
    """One pass as it was applied."""

    name: str
    kind: str
    options: dict[str, Any]
    summary: str
    notes: list[str] = []


class SkippedPass(_Part):
    """A pass that was not applied: optional and without effect, or disabled by name."""

    name: str
    reason: str


class SequenceEntry(_Part):
    """Sharding of a sequence's tokens over ranks: `rewriter.ir.ops.SequencePlan`."""

    kind: str
    grid: tuple[int, int, int]
    overlap: bool = False
    quantized: str | None = None
    min_bytes: int = 0


class FileHeader(_Part):
    """A safetensors file as a load checks it: its size in bytes and the sha256 of its header."""

    size: int
    header: str


class Runtime(_Part):
    """The sharded runtime module of one mesh: what `rewriter.runtime.load` reads.

    `weights` says which ranges of the adapted checkpoint each tensor-parallel rank holds; where ranks have files that
    were written for them, `ranks` are those, and `headers` what they are known by. Ranks that share tokens read the
    same. `sequence` is None where every rank holds all tokens.
    """

    module: str
    class_name: str = Field(alias="class")
    weights: str | None = None
    ranks: list[str] | None = None
    headers: dict[str, FileHeader] | None = None
    sequence: SequenceEntry | None = None


class SourceEntry(_Part):
    """The model that was rewritten. `files` are the sha256 of its weight files; `name` is a hub id or a bare name.

    `path` leads from the output to where it was, or from the home folder (`~/…`) to one in there.
    """

    name: str
    model_type: str
    architecture: str
    files: dict[str, str]
    path: str | None = None


class Adapted(_Part):
    """The adapted checkpoint: its model type and the generated file that defines it (None: transformers' own does)."""

    model_type: str
    modeling: str | None


class PerRank(_Part):
    """The number of ranks that the function is bound to, and per layer what became of the reduction of each block.

    `modes` says what the words of `pattern` mean.
    `untied` are the tensors of the adapted checkpoint that hold weights of every rank, one after the other.
    """

    ranks: int
    pattern: list[dict[str, str]]
    modes: dict[str, str] = {}
    untied: list[str] = []


class QuantizedEntry(_Part):
    """Messages that travel quantized between ranks, and only there: `rewriter.ir.communication.QuantizedTraffic`.

    Bytes are those of all `reductions` of a forward pass per token, with scales; `exact_bytes_per_token` unquantized.
    """

    format: str
    min_bytes: int
    from_tokens: int
    reductions: int
    bytes_per_token: int
    exact_bytes_per_token: int


class CheckEntry(_Part):
    """One comparison that held: relative error and its limit."""

    name: str
    error: float
    limit: float


class Drift(_Part):
    """Distance of the rewritten model's next-token predictions from the original's, over `tokens` positions.

    `kl` is the mean of KL(original ‖ rewritten) in nats, `top1_agreement` how often the likeliest token is the same;
    the perplexities are those of the text itself. `text` says what was read.
    """

    kl: float
    top1_agreement: float
    perplexity_before: float
    perplexity_after: float
    tokens: int
    text: str

    @property
    def rise(self) -> float | None:
        """`above` of the losses on the text."""
        before, after = (math.log(max(p, 1.0)) for p in (self.perplexity_before, self.perplexity_after))
        return above(before, after)

    @property
    def close(self) -> bool:
        """True if both the loss and the predictions are so near the original's that healing gains little."""
        return self.rise is not None and self.rise <= CLOSE and self.kl <= CLOSE_KL


def above(original: float, loss: float) -> float | None:
    """A loss over the original's, less one. None where the original's is 0, or one of them is not finite."""
    if not (math.isfinite(original) and math.isfinite(loss)) or original <= 0:
        return None
    return loss / original - 1


def gap_closed(losses: Mapping[str, float]) -> float | None:
    """(loss before - loss after) / (loss before - the original's), in nats; None where there was no gap, or a loss is
    not finite."""
    gap = losses["before"] - losses["original"]
    return (losses["before"] - losses["after"]) / gap if gap > 0 and math.isfinite(gap) else None


class Verified(_Part):
    """Comparisons, and notes on what was not compared and why. `level` is none, shrunken or full."""

    level: str
    checks: list[CheckEntry] = []
    drift: Drift | None = None
    notes: list[str] = []


class Golden(_Part):
    """File of the golden logits, computed in fp32 from the real weights on one device."""

    file: str
    tokens: int


class AdaptationEntry(_Part):
    """The fine-tuning that a checkpoint went through: on what, how, and what became of its loss.

    `data` and `evaluation` describe what was read; `counts` what became of the examples. `losses` are the mean
    cross entropies in nats per target on the evaluation rows, by name: "original" (the teacher, untrained), "before"
    (rewritten, untrained), "after" (as stored). `settings` are those of the Trainer, `steps` and `tokens` what was
    done, in `seconds` on `ranks` (processes by axis).
    """

    method: str
    data: str
    counts: dict[str, int]
    evaluation: str
    steps: int
    tokens: int
    rows_per_step: int
    length: int
    settings: dict[str, Any]
    options: dict[str, Any]
    ranks: dict[str, int]
    losses: dict[str, float]
    seconds: float


class PaddedTensors(_Part):
    """Stored tensors that hold padding at the same `ranges` of a dimension: zeros, or, where `zero` is false, the mean
    of other rows. In the names, `*` stands for numbers."""

    tensors: list[str]
    dim: int
    ranges: list[tuple[int, int]]
    zero: bool = True


class Padding(_Part):
    """Sizes that were padded until numbers of ranks divide them (`fit_ranks`): the `settings` of config.json that it
    changed, those that are given `on_load`, since config.json cannot say them, the tokens that the source has, by how
    much the bytes of the weights grew, as a share, and where padding is."""

    settings: dict[str, Any]
    on_load: dict[str, Any] = {}
    vocabulary: int | None = None
    growth: float
    tensors: list[PaddedTensors]


class Manifest(_Part):
    """The file. `files` are the sha256 of every other file of the directory.

    `mesh` has the axis "tp", and "sp" where the tokens of a sequence are sharded. `per_rank` is None for a function
    that is the same on any number of ranks, `quantized` where ranks exchange values as they are, `adaptation`
    where weights are as they were before the rewrite, `padding` where no sizes were padded. `positions` are those of
    the table in which the model looks positions up, beyond which it cannot read; None where it computes them. `unused`
    are the tensors that the model has no parameter for. `refreshed` are the versions that its code was written by
    before `rewrite refresh` wrote it anew, oldest first. `packages` names the installed package of each pass of the
    recipe that `rewriter` does not ship, as pip takes it: `{"damp": "rewriter-damp==0.1"}`.
    """

    schema_version: int = Field(SCHEMA, alias="schema")
    versions: dict[str, str]
    recipe: dict[str, Any]
    passes: list[PassEntry]
    skipped: list[SkippedPass] = []
    mesh: dict[str, int]
    runtime: dict[str, Runtime]
    source: SourceEntry
    adapted: Adapted
    per_rank: PerRank | None = None
    quantized: QuantizedEntry | None = None
    verification: Verified
    golden: Golden | None = None
    positions: int | None = None
    adaptation: AdaptationEntry | None = None
    padding: Padding | None = None
    unused: list[str] = []
    refreshed: list[dict[str, str]] = []
    packages: dict[str, Requirement] = {}
    files: dict[str, str]
    job: dict[str, Any] | None = None

    def table(self) -> dict[str, Any]:
        """Plain JSON data, without the job, which the output directory adds itself."""
        return self.model_dump(by_alias=True, exclude={"job"}, mode="json")


def damage(manifest: Manifest) -> str | None:
    """The distance from the original, as text, where a recipe changed the function and nothing has healed it since.

    None where the single-device model computes the original's function, where it was measured close to it, and after
    any fine-tuning.
    """
    changed = manifest.adapted.modeling is not None and any(entry.kind == "approximating" for entry in manifest.passes)
    if not changed or manifest.adaptation is not None:
        return None
    if (drift := manifest.verification.drift) is None:
        return "it computes another function than the original; how far off was not measured"
    if drift.close:
        return None
    return (
        f"its predictions are {drift.kl:.3g} nats (KL) from the original's on {drift.tokens:,} tokens, its perplexity "
        f"{drift.perplexity_after:.4g} instead of {drift.perplexity_before:.4g}"
    )


def healing(directory: str | os.PathLike[str], out: str | None = None, tokens: int = 100_000) -> str:
    """The command, for a shell, that heals the output in `directory`; `out` is next to it by default."""
    name = as_argument(os.fspath(directory))
    return shlex.join(["rewrite", "adapt", name, "--out", out or f"{name.rstrip('/')}-healed", "--tokens", f"{tokens}"])


def as_argument(directory: str) -> str:
    """The path as a command takes it: one that begins with a dash would be read as an option."""
    return f"./{directory}" if directory.startswith("-") else directory


def read_manifest(directory: Path) -> Manifest:
    """The manifest of an output directory. Raises RewriterError where it is missing, broken or of another schema, and
    where an adapter lies there."""
    path = directory / MANIFEST
    if not directory.is_dir():
        raise RewriterError(f"{directory}: no such directory. Give one that `rewrite MODEL --recipe …` wrote.")
    refuse_adapter(directory)
    if not os.path.lexists(path):
        raise RewriterError(
            f"{directory}: no {MANIFEST} in it, so `rewrite` did not write it. Where transformers saved it from an "
            "output of `rewrite`, copy its weights and config.json over those in a copy of that output."
        )
    data = read_json(path, "Rewrite the model again.")
    if data.get("schema") != SCHEMA:
        raise RewriterError(
            f"{path}: schema {data.get('schema')!r}, this version reads {SCHEMA}. Rewrite the model again."
        )
    try:
        return Manifest.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise RewriterError(f"{path}: {where}: {first['msg']}. It is not as `rewrite` wrote it.") from error
