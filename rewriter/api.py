"""The public functions behind `import rewriter` and the command `rewrite`. Heavy imports wait until they are needed."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rewriter.common.errors import RewriterError, shortened
from rewriter.common.garbage import collector_paused
from rewriter.common.run_context import RunContext as RunContext
from rewriter.convert.save_options import Level
from rewriter.convert.save_options import SaveOptions as SaveOptions
from rewriter.predict.workload import Cluster as Cluster
from rewriter.predict.workload import Draft as Draft
from rewriter.predict.workload import Workload as Workload

if TYPE_CHECKING:
    import torch

    from rewriter.adapt.adaptation import AdaptReport
    from rewriter.adapt.options import AdaptOptions
    from rewriter.convert.report import ConversionReport
    from rewriter.explain.bisect.finding import Bisection
    from rewriter.explain.diff.differences import DiffReport
    from rewriter.explain.inspection import Inspection
    from rewriter.ir import Program
    from rewriter.output.manifest import Manifest
    from rewriter.predict.results import RecipeComparison
    from rewriter.predict.search.run import SearchResult
    from rewriter.predict.validation import Validation
    from rewriter.recipes import Recipe
    from rewriter.runtime.generation.text_stream import Generation

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


def convert(
    model: str | os.PathLike[str],
    recipe: str | os.PathLike[str] | Recipe,
    *,
    out: str | os.PathLike[str] | None = None,
    tp: int | Sequence[int] = 1,
    sp: int = 1,
    set: Mapping[str, Any] | None = None,
    options: SaveOptions = SaveOptions(),
    context: RunContext = RunContext(),
) -> ConversionReport:
    """Convert a checkpoint into a verified output directory, as `rewriter.convert.conversion.convert` says.

    convert("model", "ladder", tp=8, out="out", options=SaveOptions(dtype="bf16", verify="full"))
    """
    from rewriter.weights.early_copies import begun_copies

    with begun_copies(model, out, options.link) if options.copies_files else nullcontext() as early:
        with collector_paused():
            from rewriter.convert.conversion import convert

        return convert(model, recipe, out=out, tp=tp, sp=sp, set=set, options=options, context=context, early=early)


def save(
    program: Program,
    out: str | os.PathLike[str],
    name: str | None = None,
    options: SaveOptions = SaveOptions(),
    context: RunContext = RunContext(),
) -> ConversionReport:
    """Verify a rewritten program and write its output directory, as `rewriter.convert.conversion.save` says.

    `name`: of the base model in the card. Raises RewriterError and VerificationError as `convert` does.
    """
    from rewriter.convert.conversion import save

    return save(program, out, name, options, context)


def adapt(
    directory: str | os.PathLike[str],
    *,
    out: str | os.PathLike[str],
    data: str | os.PathLike[str] | None = None,
    eval: str | os.PathLike[str] | None = None,
    teacher: str | os.PathLike[str] | None = None,
    resume: bool = False,
    verify: Level = "shrunken",
    options: AdaptOptions | None = None,
    context: RunContext = RunContext(),
) -> AdaptReport:
    """Fine-tune what `rewrite` wrote, as `rewriter.adapt.adaptation.adapt` says.

    adapt("out", out="healed", data="train.jsonl")
    adapt("out", out="healed", data="self:100000", eval="heldout.jsonl", options=AdaptOptions(lora=8))
    """
    from rewriter.adapt.adaptation import adapt
    from rewriter.adapt.options import AdaptOptions

    return adapt(
        directory, data=data, out=out, evaluation=eval, teacher=teacher, resume=resume, verify=verify,
        options=options or AdaptOptions(), context=context,
    )  # fmt: skip


def verify(
    directory: str | os.PathLike[str], context: RunContext = RunContext(), *, images: bool = False
) -> dict[str, Any]:
    """Check a written output again: hashes, golden logits, real ranks. Raises VerificationError where it differs.

    With `images` also one random picture, by the adapted checkpoint and by hooks on the model that it was made of.
    """
    from rewriter.check.saved_output import verify

    table = verify(directory, context)
    if images:
        from rewriter.convert.picture_check import check_picture

        table |= check_picture(Path(directory), context).figures()
    return table


def diff(
    first: str | os.PathLike[str],
    second: str | os.PathLike[str] | None = None,
    *,
    recipe: str | os.PathLike[str] | Recipe | None = None,
    source: str | os.PathLike[str] | None = None,
    tp: int = 1,
    sp: int = 1,
    set: Mapping[str, Any] | None = None,
    tensors: bool = True,
    context: RunContext = RunContext(),
) -> DiffReport:
    """Differences that a recipe makes, or between two outputs, as `rewriter.explain.diff.compare.diff` says.

    diff("out"); diff("out", "other"); diff("model", recipe="ladder", tp=8).to_html()
    """
    from rewriter.explain.diff.compare import diff

    return diff(
        first, second, recipe=recipe, source=source, tp=tp, sp=sp, set=set, tensors=tensors, context=context
    )  # fmt: skip


def bisect(
    directory: str | os.PathLike[str],
    *,
    recipe: str | os.PathLike[str] | Recipe | None = None,
    source: str | os.PathLike[str] | None = None,
    weights: Literal["shrunken", "real"] | None = None,
    tp: int = 1,
    sp: int = 1,
    set: Mapping[str, Any] | None = None,
    context: RunContext = RunContext(),
) -> Bisection:
    """The first pass, layer and statement that computes something else than it should; `fault` is None where none does.

    `directory` is an output of rewriter, compared with what its recipe makes of its `source`; with `recipe` it is a
    model, and the recipe's passes are compared one by one with their references on `tp` × `sp` ranks. `weights` says
    what passes are run on: a shrunken copy (the default with `recipe`) or the real ones. Raises RewriterError for bad
    input.
    """
    if recipe is not None:
        if source is not None:
            raise RewriterError("--recipe bisects a model, which has no source: leave out --source or --recipe")
        from rewriter.explain.bisect.passes import bisect_recipe

        return bisect_recipe(directory, recipe, tp=tp, sp=sp, weights=weights or "shrunken", set=set, context=context)
    if (tp, sp) != (1, 1) or set:
        raise RewriterError("--tp, --sp and --set are for --recipe: an output has its own")
    from rewriter.explain.bisect.output import bisect_output

    return bisect_output(directory, source=source, weights=weights or "real", context=context)


def reshard(
    directory: str | os.PathLike[str], tp: int, verify: Level = "shrunken", context: RunContext = RunContext()
) -> dict[str, Any]:
    """Add the module of `tp` ranks to a written output, as `rewriter.convert.reshard.reshard` says."""
    from rewriter.convert.reshard import reshard

    return reshard(directory, tp, verify=verify, context=context)


def refresh(
    directory: str | os.PathLike[str], verify: Level = "shrunken", context: RunContext = RunContext()
) -> dict[str, Any]:
    """Write an output's code anew for the installed versions; its weights stay: `rewriter.convert.refresh.refresh`."""
    from rewriter.convert.refresh import refresh

    return refresh(directory, verify=verify, context=context)


