"""The stand-ins for models, sizes and machines when the commands of pages run here: the one table of it.

PREPARED are files that a page takes for granted, SMALLER are sizes, NAMES are what Python blocks take for granted, and
NOT_RUN are commands and blocks that do not run here, each with its reason. A command that fits nothing runs as printed.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from nccl_logs import log
from repository import ROOT, TINY_LLAMA
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from rewriter import api
from rewriter.convert.save_options import SaveOptions

HOW = "docs/howto/"
Maker = Callable[[Path], object]


# --- files


def model(heads: int, kv_heads: int, layers: int = 4) -> Maker:
    """Writes a Llama of layers that differ, random weights, bytes as tokens, and a chat template."""

    def write(place: Path) -> None:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=640, hidden_size=32 * heads, intermediate_size=128 * heads, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=512, dtype="bfloat16",
        )  # fmt: skip
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(place)
        tokenizer = AutoTokenizer.from_pretrained(TINY_LLAMA)
        tokenizer.chat_template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
        tokenizer.save_pretrained(place)

    return write


def output(recipe: str, tp: int = 2, made_of: Maker | None = None) -> Maker:
    """Writes an output of `recipe` for `tp` ranks."""
    return lambda place: shutil.copytree(_output(recipe, tp, made_of or EIGHT), place)


@cache
def _output(recipe: str, tp: int, made_of: Maker) -> Path:
    """The same for all pages of this process."""
    root = Path(tempfile.mkdtemp(prefix="page-output-"))
    made_of(root / "model")
    api.convert(root / "model", recipe, out=root / "out", tp=tp, options=SaveOptions(verify="none"))
    return root / "out"


def tiny(place: Path) -> None:
    """The model that ships."""
    shutil.copytree(TINY_LLAMA, place)


def image_model(place: Path) -> None:
    """A small Gemma 3 with a vision tower."""
    import image_models

    image_models.save("gemma3", place, torch.bfloat16)


def rows(place: Path) -> None:
    """Eight texts, a JSON object in each line."""
    texts = (TINY_LLAMA / "heldout.txt").read_text(encoding="utf-8").split("\n\n")
    place.write_text("".join(json.dumps({"text": text[:400]}) + "\n" for text in texts[:8]), encoding="utf-8")


def text(content: str) -> Maker:
    return lambda place: place.write_text(content, encoding="utf-8")


EIGHT, NINE = model(8, 8), model(9, 3)
SCRIPT = "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\ndist.all_reduce(torch.ones(3))\n"
FABRIC = (ROOT / "rewriter/fabric/library/pcie-gen4.yaml").read_text(encoding="utf-8")
DESYNC = (ROOT / "rewriter/recipes/library/ladder.yaml").read_text(encoding="utf-8")

PREPARED: dict[str, dict[str, Maker]] = {
    "": {
        "models/smollm2": NINE, "MODEL": EIGHT, "path/to/model": tiny, "org/model": tiny,
        "DIR": output("ladder-upper-half"), "FILE": text("The sky is\ndef read(\n"), "train.jsonl": rows,
        "heldout.jsonl": rows, "meta-llama/Llama-3.1-8B-Instruct": EIGHT, "examples/tiny-llama": tiny,
    },
    "README.md": {"Qwen/Qwen3-32B": EIGHT},
    f"{HOW}convert.md": {"out": output("ladder")},
    f"{HOW}debug.md": {"OTHER": output("tensor-parallel"), "mine.yaml": text(DESYNC)},
    f"{HOW}emulate.md": {"train.py": text(SCRIPT), "here.yaml": text(FABRIC)},
    f"{HOW}fabrics.md": {
        "mine.yaml": text(FABRIC), "all_reduce_perf.log": text(log()),
        "all_gather_perf.log": text(log().replace("all_reduce", "all_gather")),
    },
    f"{HOW}faster-prompts.md": {"out": output("prefill-ladder-upper-half")},
    f"{HOW}heal.md": {"out": output("prefill-ladder-upper-half")},
    f"{HOW}images.md": {"MODEL": image_model},
    f"{HOW}run-on-ranks.md": {"out": output("ladder-upper-half", made_of=tiny)},
    f"{HOW}python.md": {"out": output("ladder")},
    "docs/concepts/bound.md": {"out": output("desync-2x-sum")},
    "docs/tutorial/heal.md": {"ladder": output("ladder-upper-half", 3, NINE)},
    "docs/tutorial/rewrite.md": {"models/smollm2": model(9, 3, 30)},  # a recipe names layers
    "docs/tutorial/serve.md": {"ladder": output("ladder-upper-half", 3, NINE)},
}  # fmt: skip
"""By page, and for all of them: the names of files that are there before its commands, if it names them."""


# --- sizes


@dataclass(frozen=True)
class Smaller:
    """In commands that match `where`, `pattern` is `text` instead."""

    where: str
    pattern: str
    text: str


RUNS = r"(?s)^rewrite (?!predict|search|inspect|fabrics)|rewriter\.cli"
SMALLER = (
    Smaller(r"\badapt\b", r"(?<=--tokens )[\d,_]+", "1024"),
    Smaller(r"\badapt\b", r"(?<=self:)\d+", "512"),
    Smaller(r"\badapt\b", r"(?<=--length )\d+", "128"),
    Smaller(RUNS, r"(?<=--max-new-tokens )\d+", "4"),
    Smaller(RUNS, r"(?<=--tp )(?:[6-9]|\d\d+)\b", "2"),
    Smaller(r"^rewrite search ", r"(?<=--tp )(?:[6-9]|\d\d+)\b", "2"),
    Smaller(r"^torchrun .*--nnodes 2", r"(?<=--nproc-per-node )\d+", "1"),
    Smaller(r"^torchrun .*--zero node-local", r"(?<=--nproc-per-node )\d+", "2"),  # two nodes of two
    Smaller(r"^torchrun ", r"(?<=--nproc-per-node )(?:[4-9]|\d\d+)", "2"),
    Smaller(r"^rewrite fabrics calibrate", r"--out", "--largest 65536 --repetitions 3 --out"),
    Smaller(r"", r"\bHOST\b|\b10\.0\.0\.2\b", "127.0.0.1"),
    Smaller(r"^lm_eval ", r"(?<=--tasks )\S+", "tiny_heldout --include_path examples/evaluation --limit 2"),
    Smaller(r"^lm_eval ", r"(?<=--batch_size )\S+", "1 --device cpu"),
)


# --- Python


@dataclass(frozen=True)
class Names:
    """Of the Python blocks of `page` that hold `within`: `code` runs before, on `ranks` ranks, with words replaced."""

    page: str
    within: str
    code: str
    ranks: int = 1
    replaced: tuple[tuple[str, str], ...] = ()


_FSDP = """
import os, torch, zoo
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
os.environ["LOCAL_WORLD_SIZE"] = "2"
whole = zoo.build("llama")
model = whole.model
group = dist.group.WORLD
ids = zoo.batch(2, 8)
"""
NAMES = (
    Names("docs/concepts/bound.md", "AutoModelForCausalLM", "from transformers import AutoModelForCausalLM\n"),
    Names(f"{HOW}python.md", "input_ids", "import torch, shutil\ninput_ids = torch.arange(32)[None]\n"
          "shutil.rmtree('out')\n"),
    Names(f"{HOW}python.md", "api.convert", "import shutil\nshutil.rmtree('out')\n"),
    Names(f"{HOW}train-on-ranks.md", "zero_optimizer",
          f"{_FSDP}model, batches = whole, [dict(input_ids=ids, labels=ids)]\n", 2),
    Names(f"{HOW}train-on-ranks.md", "shard_experts",
          f"{_FSDP}model, batches, directory = zoo.build('mixtral'), [ids], 'saved'\n", 2, (("dp=4", "dp=1"),)),
    Names(f"{HOW}fewer-bits.md", "zero_plus_plus", _FSDP, 2, (("secondary=8", "secondary=2"),)),
    Names(f"{HOW}fewer-bits.md", "node_local_optimizer", f"{_FSDP}model = whole.model.bfloat16()\n", 2,
          (('"cuda"', '"cpu"'),)),
    Names(f"{HOW}fewer-bits.md", "quantize_frozen",
          f"{_FSDP}from peft import LoraConfig, get_peft_model\nmodel = whole\n", 2,
          (('"int8")', '"int8", min_elements=64)'),)),
    Names("docs/reference/formats.md", "quantized_all_reduce",
          f"{_FSDP}from rewriter.training import node_mesh\nx, mesh = torch.randn(4, 256), node_mesh('cpu')\n", 2),
)  # fmt: skip


# --- what does not run


@dataclass(frozen=True)
class NotRun:
    """A command, or the first line of a block, that matches `pattern`. `test`: the file that runs it, if any."""

    page: str
    pattern: str
    reason: str
    test: str = ""


NOT_RUN = (
    NotRun(f"{HOW}add-a-pass.md", r"", "installs a package", "tests/end_to_end/test_pass_from_outside.py"),
    NotRun(f"{HOW}long-sequences.md", r"^import torch", "needs four ranks of one output",
           "tests/ranks/test_sequence_conversion.py"),
    NotRun(f"{HOW}develop.md", r"^pipx ", "builds a wheel from the package index", "tests/repo/test_documentation.py"),
    NotRun("examples/tiny-llama/README.md", r"^python examples/train_tiny\.py", "trains for 40 minutes"),
)  # fmt: skip
MOST_NOT_RUN = 8
