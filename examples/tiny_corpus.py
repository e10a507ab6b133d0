"""The text, the split and the byte-level tokenizer of the tiny Llama that `train_tiny.py` trains.

The text is the source of the running interpreter's standard library, without what would spoil it: tests (more than the
rest together), generated tables (their regularity would flatter the loss) and files that describe the machine on which
the interpreter was built.
"""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

BOS, EOS, PAD = 256, 257, 258
"""Ids of the three special tokens; the ids below 256 are the bytes themselves."""

SPECIAL_TOKENS = {"<|bos|>": BOS, "<|eos|>": EOS, "<|pad|>": PAD}
VOCABULARY = 264
"""256 bytes, 3 special tokens and 5 unused rows, so that 2, 4 and 8 ranks divide the vocabulary."""

_EXCLUDED_DIRECTORIES = {
    "site-packages", "dist-packages", "__pycache__",  # not the standard library's source
    "test", "tests", "idle_test",
    "encodings", "pydoc_data",  # generated character tables and help topics
}  # fmt: skip
_EXCLUDED_PREFIXES = ("_sysconfigdata", "config-")  # paths and flags of the machine that built the interpreter
CORPUS_RULE = (
    "every `*.py` of the standard library outside `test`, `tests`, `idle_test`, `encodings`, `pydoc_data` and "
    "`site-packages`, and without `_sysconfigdata*` and `config-*`"
)

Corpus = dict[str, str]
"""Relative POSIX path -> text."""


def standard_library() -> Corpus:
    """Every source file taken, by its path relative to the library's root, in path order; newlines are `\\n`.

    Raises:
        FileNotFoundError: the interpreter has no standard library as files (a zipped or frozen one).
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files: Corpus = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if _EXCLUDED_DIRECTORIES.isdisjoint(parts) and not any(part.startswith(_EXCLUDED_PREFIXES) for part in parts):
            files["/".join(parts)] = path.read_text(encoding="utf-8")
    if not files:
        raise FileNotFoundError(f"{root}: no *.py files; run with an interpreter whose standard library is on disk.")
    return files


def licence() -> str:
    """The licence of the text as the interpreter ships it; its copyright notice where it ships none."""
    library = Path(sysconfig.get_paths()["stdlib"])
    for directory in (library, library.parent):
        if (directory / "LICENSE.txt").is_file():
            return (directory / "LICENSE.txt").read_text(encoding="utf-8")
    return sys.copyright


def is_held_out(relative_path: str) -> bool:
    """Whether a file is held out: one path in 20, chosen by SHA-256, so that the choice needs no list and no seed."""
    return int.from_bytes(hashlib.sha256(relative_path.encode()).digest(), "big") % 20 == 0


def split(files: Corpus) -> tuple[Corpus, Corpus]:
    """(training files, held-out files), disjoint, in path order."""
    train = {path: text for path, text in files.items() if not is_held_out(path)}
    return train, {path: text for path, text in files.items() if is_held_out(path)}


def token_stream(files: Corpus) -> np.ndarray:
    """All files one after the other as ids, int64 of shape (T,): BOS, the file's bytes, EOS, BOS, ..."""
    pieces = []
    for text in files.values():
        data = np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)
        pieces += [np.array([BOS]), data, np.array([EOS])]
    return np.concatenate(pieces)


def excerpts(files: Corpus, limit: int = 190_000) -> str:
    """The beginnings of all files, cut at line ends, in equal shares of at most `limit` bytes together."""
    share = limit // max(1, len(files))
    pieces = []
    for text in files.values():
        kept = text.encode()[:share].decode(errors="ignore")
        pieces.append(kept[: kept.rfind("\n") + 1])
    return "".join(pieces)


def build_tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer without merges: id = byte, BOS in front, every text comes back exactly from its ids.

    A special token's spelling inside a text stays text (`split_special_tokens`); only the template adds BOS.
    """
    tokenizer = Tokenizer(models.BPE(vocab={_spelling(byte): byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A <|bos|> $B", special_tokens=[("<|bos|>", BOS)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        pad_token="<|pad|>",
        padding_side="left",
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,
    )
    if fast.convert_tokens_to_ids(list(SPECIAL_TOKENS)) != list(SPECIAL_TOKENS.values()):
        raise ValueError(f"special tokens have ids {fast.get_added_vocab()}, expected {SPECIAL_TOKENS}")
    return fast


def _spelling(byte: int) -> str:
    """How the ByteLevel alphabet writes a byte: printable ones as themselves, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in printable:
        return chr(byte)
    return chr(0x100 + sum(other not in printable for other in range(byte)))
