"""README.md of an output directory: the model card."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import yaml

from rewriter.common.model_class import is_found, takes_images
from rewriter.ir.ops import SequencePlan
from rewriter.ir.phases import PromptPhase
from rewriter.output.manifest import AdaptationEntry, Manifest, PerRank, QuantizedEntry, damage, gap_closed, healing
from rewriter.output.names import mesh_name, ranks_of
from rewriter.passes.selection import spans
from rewriter.passes.sequence.distributed_attention import ALGORITHMS

_METHODS = {
    "sft": "cross entropy on the targets of the data (supervised fine-tuning)",
    "distill": "divergence from the predictions of the original model (distillation)",
    "prompt weights": "the error of its keys and values; they are for prompts alone, and the original generates",
}
_LOSSES = {
    "original": "the original model",
    "before": "rewritten, before training",
    "after": "after training, as stored",
}


def model_card(manifest: Manifest, source: Path | None = None) -> str:
    """The card: front matter with base_model, the recipe verbatim, what was verified, drift, how to load.

    `source` is the directory of the original; the license in its card is taken over.
    """
    recipe, base = manifest.recipe, manifest.source.name.rpartition("/")[2]
    paper = f" See {recipe['paper']}." if recipe.get("paper") else ""
    made = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    listed = yaml.safe_dump(dict(recipe), sort_keys=False, allow_unicode=True, width=100).strip()
    parts = [
        _front_matter(manifest, source) + f"\n# {base}, rewritten by `{recipe.get('name', 'passes')}`",
        *_state(manifest),
        recipe.get("summary", "Rewritten by a list of passes.") + paper,
        *_loading(manifest),
        *_serving(manifest),
        *_prompt(manifest),
        *([] if manifest.per_rank is None else _per_rank(manifest.per_rank)),
        *([] if manifest.quantized is None else _quantized(manifest.quantized)),
        *_passes(manifest),
        *([] if manifest.adaptation is None else _adaptation(manifest.adaptation)),
        *_verification(manifest),
        f"## Recipe\n\n```yaml\n{listed}\n```",
        f"Made with {made}. `rewrite.json` holds the sha256 of every file.",
    ]
    return "\n\n".join(parts) + "\n"


def _front_matter(manifest: Manifest, source: Path | None) -> str:
    data: dict[str, object] = {"base_model": manifest.source.name, "base_model_relation": "finetune"}
    if source is not None and (source / "README.md").is_file():
        text = (source / "README.md").read_text(encoding="utf-8", errors="replace")[:20_000]
        front = re.match(r"---\r?\n(.*?)\r?\n---", text, re.DOTALL)
        if front and (named := re.search(r"^license:\s*([\w.+-]+)\s*$", front[1], re.MULTILINE)):
            data["license"] = named[1]
    data |= {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["rewriter"]}
    return f"---\n{yaml.safe_dump(data, sort_keys=False, allow_unicode=True)}---\n"


def _state(manifest: Manifest) -> Iterator[str]:
    """Sentences on the damage to the model and what heals it, or on what it was healed from and to."""
    if (lost := damage(manifest)) is not None:
        heals = f"`{healing('THIS_DIRECTORY')}` heals it by a light fine-tuning"
        yield f"> **Damaged until it is healed**: {lost}. {heals}."
    done = manifest.adaptation
    approximate = any(entry.kind == "approximating" for entry in manifest.passes)
    if done is None or done.options.get("from_scratch") or not approximate:
        return
    before, after, original = (done.losses.get(name) for name in ("before", "after", "original"))
    if before is None or after is None:
        return
    beside = "" if original is None else f"; the original's is {original:.4f}"
    word = "Not healed" if after >= before else "Healed"
    if original is not None and original < after < before and (closed := gap_closed(done.losses)) is not None:
        word = f"Healed by {closed:.0%}"
    yield (
        f"> **{word}** by a fine-tuning on {done.tokens:,} tokens: its loss was {before:.4f} nats per target after the "
        f"rewrite and is {after:.4f} now{beside}."
    )


def _loading(manifest: Manifest) -> Iterator[str]:
    modeling = manifest.adapted.modeling
    trust = "" if modeling is None else ", trust_remote_code=True"
    name = manifest.source.architecture
    auto = "AutoModelForImageTextToText" if takes_images(name) else "AutoModelForCausalLM"
    if modeling is None and not is_found(manifest.adapted.model_type, name):
        auto = name
    padding = manifest.padding if modeling is None else None
    said = {} if padding is None else padding.on_load
    trust += "".join(f", {setting}={value}" for setting, value in said.items())
    yield f"""## Load

