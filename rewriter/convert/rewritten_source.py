"""An output directory, opened for training: its weights under the original wiring, its recipe applied to them again.

The adapted checkpoint keeps the source's tensor names. With the source's config the same weights are the
original model: what a teacher computes, and what is traced again to write the trained result.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rewriter.common.errors import RewriterError
from rewriter.common.files import read_json
from rewriter.common.text_settings import ON_LOAD, declared_dtype, quantization_settings
from rewriter.common.tokenizer_code import code_files
from rewriter.emit.files.output_files import CHAT_TEMPLATES
from rewriter.ir import Program
from rewriter.output.manifest import FORMER_GOLDEN, Manifest, read_manifest
from rewriter.output.names import MANIFEST
from rewriter.passes import installed
from rewriter.passes.base import bound_ranks
from rewriter.recipes import Recipe
from rewriter.recipes.apply import apply_recipe
from rewriter.tracing import trace
from rewriter.weights import Checkpoint

_OURS = (
    "auto_map", "rewriter_layers", "rewriter_delays", "rewriter_norms", "rewriter_ranks", "rewriter_pattern",
    "rewriter_modes", "rewriter_phase", "rewriter_quantized", "rewriter_exact",
)  # fmt: skip
_NOT_SOURCE = (MANIFEST, FORMER_GOLDEN)


@dataclass(frozen=True)
class Opened:
    """A directory that `rewrite` or `rewrite adapt` wrote."""

    root: Path
    manifest: Manifest
    config: dict[str, Any]

    @property
    def dtype(self) -> str:
        """The name of the torch dtype that its weights are kept in."""
        return declared_dtype(self.config) or "float32"

    @property
    def tensor_parallel(self) -> int:
        return self.manifest.mesh.get("tp", 1)

    @property
    def bound(self) -> bool:
        """True where the function differs with the number of tensor-parallel ranks."""
        return self.manifest.per_rank is not None


def open_output(directory: str | os.PathLike[str], trained: bool = False) -> Opened:
    """Read manifest and config. Raises RewriterError for a directory that cannot be traced again, or is to be `trained`
    and cannot, with the reason."""
    root = Path(directory)
    manifest = read_manifest(root)
    check_packages(manifest)
    timing = [entry.name for entry in manifest.passes if entry.kind == "timing only"]
    if timing:
        raise RewriterError(f"{root}: {timing[0]} is for timing only. There is nothing to train.")
    if (bound := manifest.per_rank) is not None and bound.untied:
        raise RewriterError(
            f"{root}: {len(bound.untied)} of its norm weights are each rank's own (desync.untie_norms), so it "
            "cannot be told from the original's weights. Rewrite the model without untie_norms, or train it with a "
            "trainer of your own: the checkpoint loads in transformers"
        )
    config = read_json(root / "config.json", "Rewrite the model again.")
    if trained and quantization_settings(config):
        raise RewriterError(f"{root}: its weights are quantized, and cannot be trained. Rewrite with --dequantize")
    return Opened(root, manifest, config)


def source_config(opened: Opened) -> dict[str, Any]:
    """config.json of the original model: that of the directory without what `rewrite` put there."""
    entry = opened.manifest.source
    kept = {name: value for name, value in opened.config.items() if name not in _OURS}
    if (padding := opened.manifest.padding) is not None and padding.on_load:
        kept |= {**dict.fromkeys(padding.on_load, 1), ON_LOAD: padding.on_load}  # one head divides every width
    return kept | {"architectures": [entry.architecture], "model_type": entry.model_type}


def complete_config(config: Mapping[str, Any], manifest: Manifest) -> dict[str, Any]:
    """The config of an output with what its source's class in transformers has by default; as it stands where it has no
    such class, or the class refuses it."""
    from transformers import AutoConfig

    said = {name: value for name, value in config.items() if name not in (*_OURS, "model_type")}
    try:
        return dict(AutoConfig.for_model(manifest.source.model_type, **said).to_dict())
    except Exception:  # a config class's own code raises what it likes
        return dict(config)


def write_source(opened: Opened, out: Path, weights: bool = True) -> Path:
    """Make `out` the original model over the directory's weights (links to them, unless `weights` is False).

    Everything that accompanies weights (their index, tokenizer, generation config, licenses) is copied.
    """
    if weights:
        Checkpoint.open(opened.root)  # what is wrong with it is said of this folder, not of `out`
    out.mkdir(parents=True, exist_ok=True)
    for path in sorted(opened.root.iterdir()):
        ours = (*_NOT_SOURCE, "config.json", opened.manifest.adapted.modeling)
        if not path.is_file() or path.name in ours or (path.suffix == ".py" and path not in code_files(opened.root)):
            continue
        if path.suffix == ".safetensors":
            if weights:
                (out / path.name).unlink(missing_ok=True)
                (out / path.name).symlink_to(path.resolve())
        else:
            shutil.copyfile(path, out / path.name)
    if (opened.root / CHAT_TEMPLATES).is_dir():
        shutil.copytree(opened.root / CHAT_TEMPLATES, out / CHAT_TEMPLATES, dirs_exist_ok=True)
    (out / "config.json").write_text(json.dumps(source_config(opened), indent=2) + "\n", encoding="utf-8")
    return out


def check_packages(manifest: Manifest, of_any_version: bool = False) -> None:
    """Raise RewriterError if a pass of the recipe is of a package that is not installed here, or not in the version
    that the output was made with: another version may wire the model in another way."""
    for name, package in manifest.packages.items():
        here = installed.requirement(name)
        if here is None or here.partition("==")[0] != package.partition("==")[0]:
            instead = "" if here is None else f"; {here} registers a pass of this name"
            raise RewriterError(
                f"pass {name!r} of this output is of the package {package}, which is not installed{instead}. "
                f"Install it: pip install {package}"
            )
        if here != package and not of_any_version:
            raise RewriterError(
                f"pass {name!r} of this output is of {package}, and {here} is installed. Install that version: "
                f"pip install {package}, or let `rewrite refresh` compare the output with the installed one"
            )


def applied_recipe(manifest: Manifest) -> Recipe:
    """The recipe as it was applied, with every option as it was measured or overridden. Raises RewriterError for a
    pass of a package that is not installed."""
    check_packages(manifest, of_any_version=True)
    unnamed = {"summary": "Rewritten by a list of passes.", "paper": "-"}
    return Recipe.model_validate(unnamed | dict(manifest.recipe))


def recipe_of(opened: Opened) -> Recipe:
    """`applied_recipe` for the directory's weights: passes that have changed them already (`permute`) leave them."""
    recipe = applied_recipe(opened.manifest)
    for index, rewrite in enumerate(recipe.build()):
        if rewrite.again:
            recipe = recipe.with_options(index, rewrite.again)
    return recipe


