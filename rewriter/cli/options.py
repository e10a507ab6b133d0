"""Arguments and options that several commands share, with one wording."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

_Count = partial(typer.Option, min=1, metavar="N")
_File = partial(typer.Option, metavar="FILE")

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A Hugging Face model directory or a hub id.")]
Output = Annotated[Path, typer.Argument(metavar="DIR", help="A directory that `rewrite MODEL` wrote.")]
Ranks = Annotated[int, _Count("--tp", help="Tensor-parallel ranks.")]
Degrees = Annotated[
    str, typer.Option("--tp", metavar="N[,N…]", help="Tensor-parallel ranks; for several numbers, a module for each.")
]
AlsoRanks = Annotated[
    str | None,
    typer.Option(
        "--tp-also",
        metavar="N[,N…]",
        help="Recipes that pad sizes (fit-tp): further numbers of ranks to fit, without a module.",
    ),
]
ChosenRanks = Annotated[int | None, _Count("--tp", help="Tensor-parallel ranks.", show_default="as converted")]
SequenceRanks = Annotated[int, _Count("--sp", help="Sequence-parallel ranks: each holds part of the tokens.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run the model's own Python files; they never run otherwise.")
]
JsonList = Annotated[bool, typer.Option("--json", help="Print a JSON list.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout and nothing else.")]
Verbose = Annotated[
    bool, typer.Option("--verbose", help="Also print passes that changed nothing, and the source of each figure.")
]


def list_by_default(context: typer.Context, listing: Callable[..., None], **flags: bool) -> None:
    """Run a group without a command: `listing` with these flags. Raises BadParameter for a flag before a command."""
    if context.invoked_subcommand is None:
        listing(**flags)
    elif given := [name for name, value in flags.items() if value]:
        option = f"--{given[0].removeprefix('as_')}"
        raise typer.BadParameter(f"{option} comes after {context.invoked_subcommand}")


# --- of `predict` ---

ConfigModel = Annotated[
    str, typer.Argument(metavar="MODEL", help="A Hugging Face directory, a bare config.json or a hub id.")
]
Recipes = Annotated[
    list[str],
    typer.Option(metavar="NAME|FILE", help="A recipe. Repeatable: the others are compared with the first."),
]
FabricName = Annotated[str, typer.Option(metavar="NAME|FILE", help="The cluster; `rewrite fabrics` lists those known.")]
AllRanks = Annotated[int, _Count(help="Ranks in all.")]
Nodes = Annotated[int | None, _Count(help="Nodes of the ranks.", show_default="as few as hold the ranks")]
TokenRanks = Annotated[
    int | None, _Count(help="Ranks that share tokens, in recipes that shard sequences.", show_default="all")
]
Batch = Annotated[int, _Count(help="Sequences at a time.")]
Prompt = Annotated[int, typer.Option(min=1, metavar="TOKENS", help="Tokens of a prompt.")]
Generate = Annotated[int, typer.Option(min=1, metavar="TOKENS", help="Tokens to generate for each sequence.")]
WhatIf = Annotated[
    list[str] | None,
    typer.Option(
        metavar="CHANGE",
        help="Change the fabric: all_reduce=+5us, bandwidth=x0.5, jitter=x0, contention=40%. Repeatable.",
    ),
]
Library = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="The library of the collectives: nccl, vllm, …", show_default="the engine's"),
]
Graphed = Annotated[
    bool, typer.Option("--graphed/--eager", help="Launch a pass as one CUDA graph, or kernel by kernel.")
]
Compiled = Annotated[
    bool | None,
    typer.Option(
        "--compiled/--uncompiled", help="Fuse glue, or run every operator as a kernel.", show_default="if graphed"
    ),
]
AttentionKernels = Annotated[
    Literal["fused", "plain"],
    typer.Option("--attention", help="fused: one kernel; plain: products with scores in memory."),
]
AllLogits = Annotated[bool, typer.Option("--all-logits", help="A prefill computes logits of every position.")]
ServerIntervals = Annotated[
    bool, typer.Option("--served", help="Intervals include the differences between servers and schedulers.")
]
WeightFormat = Annotated[
    Literal["float8", "int8", "int4", "nvfp4", "mxfp4"] | None,
    typer.Option("--weights", help="Format of the layers' weights.", show_default="the config's"),
]
CacheFormat = Annotated[
    Literal["float8"] | None,
    typer.Option("--cache", help="Format of keys and values.", show_default="the model's dtype"),
]
PredictedEngine = Annotated[
    str,
    typer.Option(
        "--engine",
        metavar="[vllm|sglang|tensorrt-llm]",
        help="The engine whose exact options a recipe must beat.",
    ),
]
DraftTokens = Annotated[
    str | None,
    typer.Option("--draft", metavar="N:RATE", help="Speculative decoding, too: 3:0.7 is 3 tokens, 70 % accepted."),
]
Pareto = Annotated[bool, typer.Option("--pareto", help="Try other numbers of ranks and many batches too.")]
Measure = Annotated[bool, typer.Option("--measure", help="Run one rank for real on this machine, its peers emulated.")]
Wire = Annotated[
    bool,
    typer.Option("--wire", help="With --measure: on the CPU, its collectives real messages over TCP, at their pace."),
]
Validate = Annotated[
    bool, typer.Option("--validate", help="Run all ranks for real on this machine, and compare with the prediction.")
]
Html = Annotated[Path | None, _File(help="Write the report as one HTML file.")]

# --- of `search` ---

LossBudget = Annotated[
    str, typer.Option(metavar="SHARE", help="The largest rise in loss, as a share of the loss: 1% or 0.01.")
]
SearchText = Annotated[
    Path | None,
    _File("--calibration", help="Text to measure on, its end held out.", show_default="text that the model writes"),
]
SearchedRecipe = Annotated[
    Path | None, _File("--out", help="The recipe that the search finds.", show_default="MODEL-FABRIC-tpN.yaml")
]
SearchState = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Folder of measurements, read and written.", show_default="next to the recipe"),
]
SearchSeed = Annotated[
    int, typer.Option("--seed", min=0, metavar="N", help="Random seed of the text that the model writes.")
]

# --- of `diff` and `bisect` ---

SourceModel = Annotated[
    Path | None,
    typer.Option(
        "--source",
        metavar="DIR",
        help="The output's original model.",
        show_default="its place at conversion, or nearby",
    ),
]

# --- of `generate` ---

PromptText = Annotated[str | None, typer.Option("--prompt", metavar="TEXT", help="Text to continue.")]
Message = Annotated[
    str | None,
    typer.Option(metavar="TEXT", help="Message to an instruct model; its chat template makes the prompt."),
]
PromptFile = Annotated[
    Path | None,
    _File(
        "--prompts",
        help='Prompts, run one by one: one per line; in a .jsonl file {"text": …} or {"messages": […]} per line.',
    ),
]
Chat = Annotated[bool, typer.Option("--chat", help="Every prompt is a message: use the chat template.")]
NewTokens = Annotated[int, _Count(help="The most tokens to add to each prompt.")]
SampleTemperature = Annotated[
    float,
    typer.Option("--temperature", min=0, metavar="T", help="0: the likeliest token. Higher: sample more evenly."),
]
TopP = Annotated[
    float | None, typer.Option(min=0, max=1, metavar="P", help="Sample from the likeliest tokens that reach P in sum.")
]
TopK = Annotated[int | None, _Count(help="Sample from the N likeliest tokens.")]
Seed = Annotated[int, typer.Option(min=0, metavar="N", help="Random seed of the samples; every prompt starts from it.")]
Stop = Annotated[list[str] | None, typer.Option(metavar="TEXT", help="End before this text. Repeatable.")]
Compile = Annotated[
    bool | None,
    typer.Option(
        "--compile/--no-compile",
        help="Wait until the decode step is compiled, or never compile it.",
        show_default="meanwhile, for later runs",
    ),
]
Check = Annotated[
    bool, typer.Option("--check", help="First compare every file with its sha256: reads all weights once more.")
]
GenerationJson = Annotated[
    bool, typer.Option("--json", help="Print a JSON object per prompt: text, tokens, seconds. Nothing else on stdout.")
]

# --- of `serve` ---

Served = Annotated[
    Path, typer.Argument(metavar="DIR", help="A directory that `rewrite MODEL` wrote, or a plain checkpoint.")
]
ServingEngine = Annotated[
    Literal["vllm", "transformers"] | None,
    typer.Option(
        help="The server; that of transformers is one process.",
        show_default="vllm if it is installed, else transformers",
    ),
]
EngineArguments = Annotated[
    list[str] | None, typer.Argument(metavar="-- ARGS", help="Arguments of the engine, after --: -- --port 8001.")
]
DryServe = Annotated[bool, typer.Option("--dry-run", help="Print the engine's command; start nothing.")]
ServeJson = Annotated[bool, typer.Option("--json", help="With --dry-run: print a JSON object: command, notes.")]

# --- of a conversion ---

Recipe = Annotated[str, typer.Option(metavar="NAME|FILE", help="A name that `rewrite recipes` lists, or a YAML file.")]
ConvertedTo = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Output directory.", show_default="MODEL-RECIPE[-spN][-tpN]")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(metavar="PASS.OPTION=VALUE", help="Override a recipe's option: ladder.layers=last:20. Repeatable."),
]
Dtype = Annotated[
    Literal["bf16", "fp16", "fp32"] | None,
    typer.Option(help="Convert the weights to this dtype.", show_default="unchanged"),
]
Verify = Annotated[
    Literal["none", "shrunken", "full"],
    typer.Option(help="Check equality on a shrunken copy, on the real weights, too (full), or not at all."),
]
ReshardVerify = Annotated[
    Literal["none", "shrunken"], typer.Option(help="Check a shrunken copy, and ranks on the real weights; or nothing.")
]
RefreshVerify = Annotated[
    Literal["none", "shrunken"], typer.Option(help="Check a shrunken copy and the golden logits, or nothing.")
]
Calibration = Annotated[
    Path | None,
    _File(help="Text to measure drift and the sensitivity of drop_sync on.", show_default="a packaged text"),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan; write nothing.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue an interrupted run of the same conversion.")]
Link = Annotated[
    bool,
    typer.Option("--link", help="Hard-link unchanged files. A later save into DIR then changes the source."),
]
Materialize = Annotated[
    bool,
    typer.Option("--materialize", help="Write each rank's weights to one file per rank."),
]
Dequantize = Annotated[
    bool, typer.Option("--dequantize", help="Write quantized weights dequantized, in the config's dtype.")
]

DropUnused = Annotated[
    bool,
    typer.Option("--drop-unused", help="Leave out tensors that the model does not use.", show_default="keep them"),
]

# --- of `adapt` ---

Data = Annotated[
    str | None,
    _File(
        help='One {"messages": […]} or {"text": …} per line, a hub id, or self:N: the original writes N tokens.',
        show_default="self:N for --tokens N",
    ),
]
Tokens = Annotated[
    int | None,
    typer.Option(metavar="N", help="Tokens to train on; settings follow from them.", show_default="the data once"),
]
AdaptedTo = Annotated[Path, typer.Option(metavar="DIR2", help="Output directory.")]
EvaluationData = Annotated[str | None, _File(help="Data to measure on.", show_default="rows held out of --data")]
Teacher = Annotated[
    str | None,
    typer.Option(metavar="MODEL", help="The original model.", show_default="DIR's weights in the original wiring"),
]
Method = Annotated[
    Literal["sft", "distill"] | None,
    typer.Option(
        help="Learn from the data (sft), or from the original's predictions on the data (distill).",
        show_default="distill if the original is known",
    ),
]
Train = Annotated[
    Literal["all", "rewritten"] | None,
    typer.Option(
        help="Weights to train: all, or those from the first rewritten layer on.",
        show_default="all for sft, rewritten for distill if it can",
    ),
]
PromptWeights = Annotated[
    bool, typer.Option("--prompt-weights", help="Phased recipes: weights for prompts alone; the original generates.")
]
LinkTrained = Annotated[bool, typer.Option("--link", help="Hard-link files of weights that stay as they were.")]
Temperature = Annotated[float, typer.Option(metavar="T", help="distill: softens both predictions.")]
CrossEntropy = Annotated[float, typer.Option(metavar="WEIGHT", help="distill: weight of sft's loss in the sum.")]
Lora = Annotated[
    int, typer.Option(metavar="N", help="Train adapters of rank N, and merge them.", show_default="no adapters")
]
Base = Annotated[
    str | None, typer.Option(metavar="FORMAT", help="lora: keep the frozen weights quantized while training, as int8.")
]
Zero = Annotated[
    Literal["1", "2", "3", "plus-plus", "node-local"] | None,
    typer.Option(
        help="Data-parallel ranks shard the optimizer (1), with gradients (2), with weights (3); 3 with quantized "
        "messages between nodes (plus-plus), or with weights sharded inside each node (node-local).",
        show_default="nothing",
    ),
]
ExpertRanks = Annotated[int, typer.Option(metavar="N", help="Ranks that share the experts of a layer.")]
ExpertOrder = Annotated[
    Literal["D+E", "E+D"], typer.Option(help="Neighbouring ranks hold the same experts (D+E), or different ones (E+D).")
]
FromScratch = Annotated[bool, typer.Option("--from-scratch", help="Start from random weights.")]
Length = Annotated[
    int | None, typer.Option(metavar="TOKENS", help="Tokens of a row.", show_default="by the tokens of the run")
]
TooLong = Annotated[
    Literal["truncate", "split", "refuse"] | None,
    typer.Option(
        help="The treatment of an example longer than a row.", show_default="split for texts, truncate for others"
    ),
]
Packing = Annotated[bool, typer.Option(help="Put several examples into a row.")]
TrainerSettings = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=VALUE", help="A setting of transformers' Trainer: max_steps=1000. Repeatable."),
]
ResumeRun = Annotated[bool, typer.Option("--resume", help="Continue an interrupted run.")]
VerifyAdapted = Annotated[
    Literal["none", "shrunken", "full"], typer.Option(help="Checks of the result, as in `rewrite MODEL`.")
]