```python
from transformers import {auto}

model = {auto}.from_pretrained("THIS DIRECTORY"{trust})
```"""
    if modeling is not None:
        adapters = "adapters, quantisation and " * (manifest.per_rank is None)
        yield _filled(
            f"`{modeling}` defines the model and needs transformers only. Parameter names are those of the base model, "
            f"so {adapters}trainers find them."
        )
    if said:
        names = " and ".join(f"`{setting}`" for setting in said)
        yield _filled(
            f"Its config's class refuses {names} in config.json, since heads have to divide the width there: it is "
            f"said on loading. vLLM: `--hf-overrides '{json.dumps(said)}'`; SGLang: "
            f"`--json-model-override-args '{json.dumps(said)}'`."
        )
    if manifest.runtime:
        ranks = ranks_of(manifest.mesh)
        yield f"Sharded, on {ranks} rank{'s' * (ranks > 1)}:\n\n```\nrewrite generate THIS_DIRECTORY --prompt TEXT\n```"
        if (plan := manifest.runtime[mesh_name(manifest.mesh)].sequence) is not None:
            yield from _tokens(SequencePlan(**plan.model_dump()), ranks)


def _tokens(plan: SequencePlan, ranks: int) -> Iterator[str]:
    """Training on tokens that ranks share."""
    exact, reads = replace(plan, quantized=None), "is exact over" if plan.quantized is None else "reads"
    text = (
        f"Each of {plan.ranks} ranks holds part of the tokens of a sequence, and attention {reads} all of them, as "
        f"{exact} (heads × rows × columns): {ALGORITHMS[plan.kind].travels(plan)}. "
    )
    if plan.quantized is not None:
        least = f" where a rank has {plan.min_bytes:,} bytes of them in a layer or more," if plan.min_bytes else ""
        text += (
            f"Keys and values travel as `{plan.quantized}`,{least} and all ranks attend with the dequantized ones: the "
            "checkpoint above, on one device, attends with exact ones, and differs from the sharded module by that. "
        )
    yield _filled(f"{text}Every rank passes the full sequences:")
    yield f"""```python
# torchrun --nproc-per-node {ranks} train.py
import rewriter

model = rewriter.load("THIS DIRECTORY")
logits = model(input_ids)  # of all tokens; gather=False leaves those of this rank's, with their indices
loss = model(input_ids, labels=labels).loss  # the mean over all tokens
```"""


def _serving(manifest: Manifest) -> Iterator[str]:
    tp = manifest.mesh.get("tp", 1)
    yield f"## Serve\n\n```\nrewrite serve THIS_DIRECTORY{f' --tp {tp}' * (tp > 1)}\n```"
    overlap = "in vLLM with rewriter's plugin, and not without it."
    if manifest.adapted.modeling is None:
        overlap = "none, for the recipe keeps the model's own wiring."
    yield _filled(
        "serves it by vLLM, or in one process by transformers, and says how many all-reduces overlap with computation: "
        + overlap
    )


def _prompt(manifest: Manifest) -> Iterator[str]:
    """The tokens that are rewired, where they are those of prompts alone."""
    phased = [p.options for p in manifest.passes if p.options.get("phase") == "prompt"]
    if not phased:
        return
    phase = PromptPhase(phased[0].get("exact_tail", 1), phased[0].get("exact_head", 0))
    yield "## The prompt alone"
    yield _filled(
        f"Tokens of {phase} are rewired. All others, and what is generated, are exact: computed as the base model "
        "computes them, from the keys and values that rewired tokens left. `model.generate` sees to it. A call of the "
        "model itself takes a batch of prompts where its cache is empty, and exact tokens behind a cache; "
        "`rewired` (bool [B, S]) says otherwise."
    )


def _per_rank(bound: PerRank) -> Iterator[str]:
    """The binding of the function to a number of ranks, and where it is not the original's."""
    yield "## Bound to its ranks"
    yield _filled(
        f"What this model computes depends on the number of ranks: **tp={bound.ranks}**. The sharded module runs on "
        "that many ranks only, and the checkpoint above computes all of them on one device, so that it can be tested "
        "and trained there. Its parameters, matrix products and key/value cache are the base model's (with fewer "
        "key/value heads than ranks, ranks keep copies); the residual stream, and what is computed from it element by "
        "element, is there once per rank. Projections that read a rank's own residual refuse adapters."
    )
    places: dict[tuple[str, str], list[int]] = {}
    for layer, blocks in enumerate(bound.pattern):
        for name, mode in blocks.items():
            places.setdefault((name, mode), []).append(layer)
    rows = [(spans(layers), name, bound.modes.get(mode, mode)) for (name, mode), layers in places.items()]
    yield _table(("layers", "block", "reduction"), rows)
    if bound.untied:
        yield f"{len(bound.untied)} norm weights are each rank's own: they hold {bound.ranks} vectors in a row."


