"""README.md of an output directory: the model card."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import yaml

from rewriter.ir.ops import SequencePlan
from rewriter.output.manifest import AdaptationEntry, Manifest, PerRank, QuantizedEntry, damage, healing
from rewriter.output.names import mesh_name, ranks_of
from rewriter.passes.selection import spans
from rewriter.passes.sequence.distributed_attention import ALGORITHMS


def model_card(manifest: Manifest, source: Path | None = None) -> str:
    """The card: front matter with base_model, the recipe verbatim, what was verified, drift, how to load.

    `source` is the directory of the original; the license in its card is taken over.
    """
    recipe = manifest.recipe
    parts = [
        _front_matter(manifest, source),
        f"# {_base(manifest.source.name)}, rewritten by `{recipe.get('name', 'passes')}`\n",
        *_state(manifest),
        f"{recipe.get('summary', 'Rewritten by a list of passes.')} {_paper(recipe)}".rstrip() + "\n",
        "## Load\n",
        _loading(manifest),
        "## Serve\n",
        _serving(manifest),
        *([] if manifest.per_rank is None else ["## Bound to its ranks\n", _per_rank(manifest.per_rank)]),
        *([] if manifest.quantized is None else ["## Quantized between ranks\n", _quantized(manifest.quantized)]),
        "## What was done\n",
        _passes(manifest),
        _DIFF,
        *([] if manifest.adaptation is None else ["## Fine-tuning\n", _adaptation(manifest.adaptation)]),
        "## Verification\n",
        _verification(manifest),
        "## Recipe\n",
        f"```yaml\n{yaml.safe_dump(dict(recipe), sort_keys=False, allow_unicode=True, width=100).strip()}\n```\n",
    ]
    made = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    return "\n".join(parts) + f"\nMade with {made}. `rewrite.json` holds the sha256 of every file.\n"


_DIFF = """`rewrite diff THIS_DIRECTORY` compares it with its source: passes, layers, generated code, tensors. With
`--html diff.html` it writes a page with drawings of the layers. `rewrite bisect THIS_DIRECTORY` finds what is wrong if
`rewrite verify THIS_DIRECTORY` fails.
"""


def _state(manifest: Manifest) -> list[str]:
    """Sentences on the damage to the model and what heals it, or on what it was healed from and to."""
    if (found := damage(manifest)) is not None:
        how = f"`{healing('THIS_DIRECTORY')}` heals it by a light fine-tuning."
        return [f"> **Damaged until it is healed**: {found}. {how}\n"]
    done = manifest.adaptation
    if (
        done is None
        or done.options.get("from_scratch")
        or all(entry.kind != "approximating" for entry in manifest.passes)
    ):
        return []
    before, after, original = (done.losses.get(name) for name in ("before", "after", "original"))
    if before is None or after is None:
        return []
    beside = "" if original is None else f"; the original's is {original:.4f}"
    text = f"its loss was {before:.4f} nats per target after the rewrite and is {after:.4f} now{beside}"
    word = "Not healed" if after >= before else "Healed"
    if original is not None and original < after < before:
        word = f"Healed by {(before - after) / (before - original):.0%}"
    return [f"> **{word}** by a fine-tuning on {done.tokens:,} tokens: {text}.\n"]


def _front_matter(manifest: Manifest, source: Path | None) -> str:
    data: dict[str, object] = {"base_model": manifest.source.name, "base_model_relation": "finetune"}
    if license_name := _license(source):
        data["license"] = license_name
    data |= {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["rewriter"]}
    return f"---\n{yaml.safe_dump(data, sort_keys=False, allow_unicode=True)}---\n"


def _license(source: Path | None) -> str | None:
    if source is None or not (source / "README.md").is_file():
        return None
    text = (source / "README.md").read_text(encoding="utf-8", errors="replace")[:20_000]
    front = re.match(r"---\r?\n(.*?)\r?\n---", text, re.DOTALL)
    found = re.search(r"^license:\s*([\w.+-]+)\s*$", front[1], re.MULTILINE) if front else None
    return found[1] if found else None


def _base(name: str) -> str:
    return name.rpartition("/")[2]


def _paper(recipe: Mapping[str, object]) -> str:
    return f"See {recipe['paper']}." if recipe.get("paper") else ""


def _loading(manifest: Manifest) -> str:
    modeling = manifest.adapted.modeling
    trust = "" if modeling is None else ", trust_remote_code=True"
    lines = [
        "```python",
        "from transformers import AutoModelForCausalLM",
        "",
        f'model = AutoModelForCausalLM.from_pretrained("THIS DIRECTORY"{trust})',
        "```",
    ]
    if modeling is not None:
        lines += [
            "",
            f"`{modeling}` defines the model and needs transformers only. Parameter names are those of the base model,",
            f"so {'adapters, quantisation and ' * (manifest.per_rank is None)}trainers find them.",
        ]
    if manifest.runtime:
        ranks = ranks_of(manifest.mesh)
        lines += [
            "",
            f"Sharded, on {ranks} rank{'s' * (ranks > 1)}:",
            "",
            "```",
            "rewrite generate THIS_DIRECTORY --prompt TEXT",
            "```",
        ]
        lines += _tokens(manifest, ranks)
    return "\n".join(lines) + "\n"


_BY_PLUGIN = "in vLLM with rewriter's plugin, and not without it."


def _serving(manifest: Manifest) -> str:
    """The command that serves it, and whether anything overlaps there."""
    tp = manifest.mesh.get("tp", 1)
    command = "rewrite serve THIS_DIRECTORY" + f" --tp {tp}" * (tp > 1)
    text = (
        "serves it by vLLM, or in one process by transformers, and says how many all-reduces overlap with computation: "
        + ("none, for the recipe keeps the model's own wiring." if manifest.adapted.modeling is None else _BY_PLUGIN)
    )
    return f"```\n{command}\n```\n\n{textwrap.fill(text, 120, break_on_hyphens=False)}\n"


def _tokens(manifest: Manifest, ranks: int) -> list[str]:
    """How to train on tokens that ranks share; nothing where each holds all of them."""
    plan = manifest.runtime[mesh_name(manifest.mesh)].sequence
    if plan is None:
        return []
    used = SequencePlan(**plan.model_dump())
    exact, reads = replace(used, quantized=None), "is exact over" if used.quantized is None else "reads"
    return [
        "",
        f"Each of {used.ranks} ranks holds part of the tokens of a sequence, and attention {reads} all of them,",
        f"as {exact} (heads × rows × columns): {ALGORITHMS[used.kind].travels(used)}.",
        *_quantized_keys(used),
        "Every rank passes the full sequences:",
        "",
        "```python",
        "# torchrun --nproc-per-node " + f"{ranks} train.py",
        "import rewriter",
        "",
        'model = rewriter.load("THIS DIRECTORY")',
        "logits = model(input_ids)  # of all tokens; gather=False leaves those of this rank's, with their indices",
        "loss = model(input_ids, labels=labels).loss  # the mean over all tokens",
        "```",
    ]


def _per_rank(bound: PerRank) -> str:
    """What it means that the function is bound to a number of ranks, and where it is not the original's."""
    lines = [
        f"What this model computes depends on the number of ranks: **tp={bound.ranks}**. The sharded module runs on",
        "that many ranks only, and the checkpoint above computes all of them on one device, so that it can be tested",
        "and trained there. Its parameters, matrix products and key/value cache are the base model's (with fewer",
        "key/value heads than ranks, ranks keep copies); the residual stream, and what is computed from it element by",
        "element, is there once per rank. Projections that read a rank's own residual refuse adapters.",
        "",
        "| layers | block | reduction |",
        "|---|---|---|",
    ]
    places: dict[tuple[str, str], list[int]] = {}
    for layer, blocks in enumerate(bound.pattern):
        for name, mode in blocks.items():
            places.setdefault((name, mode), []).append(layer)
    lines += [
        f"| {spans(layers)} | {name} | {bound.modes.get(mode, mode)} |" for (name, mode), layers in places.items()
    ]
    if bound.untied:
        lines += [
            "",
            f"{len(bound.untied)} norm weights are each rank's own: they hold {bound.ranks} vectors in a row.",
        ]
    return "\n".join(lines) + "\n"