def inspect(
    model: str | os.PathLike[str],
    recipe: str | os.PathLike[str] | Recipe | None = None,
    tp: int = 1,
    sp: int = 1,
    tokens: int | None = None,
    context: RunContext = RunContext(),
    set: Mapping[str, Any] | None = None,
) -> Inspection:
    """Reads, writes and communication of a model, and the changes that a recipe would make, from its config alone; with
    `sp` ranks that share the tokens of a sequence, for sequences of `tokens`."""
    from rewriter.explain.inspection import inspect

    return inspect(model, recipe, tp, sp, tokens, context, set)


def predict(
    model: Any,
    recipes: Sequence[str | os.PathLike[str] | Recipe] = ("tensor-parallel", "ladder"),
    workload: Workload = Workload(),
    cluster: Cluster = Cluster(),
    *,
    pareto: bool = False,
    exact: bool = False,
    engine: str = "vllm",
    draft: Draft | None = None,
    set: Mapping[str, Any] | None = None,
    context: RunContext = RunContext(),
) -> RecipeComparison:
    """Gains of recipes on a cluster, without one: seconds, tokens per second and exposed communication of each.

    predict("config.json", ["ladder"], Workload(tp=8, prompt=4096), Cluster("pcie-gen4")).predictions

    `model` is a directory, a bare config.json, a hub id, a config object or a traced Program; no weights are read.
    `recipes` are compared with the first one. `exact`: and over the best that an `engine` (vllm, sglang, tensorrt-llm)
    can do with the model as it is, drafts as in `draft` included. `pareto`: also other TP degrees and batches.

    Raises RewriterError for what a user can cause, as an unknown recipe or fabric, and where the first recipe cannot be
    applied; others that cannot are in the result's `skipped`.
    """
    with collector_paused():
        from rewriter.predict.entry import compare

        return compare(
            model, recipes, workload, cluster, pareto=pareto, exact=exact, engine=engine, draft=draft, set=set,
            context=context,
        )  # fmt: skip


