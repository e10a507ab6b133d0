"""The public functions behind `import rewriter` and the command `rewrite`. Heavy imports wait until they are needed."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rewriter.common.errors import RewriterError, shortened
from rewriter.common.garbage import collector_paused

if TYPE_CHECKING:
    from torch import nn

    from rewriter.adapt.adaptation import AdaptReport
    from rewriter.convert.report import ConversionReport
    from rewriter.explain.bisect.finding import Bisection
    from rewriter.explain.diff.differences import DiffReport
    from rewriter.ir import Program
    from rewriter.output.manifest import Manifest
    from rewriter.predict.results import RecipeComparison
    from rewriter.predict.validation import Validation
    from rewriter.recipes import Recipe
    from rewriter.runtime.generation.text_stream import Generation
    from rewriter.search.result import SearchResult

_LOG = logging.getLogger("rewriter")


def rewrite(
    program: Program,
    recipe: str | os.PathLike[str] | Recipe,
    tp: int = 1,
    set: Mapping[str, Any] | None = None,
    disable: Collection[str] = (),
    text: str | None = None,
    sp: int = 1,
) -> Program:
    """Apply a recipe (a shipped name, a .yaml file, or a Recipe) to a traced program for `sp` × `tp` ranks.

    Each of the `tp` ranks holds part of the heads and channels, each of the `sp` ranks part of a sequence's tokens.
    The result is a new Program.

    `set` replaces options, as in `{"ladder.layers": "last:20"}`; `disable` leaves out passes by name. A
    `drop_sync` that does not say which layers is measured on the program's weights, with `text` or the packaged
    calibration text. Raises RewriterError for an unknown recipe, pass or option (with the nearest name), and when a
    pass cannot be applied.
    """
    from rewriter.convert.pass_measurements import calibrate
    from rewriter.recipes.apply import apply_recipe, load_recipe

    loaded = calibrate(load_recipe(recipe, set), program, tp, text)
    return apply_recipe(program, loaded, tp, disable, sp)[0]


def convert(model: str | os.PathLike[str], recipe: str | os.PathLike[str] | Recipe, **options: Any) -> ConversionReport:
    """Convert a checkpoint into a verified output directory: the options are those of `convert.conversion.convert`."""
    from rewriter.weights.early_copies import begun_copies

    with begun_copies(model, **options) as early:
        with collector_paused():
            from rewriter.convert.conversion import convert

        return convert(model, recipe, early=early, **options)


def save(program: Program, out: str | os.PathLike[str], **options: Any) -> ConversionReport:
    """Verify a rewritten program and write its output directory: `rewriter.convert.conversion.save` has the options."""
    from rewriter.convert.conversion import save

    return save(program, out, **options)


def adapt(
    directory: str | os.PathLike[str],
    *,
    out: str | os.PathLike[str],
    data: str | os.PathLike[str] | None = None,
    eval: str | os.PathLike[str] | None = None,
    teacher: str | os.PathLike[str] | None = None,
    resume: bool = False,
    verify: Literal["none", "shrunken", "full"] = "shrunken",
    set: Mapping[str, Any] | None = None,
    progress: Callable[..., None] | None = None,
    **options: Any,
) -> AdaptReport:
    """Fine-tune what `rewrite` wrote: `rewriter.adapt.adaptation.adapt`. The other arguments are its `Options`.

    adapt("out", out="healed", data="train.jsonl"); adapt("out", out="healed", data="self:100000", eval="heldout.jsonl")
    """
    from rewriter.adapt.adaptation import adapt
    from rewriter.adapt.options import Options

    chosen = Options(**options, settings=dict(set or {}))
    watched = {} if progress is None else {"progress": progress}
    return adapt(
        directory, data=data, out=out, evaluation=eval, teacher=teacher, resume=resume, verify=verify, options=chosen,
        **watched,
    )  # fmt: skip


def verify(directory: str | os.PathLike[str], *, progress: Callable[..., None] = lambda *_: None) -> dict[str, Any]:
    """Check a written output again: hashes, golden logits, real ranks. Raises VerificationError where it differs."""
    from rewriter.check.saved_output import verify

    return verify(directory, progress=progress)


def diff(first: str | os.PathLike[str], second: str | os.PathLike[str] | None = None, **options: Any) -> DiffReport:
    """Differences that a recipe makes, or between two outputs: `rewriter.explain.diff.compare.diff` has the options.

    diff("out"); diff("out", "other"); diff("model", recipe="ladder", tp=8).to_html()
    """
    from rewriter.explain.diff.compare import diff

    return diff(first, second, **options)


def bisect(
    directory: str | os.PathLike[str],
    *,
    recipe: str | os.PathLike[str] | Recipe | None = None,
    source: str | os.PathLike[str] | None = None,
    weights: Literal["shrunken", "real"] | None = None,
    tp: int = 1,
    sp: int = 1,
    set: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    progress: Callable[..., None] = lambda *_: None,
) -> Bisection:
    """The first pass, layer and statement that computes something else than it should; `fault` is None where none does.

    `directory` is an output of rewriter, compared with what its recipe makes of its `source`; with `recipe` it is a
    model, and the recipe's passes are compared one by one with their references on `tp` × `sp` ranks. `weights` says
    what passes are run on: a shrunken copy (the default with `recipe`) or the real ones. Raises RewriterError for bad
    input.
    """
    common: dict[str, Any] = dict(trust_remote_code=trust_remote_code, progress=progress)
    if recipe is not None:
        if source is not None:
            raise RewriterError("--recipe bisects a model, which has no source: leave out --source or --recipe")
        from rewriter.explain.bisect.passes import bisect_recipe

        return bisect_recipe(directory, recipe, tp=tp, sp=sp, weights=weights or "shrunken", set=set, **common)
    if (tp, sp) != (1, 1) or set:
        raise RewriterError("--tp, --sp and --set are for --recipe: an output has its own")
    from rewriter.explain.bisect.output import bisect_output

    return bisect_output(directory, source=source, weights=weights or "real", **common)


def reshard(directory: str | os.PathLike[str], tp: int, **options: Any) -> dict[str, Any]:
    """Add the module of `tp` ranks to a written output; `options` are those of `rewriter.convert.reshard.reshard`."""
    from rewriter.convert.reshard import reshard

    return reshard(directory, tp, **options)


def refresh(directory: str | os.PathLike[str], **options: Any) -> dict[str, Any]:
    """Write an output's code anew for the installed versions; its weights stay: `rewriter.convert.refresh.refresh`."""
    from rewriter.convert.refresh import refresh

    return refresh(directory, **options)


