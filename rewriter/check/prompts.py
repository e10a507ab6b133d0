"""Prompts, as tokens of the model that is in a directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rewriter.check.drift import load_tokenizer, tokenizer_files
from rewriter.common.errors import RewriterError


def tokenizer_of(root: Path, trust_remote_code: bool) -> Any:
    """The tokenizer in `root`. Raises RewriterError where there is none, or transformers cannot load it."""
    tokenizer = load_tokenizer(str(root), trust_remote_code)
    if tokenizer is None:
        broken = tokenizer_files(root)
        what = f"transformers cannot load its tokenizer ({', '.join(broken)})" if broken else "it has no tokenizer"
        raise RewriterError(
            f"{root}: {what}, so text cannot become tokens. Copy the source's tokenizer files into it, or "
            "call rewriter.runtime.generate with token ids"
        )
    return tokenizer


def prompt_ids(root: Path, tokenizer: Any, prompt: str | Sequence[Mapping[str, Any]]) -> list[int]:
    """The tokens of a text, or of messages in the chat template, with the start of an answer after them.

    Raises RewriterError for messages without a template, or one that fails on them, and where there are no tokens.
    """
    if isinstance(prompt, str):
        ids = tokenizer(prompt).input_ids
    elif not tokenizer.chat_template:
        raise RewriterError(
            f"{root}: its tokenizer has no chat template, so messages cannot become a prompt. Give a text to continue "
            "(--prompt TEXT), or put the chat_template.jinja of the model's instruct version into it"
        )
    else:
        try:
            ids = tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, return_dict=True)["input_ids"]
        except Exception as error:  # templates raise what they like, jinja's own errors and Python's
            raise RewriterError(f"the chat template of {root} fails on these messages: {error}") from error
    if not ids:
        raise RewriterError(f"the prompt {str(prompt)!r} gives no tokens. Write at least one character")
    return list(ids)


def special_tokens(tokenizer: Any) -> set[str]:
    """The tokens that `skip_special_tokens` leaves out."""
    return {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
