"""Damaged inputs: each is read, or refused in words that blame it and not rewriter.

A case is a batch for one reader, guided by coverage: an input that comes to new code is damaged further.
"""

from __future__ import annotations

import json
import random
import shutil
import struct
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import zoo
from adapt_data_cases import CHATML
from adapted import build_tokenizer
from safetensors.torch import save_file

from rewriter.adapt.token_rows import load_rows
from rewriter.api import convert
from rewriter.cli.generate import read_prompts
from rewriter.common.errors import RewriterError
from rewriter.convert.rewritten_source import open_output, source_config
from rewriter.convert.save_options import SaveOptions
from rewriter.fabric import load_fabric
from rewriter.fabric.schema import LIBRARY as FABRICS
from rewriter.recipes import catalogue
from rewriter.recipes.apply import load_recipe
from rewriter.tracing.meta_model import build_skeleton, load_config
from rewriter.weights.checkpoint import Checkpoint
from rewriter.weights.header import read_header
from rewriter.weights.references import RankWeights
from soak.cases import Kind, Outcome
from soak.fuzz import Damage, fuzzed, missing
from soak.mutate import as_json, damaged_bytes, damaged_json, damaged_value, damaged_yaml

RECIPES = Path(catalogue.__file__).parent / "library"
LONGEST = 20_000  # characters of a refusal; more would be a file poured into a terminal
LIMIT = 300.0  # seconds of a batch


@dataclass(frozen=True)
class Reader:
    """What reads one kind of file. `file`: where an input lies, below the case's place; `read` is given that place.

    `examples` are valid inputs. `damage` makes another input from one. `batch`: inputs of a case.
    """

    name: str
    file: str
    examples: Callable[[Path], Sequence[bytes]]
    damage: Damage
    read: Callable[[Path, Path], Any]
    batch: int


# Damage


def damaged_header(draw: random.Random, data: bytes) -> bytes:
    """A safetensors file with another header. Mostly its length fits, so that the reader gets to what it says."""
    if len(data) < 8 or draw.random() < 0.15:
        return damaged_bytes(draw, data)
    length = min(struct.unpack("<Q", data[:8])[0], len(data) - 8)
    text, rest = data[8 : 8 + length], data[8 + length :]
    try:
        text = as_json(damaged_value(draw, json.loads(text)))
    except (ValueError, RecursionError):
        text = damaged_bytes(draw, text)
    if draw.random() < 0.1:
        rest = rest[: draw.randrange(len(rest) + 1)] + b"\x00" * draw.choice([0, 0, 8])
    said = draw.choice([0, 1, 2, 2**63, 2**64 - 1, len(text) + len(rest)]) if draw.random() < 0.05 else len(text)
    return struct.pack("<Q", said) + text + rest


def damaged_table(draw: random.Random, data: bytes) -> bytes:
    try:
        return damaged_json(draw, json.loads(data))
    except (ValueError, RecursionError):
        return damaged_bytes(draw, data)


def damaged_lines(draw: random.Random, data: bytes) -> bytes:
    """JSON Lines with a damaged line or two, or with lines gone, doubled or joined."""
    lines = data.split(b"\n")
    for _ in range(draw.choice([1, 1, 3])):
        at = draw.randrange(len(lines))
        what = draw.randrange(8)
        if what == 0:
            lines.insert(at, draw.choice(lines))
        elif what == 1 and len(lines) > 1:
            lines[at - 1 : at + 1] = [b"".join(lines[at - 1 : at + 1])]
        else:
            lines[at] = damaged_table(draw, lines[at])
    return b"\n".join(lines)


def damaged_text(draw: random.Random, data: bytes) -> bytes:
    return damaged_yaml(draw, data.decode(errors="replace"))


# Readers


def read_weights(place: Path, file: Path) -> None:
    """As a conversion does: what a header says is believed, so tensors are read too."""
    read_header(file)
    checkpoint = Checkpoint.open(file.parent)
    for name in list(checkpoint.tensors)[:2]:
        if checkpoint.info(name).nbytes > file.stat().st_size:
            raise AssertionError(f"{name!r} has more bytes than its file")
        checkpoint.read(name)


def read_recipe(place: Path, file: Path) -> None:
    load_recipe(file).build()


def read_output(place: Path, file: Path) -> None:
    source_config(open_output(file.parent))


def read_config(place: Path, file: Path) -> None:
    build_skeleton(load_config(file.parent))


@cache
def tokenizer() -> Any:
    made = build_tokenizer(48)
    made.chat_template = CHATML
    return made


def read_data(place: Path, file: Path) -> None:
    load_rows(file, tokenizer(), length=48)
    read_prompts(file)