def _quantized(sent: QuantizedEntry) -> Iterator[str]:
    """Messages that are quantized, those that are not, and which of the two models that concerns."""
    when = f" in calls of {sent.from_tokens:,} tokens or more, exact in smaller ones" if sent.min_bytes else ""
    yield "## Quantized between ranks"
    yield _filled(
        f"On ranks, {sent.reductions} all-reduces of a forward pass travel as `{sent.format}`{when}: "
        f"{sent.bytes_per_token:,} bytes per token with scales instead of {sent.exact_bytes_per_token:,} "
        f"({sent.bytes_per_token / sent.exact_bytes_per_token:.0%}). The checkpoint above, on one device, sums "
        "exactly: what it computes differs from that of the sharded module by the quantization, and by nothing else."
    )


def _passes(manifest: Manifest) -> Iterator[str]:
    yield "## What was done"
    packages = {name: f"{name} ({package})" for name, package in manifest.packages.items()}
    rows = [(packages.get(p.name, p.name), p.kind, p.summary) for p in manifest.passes]
    yield _table(
        ("pass", "kind", "what it did"), [*rows, *((s.name, "not applied", s.reason) for s in manifest.skipped)]
    )
    if notes := [f"- {note}" for p in manifest.passes for note in p.notes]:
        yield "\n".join(notes)
    yield _filled(
        "`rewrite diff THIS_DIRECTORY` compares it with its source: passes, layers, generated code, tensors. With "
        "`--html diff.html` it writes a page with drawings of the layers. `rewrite bisect THIS_DIRECTORY` finds what "
        "is wrong if `rewrite verify THIS_DIRECTORY` fails."
    )


def _adaptation(done: AdaptationEntry) -> Iterator[str]:
    """The data and method of the training, and the loss before and after, and that of the original."""
    yield "## Fine-tuning"
    yield _filled(
        f"Trained after the rewrite by {_METHODS.get(done.method, done.method)}, on {done.data}: {done.steps:,} steps "
        f"of {done.rows_per_step} rows of {done.length} tokens, {done.tokens:,} tokens in all. The data: "
        + ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in done.counts.items() if count)
        + "."
    )
    losses = [(_LOSSES.get(name, name), f"{value:.4f}") for name, value in done.losses.items()]
    yield _table(("loss, nats per target", ""), losses)
    yield _filled(f"Measured on {done.evaluation}.")
    yield _table(("setting", ""), {**done.options, **done.settings}.items())


def _verification(manifest: Manifest) -> Iterator[str]:
    verified = manifest.verification
    yield "## Verification"
    if verified.level == "none":
        yield "Nothing was compared (`--verify none`)."
        return
    if verified.checks:
        checks = [(c.name, f"{c.error:.1e}", f"{c.limit:.0e}") for c in verified.checks]
        yield _table(("compared", "largest relative error", "limit"), checks)
    if drift := verified.drift:
        yield f"Drift from the original before any fine-tuning, on {drift.tokens} tokens ({drift.text}):"
        perplexities = (f"{drift.perplexity_before:.4g}", f"{drift.perplexity_after:.4g}")
        head = ("KL divergence (nats)", "top-1 agreement", "perplexity before", "perplexity after")
        yield _table(head, [(f"{drift.kl:.4g}", f"{drift.top1_agreement:.1%}", *perplexities)])
    if verified.notes:
        yield "\n".join(f"- {note}" for note in verified.notes)


def _filled(text: str) -> str:
    return textwrap.fill(text, 120, break_on_hyphens=False)


def _table(head: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """A table in Markdown."""
    lines = [" | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in row) for row in (head, *rows)]
    lines.insert(1, " | ".join("---" for _ in head))
    return "\n".join(f"| {line} |" for line in lines)