def rewritten(opened: Opened, source: Path, *, tp: int | None = None, sp: int | None = None) -> Program:
    """The recipe applied again to the checkpoint in `source`, which has the weights of the directory or trained ones.

    `tp` and `sp` are by default those of the manifest. With other sequence ranks than it has, tokens are sharded by a
    plan of the planner's choice.
    """
    recipe, mesh = recipe_of(opened), opened.manifest.mesh
    tensor, sequence = (mesh.get(axis, 1) if n is None else n for axis, n in (("tp", tp), ("sp", sp)))
    if sequence != mesh.get("sp", 1):
        built = zip(recipe.passes, recipe.build(), strict=True)
        others = [spec.to_dict() for spec, rewrite in built if not rewrite.shards_tokens]
        added = [{"pass": "sequence_parallel"}] if sequence > 1 else []
        recipe = Recipe.model_validate({**recipe.to_dict(), "passes": [*others, *added]})
    program, _ = apply_recipe(trace(source), recipe, tensor, sp=sequence)
    if bound_ranks(program) not in (None, opened.tensor_parallel):
        raise RewriterError(
            f"{opened.root} is bound to tp={opened.tensor_parallel}: it cannot be trained on {tensor} ranks. Use --tp "
            f"{opened.tensor_parallel}, or --tp 1, which computes all ranks on one device"
        )
    return program


def original_program(source: Path, *, tp: int = 1, sp: int = 1) -> Program:
    """The original model of the checkpoint in `source`, sharded exactly over `tp` and `sp` ranks."""
    passes = [{"pass": "tensor_parallel"}]
    if sp > 1:
        passes.append({"pass": "sequence_parallel"})
    recipe = Recipe.model_validate({"name": "original", "summary": "The original.", "paper": "-", "passes": passes})
    return apply_recipe(trace(source), recipe, tp, sp=sp)[0]