def _quantized_keys(plan: SequencePlan) -> list[str]:
    """That keys and values are quantized, and which of the two models that concerns."""
    if plan.quantized is None:
        return []
    least = f" where a rank has {plan.min_bytes:,} bytes of them in a layer or more," if plan.min_bytes else ""
    return [
        f"Keys and values travel as `{plan.quantized}`,{least} and all ranks attend with the dequantized ones: the",
        "checkpoint above, on one device, attends with exact ones, and differs from the sharded module by that.",
    ]


def _quantized(found: QuantizedEntry) -> str:
    """What is quantized, what is not, and which of the two models that concerns."""
    always = found.min_bytes == 0
    when = "" if always else f" in calls of {found.from_tokens:,} tokens or more, exact in smaller ones"
    part = found.bytes_per_token / found.exact_bytes_per_token
    text = (
        f"On ranks, {found.reductions} all-reduces of a forward pass travel as `{found.format}`{when}: "
        f"{found.bytes_per_token:,} bytes per token with scales instead of {found.exact_bytes_per_token:,} "
        f"({part:.0%}). The checkpoint above, on one device, sums exactly: what it computes differs from that of the "
        "sharded module by the quantization, and by nothing else."
    )
    return textwrap.fill(text, 120, break_on_hyphens=False) + "\n"