def measure(
    model: str | os.PathLike[str],
    recipes: Sequence[str],
    workload: Workload = Workload(),
    cluster: Cluster = Cluster(),
    *,
    wire: bool = False,
    context: RunContext = RunContext(),
) -> RecipeComparison:
    """`predict`, with passes that one real rank measures on this machine's GPU, or its CPU, its peers emulated.

    `wire`: on the CPU, and what it sends and receives are real messages over TCP, to a process that plays its peers.
    The rank's shard is made from the checkpoint, or with random weights where only a config is there. Ranks fill the
    fabric's nodes one by one, so that the workload's `nodes` can only be as few as hold them; how a module is compiled,
    attends and is served are those of the real one. Raises RewriterError as `predict` does, where the shard does not
    fit in memory, and with the reason of a rank that fails.
    """
    from rewriter.predict.entry import measure

    return measure(model, recipes, workload, cluster, wire=wire, context=context)


def validate(
    model: str | os.PathLike[str],
    recipes: Sequence[str],
    workload: Workload = Workload(),
    cluster: Cluster = Cluster(),
    *,
    launches: int = 3,
    context: RunContext = RunContext(),
) -> Validation:
    """Run recipes on `tp` real ranks of this machine, and on one with emulated peers, and compare what they measure.

    Each is launched `launches` times, in turns. On GPUs the peers have the delays of the cluster's fabric; on CPUs
    those of one that is calibrated here first. Where this machine cannot run all ranks, the result's `reason` says why.
    Raises RewriterError as `measure` does.
    """
    from rewriter.predict.entry import validate

    return validate(model, recipes, workload, cluster, launches=launches, context=context)


def search(
    model: str | os.PathLike[str],
    workload: Workload = Workload(),
    cluster: Cluster = Cluster(),
    *,
    loss: float = 0.01,
    engine: str = "vllm",
    text: str | None = None,
    seed: int = 0,
    state: str | os.PathLike[str] | None = None,
    context: RunContext = RunContext(),
) -> SearchResult:
    """The fastest mix of rewrites whose loss is at most the share `loss` above the original's, and the front around it.

    What each rewrite of each layer costs alone is measured on the weights, what it gains is predicted as `predict` does
    (for this workload and cluster); mixes that are greedy in gain per cost are measured too, nearer and nearer to
    `loss`. `engine` is what serves; the result says what the mix gains over the best that it does with the model as it
    is. `text` is what is measured on, its end held out; by default the model writes one itself, from
    `seed`. A workload of sp=1 leaves out recipes that share tokens. `state`: a directory for what was measured, which
    an interrupted search, or one with another cluster or `loss`, goes on from.

    Raises RewriterError for an unknown fabric, a model without weights, fewer than two ranks, a model of which no layer
    can be rewritten, and a `loss` within which nothing is faster than plain tensor parallelism.
    """
    from rewriter.predict.search.run import Asked
    from rewriter.predict.search.run import search as run

    asked = Asked(workload, cluster, loss, text, seed=seed, engine=engine)
    return run(model, asked, state=None if state is None else Path(state), context=context)


def load(
    directory: str | os.PathLike[str],
    *,
    check: bool = False,
    dp: int = 1,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    compile: bool | None = None,
    **options: Any,
) -> torch.nn.Module:
    """The model in an output directory: this rank's module under torchrun, else the single-device Hugging Face model.

    Which of the two it is, is logged to "rewriter". `dp`: copies of the model, each on its own ranks. `device`, `dtype`
    and `compile` mean the same for both; further `options` are those of `rewriter.runtime.load`, or of transformers'
    `from_pretrained`. `check` compares the sha256 of every file that is read with the manifest; without it, sizes and
    headers are compared. The generated file runs only if it has the hash that the manifest says. Raises RewriterError
    for a directory that `rewrite` did not write, VerificationError for a generated file that was changed.
    """
    root = Path(directory)
    from rewriter.check.saved_output import check_files, check_headers, check_read_by_transformers
    from rewriter.output.manifest import read_manifest

    manifest = read_manifest(root)
    if "WORLD_SIZE" in os.environ and "RANK" in os.environ:
        check_files(root, manifest, [entry.module for entry in manifest.runtime.values()])
        from rewriter.runtime import load as load_rank

        _LOG.info("%s: the sharded runtime module", root)
        return load_rank(root, dp=dp, device=device, dtype=dtype, compile=compile, check=check, **options)
    if dp != 1:
        raise RewriterError(f"{root}: dp is for several ranks. Start this program with torchrun.")
    modeling = manifest.adapted.modeling
    generated = [name for name in manifest.files if name.endswith(".py") and "/" not in name]
    stray = sorted(p.name for p in root.glob("*.py") if p.name not in generated)
    if stray:
        raise RewriterError(f"{root / stray[0]}: not written by `rewrite`, and it could be run. Move it away.")
    check_files(root, manifest, None if check else [*generated, "config.json"])
    check_headers(root, manifest)
    check_read_by_transformers(root)
    from rewriter.common.model_class import auto_class, load_config

    _LOG.info("%s: the adapted checkpoint on one device, by transformers", root)
    options |= {} if dtype is None else {"dtype": dtype}
    config = load_config(root, modeling is not None)
    auto = auto_class(config)
    options |= {"config": config, "trust_remote_code": modeling is not None}
    model: torch.nn.Module = auto.from_pretrained(root, **options)
    model = model if device is None else model.to(device)
    if compile:
        model.compile()
    return model