def headers(place: Path) -> list[bytes]:
    """Small files of several dtypes and shapes, with and without metadata, empty tensors among them."""
    tensors = {"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3, dtype=torch.float16), "e": torch.zeros(0, 4)}
    more = {"q": torch.ones(4, 2, dtype=torch.int8), "s": torch.ones(1, dtype=torch.bfloat16), "n": torch.tensor(1.0)}
    found = []
    for number, (values, metadata) in enumerate([(tensors, {"format": "pt"}), (more, None), (tensors | more, None)]):
        save_file(values, place / f"header-{number}", metadata=metadata)
        found.append((place / f"header-{number}").read_bytes())
    return found


def files_of(folder: Path) -> Callable[[Path], Sequence[bytes]]:
    return lambda place: [path.read_bytes() for path in sorted(folder.glob("*.yaml"))]


def at(name: str) -> Callable[[Path], Sequence[bytes]]:
    return lambda place: [(place / name).read_bytes()]


def configs(place: Path) -> list[bytes]:
    return [as_json(zoo.config(family).to_dict()) for family in zoo.KINDS]


DATA = (
    {"text": "def f(x): return x"},
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a é 💥"},
                  {"role": "assistant", "content": "b"}], "tools": [{"name": "t"}]},
)  # fmt: skip


def data(place: Path) -> list[bytes]:
    return [b"\n".join(map(as_json, rows)) + b"\n" for rows in (DATA[:1], DATA[1:], DATA)]


READERS = (
    Reader("headers", "weights/model.safetensors", headers, damaged_header, read_weights, 40_000),
    Reader("indices", "split/model.safetensors.index.json", at("index.json"), damaged_table,
           lambda place, file: Checkpoint.open(file.parent), 4000),
    Reader("configs", "config/config.json", configs, damaged_table, read_config, 200),
    Reader("recipes", "recipe.yaml", files_of(RECIPES), damaged_text, read_recipe, 2000),
    Reader("fabrics", "fabric.yaml", files_of(FABRICS), damaged_text,
           lambda place, file: load_fabric(file), 2000),
    Reader("manifests", "out/rewrite.json", at("manifest.json"), damaged_table, read_output, 2000),
    Reader("references", "out/runtime/tp2/weights.json", at("references.json"), damaged_table,
           lambda place, file: RankWeights.open(place / "out", file, 1), 2000),
    Reader("data", "data.jsonl", data, damaged_lines, read_data, 4000),
)  # fmt: skip


def prepare(place: Path) -> None:
    """A model, its output, and a split checkpoint, into which damaged files are put."""
    zoo.save("llama", place / "m")
    convert(place / "m", "tensor-parallel", out=place / "out", tp=2, options=SaveOptions(verify="none"))
    (place / "manifest.json").write_bytes((place / "out/rewrite.json").read_bytes())
    (place / "references.json").write_bytes((place / "out/runtime/tp2/weights.json").read_bytes())
    for name in ("weights", "split", "config"):
        (place / name).mkdir()
    weight_map = {}
    for number in (1, 2):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({f"w{number}": torch.ones(2, 2)}, place / "split" / file)
        weight_map[f"w{number}"] = file
    (place / "index.json").write_bytes(as_json({"metadata": {"total_size": 32}, "weight_map": weight_map}))


def case(index: int, place: Path) -> Outcome:
    """A batch for the reader whose turn it is. Headers come every other time."""
    others = READERS[1:]
    reader = READERS[0] if index % 2 == 0 else others[index // 2 % len(others)]
    return batch(reader, index + 1, place)  # libFuzzer takes a seed of 0 for none


def batch(reader: Reader, seed: int, place: Path, limit: float = LIMIT) -> Outcome:
    """Damage and read so many inputs; what is not refused as it should be is a failure."""
    file, work = place / reader.file, place / "fuzz"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    examples = {f"{number}": data for number, data in enumerate(reader.examples(place))}

    def one(given: bytes, outcome: Outcome) -> None:
        file.unlink(missing_ok=True)  # a new file is written quicker than an old one is cut
        file.write_bytes(given)
        read, wrong = attempt(lambda: reader.read(place, file))
        outcome.counts[f"{reader.name}: {'read' if read else 'refused'}"] += 1
        if wrong and len(outcome.failures) < 10:
            outcome.failures.append(f"{reader.name}: {wrong}; given {given[:2000]!r}")

    return fuzzed(work, examples, reader.damage, one, reader.batch, seed, limit)


def attempt(read: Callable[[], Any]) -> tuple[bool, str]:
    """Whether an input was read, and what is wrong with how it was refused, if anything."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read()
    except RewriterError as error:
        return False, wrong_words(str(error))
    except Exception as error:
        return False, f"{type(error).__name__}: {error} at {place_of(error)}"
    return True, ""


def place_of(error: BaseException) -> str:
    """File and line that raised it."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(last.filename).name}:{last.lineno}"


def wrong_words(message: str) -> str:
    """What is wrong with the words of a refusal."""
    if not message.strip():
        return "refused without a word"
    if "fault of rewriter" in message or "Traceback" in message:
        return f"refused as a fault of rewriter: {message:.500}"
    if len(message) > LONGEST:
        return f"refused in {len(message)} characters: {message:.200}"
    return ""


KIND = Kind("inputs", share=0.3, limit=LIMIT + 30, prepare=prepare, run=case, needs=missing)
