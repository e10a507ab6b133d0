"""Files that users name or give, read with every fault named and written at once; and temporary ones."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rewriter.common.errors import RewriterError, VerificationError, shortened

MAX_DEPTH = 64  # levels of a JSON file; code that walks through it calls itself as often
ADAPTER_CONFIG = "adapter_config.json"
MOST_TEXT = 256 << 20  # bytes of a file of prompts, or of text to measure on


@contextmanager
def scratch_folder(what: str) -> Iterator[Path]:
    """A new folder for temporary files, called rewriter-WHAT-… in the system's directory for them."""
    with tempfile.TemporaryDirectory(prefix=f"rewriter-{what}-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def name_of(path: str | os.PathLike[str]) -> str:
    """The last part of a path, of `.` and `..` too that of the folder that they are."""
    return os.path.basename(os.path.abspath(path))


def require_place(path: Path, option: str, more_beside: bool = False) -> None:
    """Refuse what cannot be written, before any work is done for it: directories, disks, and where `more_beside` says
    that more is written next to it, all but files. Raises RewriterError."""
    if path.is_dir() or not path.parent.is_dir():
        what = "it is a directory" if path.is_dir() else f"there is no directory {path.parent}"
        raise RewriterError(f"{option} {path}: {what}. Name a file in a directory that exists.")
    if path.is_block_device() or path.is_socket() or (more_beside and _is_stream(path)):
        raise RewriterError(f"{option} {path}: it is not a file, and stays as it is. Name a file.")


def write_text(path: Path, text: str, option: str) -> None:
    """Put all of `text` at `path`, or nothing. Pipes and character devices, such as /dev/stdout, are written to; a link
    is followed. Raises RewriterError where that cannot be."""
    require_place(path, option)
    try:
        if _is_stream(path):
            number = _number(path)
            with open(path if number is None else os.dup(number), "w", encoding="utf-8") as stream:
                stream.write(text)
        else:
            replace_text(Path(os.path.realpath(path)), text)
    except OSError as error:
        raise RewriterError(f"{option} {path}: cannot be written: {error.strerror or error}.") from None


def _is_stream(path: Path) -> bool:
    """True for pipes and devices, and for what the process has open: another
    file in its place would not be what its reader reads."""
    return _number(path) is not None or path.is_char_device() or path.is_fifo()


def _number(path: Path) -> int | None:
    """Descriptor that /dev/stdout and its like name; None for other paths. Opened again, a file would be written from
    its start."""
    name = os.path.abspath(path)
    if name in (known := {"/dev/stdout": 1, "/dev/stderr": 2}):
        return known[name]
    numbered = re.fullmatch(r"/(?:dev|proc/self)/fd/(\d{1,9})", name)
    return int(numbered[1]) if numbered else None


def replace_text(path: Path, text: str) -> None:
    """Put `text` at `path` at once: a reader sees all of it, or what was there before."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read_given(option: str, path: Path, hint: str) -> str:
    """The text of a file or pipe that an option names, without a byte order mark. `hint` is the next step.

    Raises RewriterError where it is neither, is larger than 256 MiB, holds nothing, or is not UTF-8.
    """
    try:
        mode = os.stat(path).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
            raise RewriterError(f"{option} {path}: neither a file nor a pipe. {hint}")
        with path.open("rb") as file:
            data = file.read(MOST_TEXT + 1)
        text = data.decode("utf-8-sig") if len(data) <= MOST_TEXT else ""
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise RewriterError(f"{option} {path}: {reason}. {hint}") from None
    if not text.strip():
        wrong = "it is empty" if len(data) <= MOST_TEXT else f"larger than {MOST_TEXT >> 20} MiB"
        raise RewriterError(f"{option} {path}: {wrong}. {hint}")
    return text


def read_json(path: Path, hint: str) -> dict[str, Any]:
    """The object that a JSON file holds. `hint` is the next step for who has a broken one.

    Raises RewriterError, naming the file, where it cannot be read, is no regular file, no UTF-8, no JSON or no object,
    or is nested deeper than 64 levels.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise RewriterError(f"{path}: not a regular file. {hint}")
        data = json.loads(path.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise RewriterError(f"{path}: cannot be read: {error.strerror or error}. {hint}") from error
    except UnicodeDecodeError as error:
        raise RewriterError(f"{path}: not UTF-8 text (byte {error.start}). {hint}") from error
    except RecursionError as error:
        raise RewriterError(f"{path}: nested deeper than {MAX_DEPTH} levels. {hint}") from error
    except ValueError as error:
        raise RewriterError(f"{path}: not valid JSON ({error}). {hint}") from error
    if not isinstance(data, dict):
        raise RewriterError(f"{path}: it holds a {type(data).__name__}, not an object. {hint}")
    if _is_deeper(data, MAX_DEPTH):
        raise RewriterError(f"{path}: nested deeper than {MAX_DEPTH} levels. {hint}")
    return data


def _is_deeper(data: Any, levels: int) -> bool:
    inside = [data]
    for _ in range(levels):
        inside = [
            child
            for value in inside
            for child in (value.values() if isinstance(value, dict) else value)
            if isinstance(child, dict | list)
        ]
    return bool(inside)


def check_sha256(path: Path, expected: str) -> None:
    """Compare the content of a file that `rewrite` wrote. Raises VerificationError where it is another, or missing."""
    try:
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        raise VerificationError(f"{path}: missing, but the manifest names it. Rewrite the model again.") from None
    except OSError as error:
        raise VerificationError(f"{path}: cannot be read: {error.strerror}. Rewrite the model again.") from None
    if digest != expected:
        raise VerificationError(
            f"{path}: changed since it was written (sha256 {digest[:12]}…, the manifest says {expected[:12]}…). "
            "Rewrite the model again, or keep what was fine-tuned elsewhere."
        )


def refuse_adapter(directory: Path) -> None:
    """Raise RewriterError where a directory holds an adapter of peft, alone or next to a model: transformers adds it
    where peft is installed, and without it this is another model. Folders inside are not looked at, as transformers
    does not."""
    file = directory / ADAPTER_CONFIG
    if not file.is_file():
        return
    if (directory / "config.json").is_file():
        raise RewriterError(
            f"{file}: an adapter lies beside the model. Merge it first (peft merge_and_unload): move {ADAPTER_CONFIG} "
            "and adapter_model.* into a folder ADAPTER of their own, then PeftModel.from_pretrained("
            f"AutoModelForCausalLM.from_pretrained({str(directory)!r}), 'ADAPTER').merge_and_unload().save_pretrained("
            "'NEW'). Or leave it out: move them away"
        )
    try:
        base = json.loads(file.read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        base = None
    of = f" of {shortened(base)}" if base else ""
    raise RewriterError(
        f"{file}: this is an adapter{of}, not a model. Merge it first (peft merge_and_unload), and give NEW: "
        f"AutoPeftModelForCausalLM.from_pretrained({str(directory)!r}).merge_and_unload().save_pretrained('NEW')"
    )