def inspect(
    model: str | os.PathLike[str],
    recipe: str | os.PathLike[str] | Recipe | None = None,
    tp: int = 1,
    trust_remote_code: bool = False,
    sp: int = 1,
    tokens: int | None = None,
) -> Any:
    """What a model reads, writes and communicates, and what a recipe would change, from its config alone.

    With `sp` ranks that share the tokens of a sequence: for sequences of `tokens`.
    """
    from rewriter.explain.inspection import inspect

    return inspect(model, recipe, tp, trust_remote_code=trust_remote_code, sp=sp, tokens=tokens)


def predict(
    model: Any,
    recipes: Sequence[str | os.PathLike[str] | Recipe] = ("tensor-parallel", "ladder"),
    *,
    fabric: Any = "h100-nvlink",
    tp: int = 8,
    sp: int | None = None,
    nodes: int | None = None,
    batch: int = 1,
    prompt: int = 1024,
    generate: int = 512,
    graphed: bool = True,
    compiled: bool | None = None,
    attention: Literal["fused", "plain"] = "fused",
    all_logits: bool = False,
    served: bool = False,
    what_if: Sequence[str] = (),
    library: str | None = None,
    pareto: bool = False,
    baselines: bool = False,
    set: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> RecipeComparison:
    """What recipes gain on a cluster, without one: seconds, tokens per second and exposed communication of each.

    `model` is a directory, a bare config.json, a hub id, a config object or a traced Program; no weights are read.
    `recipes` run on `tp` ranks in all, and are compared with the first one; those that share tokens have `sp` ranks do
    that (None: all), the rest share heads. `fabric`: a name of `rewriter.fabric.fabrics()`, a YAML file or a Fabric;
    `nodes`: over how many of its nodes the ranks are spread (None: as few as hold them). `batch` sequences of `prompt`
    tokens get `generate` more. `graphed`: the module is replayed from CUDA graphs; otherwise the host launches each
    kernel. `compiled`: a compiler fuses its glue (None: where it is graphed). `attention`: one kernel, or "plain":
    products, with scores in memory and keys repeated for each query head. `all_logits`: a prefill computes those of
    every position. `served`: intervals are of what a server's clients measure. `what_if`: changes such as
    "all_reduce=+5us", "bandwidth=x0.5", "jitter=x0". `library`: whose collectives ("nccl", "vllm", "fused", "best"),
    one of the fabric's `backends` (None: its first). `baselines`: also what users have today. `pareto`: also other TP
    degrees and batches.

    Raises RewriterError for what a user can cause, as an unknown recipe or fabric, and where the first recipe cannot be
    applied; others that cannot are in the result's `skipped`.
    """
    with collector_paused():
        from rewriter.predict.entry import compare
        from rewriter.predict.workload import Cluster, Workload

        workload = Workload(batch, prompt, generate, graphed, tp, sp, nodes, compiled, attention, all_logits, served)
        return compare(
            model, recipes, workload, Cluster(fabric, tuple(what_if), library), pareto=pareto, baselines=baselines,
            set=set, trust_remote_code=trust_remote_code,
        )  # fmt: skip


def measure(
    model: str | os.PathLike[str],
    recipes: Sequence[str],
    *,
    fabric: str = "h100-nvlink",
    library: str | None = None,
    what_if: Sequence[str] = (),
    wire: bool = False,
    trust_remote_code: bool = False,
    **workload: Any,
) -> RecipeComparison:
    """`predict`, with passes that one real rank measures on this machine's GPU, or its CPU, its peers emulated.

    `wire`: on the CPU, and what it sends and receives are real messages over TCP, to a process that plays its peers.
    The rank's shard is made from the checkpoint, or with random weights where only a config is there. `workload`: tp,
    sp, nodes, batch, prompt, generate and graphed, as in `predict`. Ranks fill the fabric's nodes one by one, so that
    `nodes` can only be as few as hold them. Raises RewriterError as `predict` does, where the shard does not fit in
    memory, and with the reason of a rank that fails.
    """
    from rewriter.predict.entry import measure
    from rewriter.predict.workload import Cluster, Workload

    cluster = Cluster(fabric, tuple(what_if), library)
    return measure(model, recipes, Workload(**workload), cluster, wire=wire, trust_remote_code=trust_remote_code)


def validate(
    model: str | os.PathLike[str],
    recipes: Sequence[str],
    *,
    fabric: str = "h100-nvlink",
    library: str | None = None,
    trust_remote_code: bool = False,
    launches: int = 3,
    **workload: Any,
) -> Validation:
    """Run recipes on `tp` real ranks of this machine, and on one with emulated peers, and compare what they measure.

    `workload`: tp, sp, batch, prompt, generate and graphed, as in `predict`. Each is launched `launches` times, in
    turns. On GPUs the peers have the delays of `fabric`; on CPUs those of one that is calibrated here first. Where this
    machine cannot run all ranks, the result's `reason` says why. Raises RewriterError as `measure` does.
    """
    from rewriter.predict.entry import validate
    from rewriter.predict.workload import Cluster, Workload

    return validate(
        model, recipes, Workload(**workload), Cluster(fabric, (), library), trust_remote_code=trust_remote_code,
        launches=launches,
    )  # fmt: skip


def search(
    model: str | os.PathLike[str],
    *,
    fabric: Any = "h100-nvlink",
    tp: int = 8,
    loss: float = 0.01,
    text: str | None = None,
    sp: int | None = None,
    nodes: int | None = None,
    batch: int = 1,
    prompt: int = 1024,
    generate: int = 512,
    graphed: bool = True,
    what_if: Sequence[str] = (),
    library: str | None = None,
    seed: int = 0,
    state: str | os.PathLike[str] | None = None,
    trust_remote_code: bool = False,
    progress: Callable[..., None] | None = None,
) -> SearchResult:
    """The fastest mix of rewrites whose loss is at most the share `loss` above the original's, and the front around it.

    What each rewrite of each layer costs alone is measured on the weights, what it gains is predicted as `predict` does
    (whose arguments the others are); the best mixes by both are measured too, until what is estimated and what is
    measured agree. `text` is what is measured on, its end held out; by default the model writes one itself, from
    `seed`. `sp`: as in `predict`; 1 leaves out recipes that share tokens. `state`: a directory for what was measured,
    which an interrupted search, or one with another fabric or `loss`, goes on from.

    Raises RewriterError for an unknown fabric, a model without weights, fewer than two ranks, a model of which no layer
    can be rewritten, and a `loss` within which nothing is faster than plain tensor parallelism.
    """
    from rewriter.predict.workload import Cluster, Workload
    from rewriter.search.run import Asked
    from rewriter.search.run import search as run

    asked = Asked(
        Workload(batch, prompt, generate, graphed, tp, sp, nodes), Cluster(fabric, tuple(what_if), library), loss, text,
        seed=seed,
    )  # fmt: skip
    kept = None if state is None else Path(state)
    watched = {} if progress is None else {"progress": progress}
    return run(model, asked, state=kept, trust_remote_code=trust_remote_code, **watched)


def load(directory: str | os.PathLike[str], *, check: bool = False, **options: Any) -> nn.Module:
    """The model in an output directory: this rank's module under torchrun, else the single-device Hugging Face model.

    `options` go to `rewriter.runtime.load` (dp, device, dtype, compile) or to `from_pretrained`; device, dtype and
    compile mean the same for both. `check` compares the sha256 of every file that is read with the manifest; without
    it, sizes and headers are compared. Which of the two it is, is logged to "rewriter". The generated file runs only if
    it has the hash that the manifest says. Raises RewriterError for a directory that `rewrite` did not write,
    VerificationError for a generated file that was changed.
    """
    root = Path(directory)
    from rewriter.check.saved_output import check_files, check_headers, check_read_by_transformers
    from rewriter.output.manifest import read_manifest

    manifest = read_manifest(root)
    if "WORLD_SIZE" in os.environ and "RANK" in os.environ:
        check_files(root, manifest, [entry.module for entry in manifest.runtime.values()])
        from rewriter.runtime import load as load_rank

        _LOG.info("%s: the sharded runtime module", root)
        return load_rank(root, check=check, **options)
    if options.pop("dp", 1) != 1:
        raise RewriterError(f"{root}: dp is for several ranks. Start this program with torchrun.")
    modeling = manifest.adapted.modeling
    generated = [name for name in manifest.files if name.endswith(".py") and "/" not in name]
    stray = sorted(p.name for p in root.glob("*.py") if p.name not in generated)
    if stray:
        raise RewriterError(f"{root / stray[0]}: not written by `rewrite`, and it could be run. Move it away.")
    check_files(root, manifest, None if check else [*generated, "config.json"])
    check_headers(root, manifest)
    check_read_by_transformers(root)
    from transformers import AutoModelForCausalLM

    _LOG.info("%s: the adapted checkpoint on one device, by transformers", root)
    device, compiled = options.pop("device", None), options.pop("compile", False)
    model: nn.Module = AutoModelForCausalLM.from_pretrained(root, trust_remote_code=modeling is not None, **options)
    model = model if device is None else model.to(device)
    if compiled:
        model.compile()
    return model


def generate(
    directory: str | os.PathLike[str],
    prompts: Sequence[str | Sequence[Mapping[str, Any]]],
    *,
    tp: int | None = None,
    max_new_tokens: int = 64,
    stop: Sequence[str] = (),
    compile: bool | None = None,
    check: bool = False,
    trust_remote_code: bool = False,
    on_text: Callable[[int, str, Generation | None], None] = lambda *_: None,
    **sampling: Any,
) -> list[Generation]:
    """What follows each of `prompts`, one after another, on as many ranks as the manifest names, or on `tp` of them.

    A prompt is a text to continue, or the messages of a conversation, which the tokenizer's chat template makes one.
    It ends with the model's end of sequence, after `max_new_tokens`, or at the first of the strings `stop`. `sampling`:
    temperature (0, the default, takes the likeliest token), top_k, top_p and seed, which every prompt starts from.
    On a CPU a decode step that was compiled before is taken from the user's cache; without one, it is compiled in the
    background for this and later generations, by a process that may go on after this call, of which "rewriter" is told
    as a warning. `compile=True` waits for it, False computes eagerly. On GPUs only True compiles.
    `check` compares the sha256 of every file with the manifest first, which reads all weights once more.
    `trust_remote_code` lets a tokenizer run Python code that it brings.
    `on_text(index, piece, None)` gets the text of prompt `index` as it comes, `on_text(index, piece, generation)` its
    last piece.

    Raises RewriterError for a directory without manifest, runtime module (for `tp`), tokenizer or, for messages, chat
    template, for a prompt that gives no tokens, tokens beyond the vocabulary or more than the model's table of
    positions has room for, and when a rank fails.
    """
    from rewriter.check.saved_output import check_files, config_of
    from rewriter.common.text_settings import check_positions, check_tokens, context_length, vocabulary_size
    from rewriter.convert.rewritten_source import complete_config
    from rewriter.emit.end_tokens import GENERATION, end_tokens, not_applied
    from rewriter.measure.prompts import prompt_ids, special_tokens, tokenizer_of
    from rewriter.output.manifest import read_manifest
    from rewriter.output.names import mesh_name, ranks_of
    from rewriter.runtime.generation.text_stream import TextStream
    from rewriter.runtime.generation.worker import launch

    root = Path(directory)
    manifest = read_manifest(root)
    if not manifest.runtime:
        raise RewriterError(f"{root}: it has no runtime module. Rewrite the model again.")
    if not 0 <= sampling.get("seed", 0) < 2**63:
        raise RewriterError(f"--seed {sampling['seed']}: expected a number from 0 to 2^63 - 1")
    mesh = manifest.mesh if tp is None else {**manifest.mesh, "tp": tp}
    if mesh_name(mesh) not in manifest.runtime:
        made = ", ".join(manifest.runtime)
        raise RewriterError(f"{root}: no runtime module for {mesh_name(mesh)}, only {made}. {_other_degree(manifest)}")
    check_files(root, manifest, None if check else [entry.module for entry in manifest.runtime.values()])
    written = config_of(root)
    config = complete_config(written, manifest)
    if max_new_tokens > (positions := context_length(config)):
        raise RewriterError(
            f"--max-new-tokens {max_new_tokens}: expected at most {positions:,}, which is how many positions the model "
            "has"
        )
    ends, filling = end_tokens(root, written)
    if asked := not_applied(root):
        _LOG.warning("%s asks for %s, which is not applied", GENERATION, ", ".join(asked))
    tokenizer = tokenizer_of(root, trust_remote_code)
    ids = [prompt_ids(root, tokenizer, prompt) for prompt in prompts]
    for prompt, own in zip(prompts, ids, strict=True):
        check_tokens(f"the prompt {shortened(prompt)!r}", own, vocabulary_size(config), tokenizer)
        check_positions(len(own), max_new_tokens, manifest.positions)
    # A special token is no part of the text, and so ends it by its id.
    ends = [*ends, *tokenizer.convert_tokens_to_ids([s for s in stop if s in special_tokens(tokenizer)])]
    streams = [TextStream(tokenizer, prompt, limit=max_new_tokens, ends=ends, stop=stop) for prompt in ids]

    def on_token(index: int, token: int, seconds: float, compiling: float) -> bool:
        stream = streams[index]
        piece = stream.add(token, seconds, compiling)
        if piece or stream.done:
            on_text(index, piece, stream.result() if stream.done else None)
        return stream.done

    request = {"prompts": ids, "max_new_tokens": max_new_tokens, "eos_token_ids": ends, "pad_token_id": filling}
    request |= {**sampling, "compile": compile}
    for note in launch(root, ranks_of(mesh), request, on_token=on_token)["notes"]:
        _LOG.warning("%s", note)
    return [stream.result() for stream in streams]


def _other_degree(manifest: Manifest) -> str:
    if manifest.per_rank is not None:
        return "Its function is bound to its ranks: rewrite the original model for another number."
    return "`rewrite reshard DIR --tp N` adds one."


def export_onnx(
    directory: str | os.PathLike[str], file: str | os.PathLike[str], *, trust_remote_code: bool = False
) -> None:
    """Write the single-device model of an output directory as ONNX, with positions and without cache. Code that is not
    what its manifest says runs only with `trust_remote_code`."""
    from rewriter.emit.onnx import export_onnx

    export_onnx(Path(directory), Path(file), trust_remote_code=trust_remote_code)
