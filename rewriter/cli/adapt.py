"""`rewrite adapt DIR --data FILE --out DIR2`: a rewritten checkpoint, healed by a light fine-tuning."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from rewriter.cli import launching, options


def adapt(
    context: typer.Context,
    directory: options.Output,
    data: Annotated[
        str, typer.Option(metavar="FILE", help='One {"messages": […]} or {"text": …} per line, or a hub id.')
    ],
    out: Annotated[Path, typer.Option(metavar="DIR2", help="Output directory.")],
    eval: Annotated[
        str | None, typer.Option(metavar="FILE", help="Data to measure on. Without it, some rows are held out.")
    ] = None,
    teacher: Annotated[
        str | None,
        typer.Option(metavar="ORIGINAL", help="The original model. Without it: DIR's weights, wired as they were."),
    ] = None,
    method: Annotated[
        Literal["sft", "distill"], typer.Option(help="Learn from the data, or from what the original predicts on them.")
    ] = "sft",
    temperature: Annotated[float, typer.Option(help="distill: softens both predictions.")] = 1.0,
    cross_entropy: Annotated[float, typer.Option(help="distill: weight of sft's loss in the sum.")] = 0.0,
    hidden_states: Annotated[
        float, typer.Option(help="distill: weight of the distance behind every layer in the sum.")
    ] = 0.0,
    refit: Annotated[
        int,
        typer.Option(metavar="N", help="First fit linear layers to the original's by regression on N tokens."),
    ] = 0,
    anneal: Annotated[
        int, typer.Option(metavar="N", help="Go from the original wiring to the recipe's over the first N steps.")
    ] = 0,
    anneal_order: Annotated[
        Literal["together", "first-to-last", "last-to-first"], typer.Option(help="All layers, or one after another.")
    ] = "together",
    lora: Annotated[int, typer.Option(metavar="R", help="Train adapters of rank R, and merge them.")] = 0,
    base: Annotated[
        str | None, typer.Option(metavar="FORMAT", help="lora: keep the frozen weights quantized while training: int8.")
    ] = None,
    zero: Annotated[
        Literal["1", "2", "3", "plus-plus", "node-local"] | None,
        typer.Option(
            help="What data-parallel ranks shard: optimizer, gradients, weights; with quantized messages between nodes "
            "(plus-plus), or weights inside each node (node-local)."
        ),
    ] = None,
    ep: Annotated[int, typer.Option(metavar="N", help="Ranks that share the experts of a layer.")] = 1,
    ep_order: Annotated[
        Literal["D+E", "E+D"],
        typer.Option(help="Neighbouring ranks hold the same experts (D+E), or different ones (E+D)."),
    ] = "D+E",
    tp: options.Ranks = 1,
    sp: options.SequenceRanks = 1,
    from_scratch: Annotated[bool, typer.Option("--from-scratch", help="Start from random weights.")] = False,
    length: Annotated[
        int | None, typer.Option(metavar="TOKENS", help="Tokens of a row. Without it: the model's positions, ≤ 4096.")
    ] = None,
    too_long: Annotated[
        Literal["truncate", "split", "refuse"], typer.Option(help="What becomes of an example longer than a row.")
    ] = "truncate",
    packing: Annotated[bool, typer.Option(help="Put several examples into a row.")] = True,
    set: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="A setting of transformers' Trainer: max_steps=1000. Repeatable."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run.")] = False,
    verify: Annotated[
        Literal["none", "shrunken", "full"], typer.Option(help="What of the result is checked, as in `rewrite MODEL`.")
    ] = "shrunken",
    json: options.Json = False,
) -> None:
    """Fine-tune DIR, which `rewrite` wrote, and write the result to DIR2.

    Settings are the recipe's, or the paper's, where --set does not say. With --tp, --sp or --ep it starts so many ranks
    on this machine; under torchrun, ranks beyond tp × sp are data-parallel.
    """
    if tp * sp * ep > 1 and not launching.is_rank():
        launching.start_ranks(context.obj, tp * sp * ep)
        return
    from rewriter.adapt.options import parse_settings
    from rewriter.cli.progress import ProgressLine

    settings = parse_settings(set or [])
    with ProgressLine() as progress:
        from transformers.utils import logging

        logging.disable_progress_bar()
        from rewriter import api

        report = api.adapt(
            directory, data=data, out=out, eval=eval, teacher=teacher, method=method, temperature=temperature,
            cross_entropy=cross_entropy, hidden_states=hidden_states, refit=refit, anneal=anneal,
            anneal_order=anneal_order, lora=lora, base=base, zero=zero, ep=ep, ep_order=ep_order, tp=tp, sp=sp,
            from_scratch=from_scratch, length=length, too_long=too_long, packing=packing, set=settings, resume=resume,
            verify=verify, progress=progress,
        )  # fmt: skip
    if not launching.is_first():
        return
    if json:
        typer.echo(report.to_json())
        return
    from rewriter.cli.rendering import print_adaptation

    print_adaptation(report.to_json())
