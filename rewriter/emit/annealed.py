"""A directory to train from by annealed conversion: the annealed modeling file beside weights that are elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

from rewriter.common.errors import RewriterError
from rewriter.emit.huggingface import emit_huggingface
from rewriter.emit.manifest import FORMER_GOLDEN, GOLDEN, MANIFEST
from rewriter.ir import Program

# what stands in the root of an output directory and describes the shipped model
_OWN = ("config.json", MANIFEST, FORMER_GOLDEN, Path(GOLDEN).parts[0], "README.md", "runtime")


def write_annealed(program: Program, weights: Path, out: Path) -> None:
    """Make `out`, which `from_pretrained(out, trust_remote_code=True)` loads as the annealed model of `program`.

    `weights` is a directory with the recipe's checkpoint: an output directory of `rewrite`, or, where the recipe
    leaves the tensors as they are, the source. Its files are linked, not copied, so `out` lasts as long as they do;
    the config keeps the dtype of its weights. Raises RewriterError when `out` exists, and as `emit_huggingface` does.
    """
    if out.exists():
        raise RewriterError(f"{out} exists: the annealed model needs a new directory")
    files = emit_huggingface(program, annealed=True)
    assert files.modeling_name is not None
    assert files.modeling is not None
    config, known = dict(files.config), json.loads((weights / "config.json").read_text(encoding="utf-8"))
    config |= {key: known[key] for key in ("dtype", "torch_dtype") if key in known}
    out.mkdir(parents=True)
    for file in weights.iterdir():
        if file.name not in _OWN and file.suffix != ".py":
            (out / file.name).symlink_to(file.resolve())
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (out / files.modeling_name).write_text(files.modeling, encoding="utf-8")
