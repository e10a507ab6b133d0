"""`rewrite generate DIR --prompt TEXT`: text from the sharded module, on real ranks."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rewriter.cli import options
from rewriter.common.errors import RewriterError
from rewriter.common.files import read_given
from rewriter.common.numbers import json_text
from rewriter.common.run_context import RunContext

if TYPE_CHECKING:
    from rewriter.runtime.generation.text_stream import Generation

_ONE = "Give one of --prompt TEXT, --message TEXT and --prompts FILE."


def generate(
    directory: options.Output,
    prompt: options.PromptText = None,
    message: options.Message = None,
    prompts: options.PromptFile = None,
    chat: options.Chat = False,
    tp: options.ChosenRanks = None,
    max_new_tokens: options.NewTokens = 64,
    temperature: options.SampleTemperature = 0.0,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    seed: options.Seed = 0,
    stop: options.Stop = None,
    compile: options.Compile = None,
    check: options.Check = False,
    trust_remote_code: options.TrustRemoteCode = False,
    json: options.GenerationJson = False,
) -> None:
    """Continue texts or answer messages on the number of ranks in the manifest, or on --tp. Streams the text."""
    given = [value for value in (prompt, message, prompts) if value is not None]
    if len(given) != 1:
        raise RewriterError(f"generate: {len(given) or 'no'} prompts. {_ONE}")
    for name, value in (("--top-p", top_p), ("--top-k", top_k)):
        if value is not None and not temperature:
            raise RewriterError(f"{name} {value}: without --temperature nothing is sampled. Add --temperature 1.")
    if "" in (stop or ()):
        raise RewriterError("--stop: it is empty. Give at least one character.")
    texts: list[Any] = read_prompts(prompts) if prompts is not None else [prompt if message is None else message]
    if chat or message is not None:
        texts = [[{"role": "user", "content": text}] if isinstance(text, str) else text for text in texts]

    from rewriter import api

    show = Display(texts, json)
    try:
        api.generate(
            directory, texts, tp=tp, max_new_tokens=max_new_tokens, stop=stop or [], temperature=temperature,
            top_p=top_p, top_k=top_k, seed=seed, compile=compile, check=check,
            context=RunContext(trust_remote_code=trust_remote_code), on_text=show,
        )  # fmt: skip
    finally:
        show.end_line()
    _note_damage(directory)


def _note_damage(directory: Path) -> None:
    """Say why the text may be poor."""
    from rewriter.output.manifest import damage, healing, read_manifest
    from rewriter.output.names import MANIFEST

    if (directory / MANIFEST).is_file() and (harm := damage(read_manifest(directory))) is not None:
        typer.echo(f"note: not healed: {harm}. Heal it: {healing(directory)}", err=True)


class Display:
    """Prints what comes: a text after its prompt, an answer after its message if there are several; or JSON."""

    def __init__(self, prompts: list[Any], json: bool) -> None:
        self._prompts, self._json, self._shown = prompts, json, -1
        self._open = False

    def __call__(self, index: int, piece: str, generation: Generation | None) -> None:
        if self._json:
            if generation is not None:
                typer.echo(json_text(asdict(generation)))
            return
        if index != self._shown:
            typer.echo("\n" * (index > 0) + self._heading(self._prompts[index]), nl=False)
            self._shown = index
        self._open = True
        typer.echo(piece, nl=False)
        if generation is not None:
            self.end_line()

    def end_line(self) -> None:
        """Ends a line that was begun."""
        if self._open:
            typer.echo()
        self._open = False

    def _heading(self, prompt: Any) -> str:
        if isinstance(prompt, str):
            return prompt
        return f"> {prompt[-1]['content']}\n" if len(self._prompts) > 1 else ""


def read_prompts(file: Path) -> list[Any]:
    """The prompts of a file: a text per line, or, in a .jsonl file, {"text": …} or {"messages": […]} per line.

    Raises RewriterError where it cannot be read as UTF-8, holds none, or a line is neither.
    """
    if file.suffix == ".jsonl":
        return _read_json_lines(file)
    text = read_given("--prompts", file, "Give a text file with one prompt per line.")
    return [line for line in text.split("\n") if line.strip()]


def _read_json_lines(file: Path) -> list[Any]:
    from rewriter.adapt.examples import Faults, read_examples

    faults = Faults()
    prompts: list[Any] = []
    for place, example in read_examples(file, faults):
        text, messages = example.get("text"), example.get("messages")
        if isinstance(text, str) and messages is None:
            prompts.append(text)
        elif text is None and _asks(messages):
            prompts.append(messages)
        else:
            faults.add(place, "neither a text nor messages that end with the user's or a tool's")
    faults.check()
    if not prompts:
        raise RewriterError(f"--prompts {file}: it is empty. Give a file with one JSON object per line.")
    return prompts


def _asks(messages: Any) -> bool:
    """True if they are messages with text that an answer may follow."""
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(isinstance(m, dict) and isinstance(m.get("content"), str) for m in messages)
        and messages[-1].get("role") in ("user", "tool")
    )