def _passes(manifest: Manifest) -> str:
    rows = ["| pass | kind | what it did |", "|---|---|---|"]
    rows += [f"| {p.name} | {p.kind} | {_cell(p.summary)} |" for p in manifest.passes]
    rows += [f"| {s.name} | not applied | {_cell(s.reason)} |" for s in manifest.skipped]
    notes = [f"- {note}" for p in manifest.passes for note in p.notes]
    return "\n".join([*rows, *([""] if notes else []), *notes]) + "\n"


def _verification(manifest: Manifest) -> str:
    verified = manifest.verification
    if verified.level == "none":
        return "Nothing was compared (`--verify none`).\n"
    lines: list[str] = []
    if verified.checks:
        lines += ["| compared | largest relative error | limit |", "|---|---|---|"]
        lines += [f"| {_cell(c.name)} | {c.error:.1e} | {c.limit:.0e} |" for c in verified.checks]
    if drift := verified.drift:
        lines += [
            "",
            f"Drift from the original before any fine-tuning, on {drift.tokens} tokens ({drift.text}):",
            "",
            "| KL divergence (nats) | top-1 agreement | perplexity before | perplexity after |",
            "|---|---|---|---|",
            f"| {drift.kl:.4g} | {drift.top1_agreement:.1%} "
            f"| {drift.perplexity_before:.4g} | {drift.perplexity_after:.4g} |",
        ]
    if verified.notes:
        lines += ["", *(f"- {note}" for note in verified.notes)]
    return "\n".join(lines).strip() + "\n"


_METHODS = {
    "sft": "cross entropy on the targets of the data (supervised fine-tuning)",
    "distill": "divergence from the predictions of the original model (distillation)",
}


def _adaptation(done: AdaptationEntry) -> str:
    """On what the model was trained and how, and its loss before and after, beside the original's."""
    what = (
        f"Trained after the rewrite by {_METHODS.get(done.method, done.method)}, on {done.data}: {done.steps:,} steps"
    )
    counts = [f"{count:,} {name.replace('_', ' ')}" for name, count in done.counts.items() if count]
    lines = [
        textwrap.fill(
            f"{what} of {done.rows_per_step} rows of {done.length} tokens, {done.tokens:,} tokens in all.", 120
        ),
        textwrap.fill(f"The data: {', '.join(counts)}.", 120),
        "",
        "| loss, nats per target | |",
        "|---|---|",
        *(f"| {_LOSSES.get(name, name)} | {value:.4f} |" for name, value in done.losses.items()),
        "",
        textwrap.fill(f"Measured on {done.evaluation}.", 120),
        "",
        "| setting | |",
        "|---|---|",
        *(f"| {name} | {_cell(str(value))} |" for name, value in {**done.options, **done.settings}.items()),
    ]
    return "\n".join(lines) + "\n"


_LOSSES = {
    "original": "the original model",
    "before": "rewritten, before training",
    "after": "after training, as stored",
}


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