def generate(
    directory: str | os.PathLike[str],
    prompts: Sequence[str | Sequence[Mapping[str, Any]]],
    *,
    tp: int | None = None,
    max_new_tokens: int = 64,
    stop: Sequence[str] = (),
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    compile: bool | None = None,
    check: bool = False,
    on_text: Callable[[int, str, Generation | None], None] = lambda *_: None,
    context: RunContext = RunContext(),
) -> list[Generation]:
    """Texts that continue `prompts`, one after another, on as many ranks as the manifest names, or on `tp` of them.

    A prompt is a text to continue, or the messages of a conversation, which the tokenizer's chat template makes one.
    It ends with the model's end of sequence, after `max_new_tokens`, or at the first of the strings `stop`. At
    `temperature` 0 the likeliest token is taken, else one is drawn, of the `top_k` likeliest and the likeliest that
    reach the probability `top_p`; every prompt starts from `seed`.
    On a CPU a decode step that was compiled before is taken from the user's cache; without one, it is compiled in the
    background for this and later generations, by a process that may go on after this call, of which "rewriter" is told
    as a warning. `compile=True` waits for it, False computes eagerly. On GPUs only True compiles.
    `check` compares the sha256 of every file with the manifest first, which reads all weights once more.
    `on_text(index, piece, None)` gets the text of prompt `index` as it comes, `on_text(index, piece, generation)` its
    last piece.

    Raises RewriterError for a directory without manifest, runtime module (for `tp`), tokenizer or, for messages, chat
    template, for a prompt that gives no tokens, tokens beyond the vocabulary or more than the model's table of
    positions has room for, and when a rank fails.
    """
    from rewriter.check.prompts import prompt_ids, special_tokens, tokenizer_of
    from rewriter.check.saved_output import check_files, config_of
    from rewriter.common.text_settings import check_positions, check_tokens, context_length, vocabulary_size
    from rewriter.convert.rewritten_source import complete_config
    from rewriter.emit.end_tokens import GENERATION, end_tokens, not_applied
    from rewriter.output.manifest import read_manifest
    from rewriter.output.names import mesh_name, ranks_of
    from rewriter.runtime.generation.text_stream import TextStream
    from rewriter.runtime.generation.worker import launch

    root = Path(directory)
    manifest = read_manifest(root)
    if not manifest.runtime:
        raise RewriterError(f"{root}: it has no runtime module. Rewrite the model again.")
    if not 0 <= seed < 2**63:
        raise RewriterError(f"--seed {seed}: expected a number from 0 to 2^63 - 1")
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
    tokenizer = tokenizer_of(root, context.trust_remote_code)
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
    request |= {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed, "compile": compile}
    for note in launch(root, ranks_of(mesh), request, on_token=on_token)["notes"]:
        _LOG.warning("%s", note)
    return [stream.result() for stream in streams]


def _other_degree(manifest: Manifest) -> str:
    if manifest.per_rank is not None:
        return "Its function is bound to its ranks: rewrite the original model for another number."
    return "`rewrite reshard DIR --tp N` adds one."


def export_onnx(
    directory: str | os.PathLike[str], file: str | os.PathLike[str], context: RunContext = RunContext()
) -> None:
    """Write the single-device model of an output directory as ONNX, with positions and without cache.

    Code that is not what its manifest says runs only where `context` trusts it.
    """
    from rewriter.emit.onnx import export_onnx

    export_onnx(Path(directory), Path(file), context)
