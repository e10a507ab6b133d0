"""Runs the kernels of attention over a cache in Triton's interpreter and prints their errors as JSON: a process of its
own, since Triton reads TRITON_INTERPRET when a kernel is defined. Started by test_decode_attention.py.

With the argument "few" each case once, in one of the dtypes and splits; with "faults", errors of kernels with one line
changed each; with "models", how many tokens of emitted models differ where the runtime calls the kernels, and how many
calls are missing.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from decode_attention_cases import DTYPES, SHAPES, Case, make
from subprocesses import load_module

from rewriter.kernels import decode_attention_triton
from rewriter.kernels.decode_attention import _on_cuda, decode_attention_reference

# name: what stands in the kernels, what stands there instead, the case that sees it
FAULTS = {
    "one key too few": ("start + each, last + 1)", "start + each, last)", "last"),
    "one key too many": ("start + each, last + 1)", "start + each, last + 2)", "a softcap"),
    "a window one longer": ("last - window + 1", "last - window", "a window"),
    "a window one shorter": ("last - window + 1", "last - window + 2", "a window"),
    "padding one shorter": ("first_valid + b).to(tl.int32)", "first_valid + b).to(tl.int32) - 1", "groups of 8"),
    "padding of another row": ("tl.load(first_valid + b)", "tl.load(first_valid + 1 - b)", "groups of 8"),
    "padding hides the token": ("begin = tl.minimum(begin, last)", "", "nothing but padding"),
    "other values are read": ("mask=real[:, None] & (e < E)[None, :]", "mask=(e < E)[None, :]", "a softcap"),
    "scores are not masked": ('tl.where(real[None, :], score * _LOG2E, float("-inf"))', "score * _LOG2E", "a window"),
    "another head's keys": ("head = kv * GROUP + r", "head = kv + 2 * r", "last"),
    "the first heads of a group again": ("tl.program_id(0) % tiles * ROWS + ", "", "groups of 20"),
    "no rescaling": ("o = o * before[:, None]", "o = o", "last"),
    "parts are not weighted": ("weight_P = tl.exp2(top_P - top)", "weight_P = tl.exp2(top_P * 0)", "last"),
    "parts without keys are read": ("written = (sum_P != 0)", "written = (p < splits)", "alone"),
    "sinks of another head": ("row % heads", "(row + 1) % heads", "sinks"),
    "sinks in base 2": (".to(tl.float32) * _LOG2E", ".to(tl.float32)", "sinks"),
    "the end of a ring again": ("t - turn - slots)", "slots - 1)", "a ring"),
    "no softcap": ("if CAPPED:", "if False:", "a softcap"),
}


def error(case: Case, splits: int, module: Any = decode_attention_triton) -> float:
    """The largest difference from the specification in fp64, in steps of the dtype of what is summed; infinite for
    NaN."""
    options = case.options
    made = module.launch(
        *case.arguments, options["sinks_H"], options["scale"], options["window"], options["softcap"], splits
    )
    exact = decode_attention_reference(*case.wide().arguments, **options)
    size = decode_attention_reference(*case.positive().wide().arguments, **options)
    assert made.shape == exact.shape
    assert made.dtype == case.q.dtype
    apart = (made.double() - exact).abs() / size.clamp(min=1e-30) / torch.finfo(made.dtype).eps
    return float(apart.nan_to_num(torch.inf).max())


def errors(few: bool) -> dict[str, float]:
    found = {}
    kinds = list(itertools.product(DTYPES, (1, 7)))
    for number, shape in enumerate(SHAPES):
        for name, splits in [kinds[number % len(kinds)]] if few else kinds:
            found[f"{name}, {shape}, {splits} splits"] = error(make(shape, DTYPES[name]), splits)
    case = make("everything", torch.float32)
    strided = (x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in (case.q, case.keys, case.values))
    found["rows that are not contiguous"] = error(Case(*strided, case.position, case.first_valid, case.options), 2)
    broken = make("last", torch.bfloat16)
    broken.values[0, 0, 100, 5] = torch.nan
    options = {"sinks": None, "scale": 1.0, "window": None, "softcap": None, "splits": 3}
    made = decode_attention_triton.launch(*broken.arguments, **options)
    expected = torch.zeros(made.shape, dtype=torch.bool)
    expected[0, :3, 0, 5] = True
    found["NaN that is seen shows"] = float((made.isnan() != expected).sum())
    rest = case.options["sinks_H"], case.options["scale"], case.options["window"], case.options["softcap"]
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    said = torch.library.opcheck(_on_cuda, (*case.arguments, *rest), test_utils=checks)
    found["the operator"] = float(sum(how != "SUCCESS" for how in said.values()))
    return found


def fault(old: str, new: str, shape: str) -> float:
    source = Path(decode_attention_triton.__file__).read_text(encoding="utf-8")
    assert old in source
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "faulty.py")
        path.write_text(source.replace(old, new), encoding="utf-8")
        return error(make(shape, torch.float32), 3, load_module("faulty", path))


def models() -> dict[str, float]:
    import decode_steps
    import zoo

    from rewriter.runtime import generate

    room, called = sys.modules["rewriter.runtime.attention.cached"], []

    def operator(*tensors: Any, sinks_H: Any, scale: float, window: int | None, softcap: float | None) -> torch.Tensor:
        called.append(1)
        return _on_cuda(*tensors, sinks_H, scale, window, softcap)

    found = {}
    for family in ("llama", "gemma2"):
        prompts = zoo.prompts(3, zoo.config(family).vocab_size)
        called.clear()
        made = []
        for choice in (lambda q: False, lambda q: True):
            with patch.multiple(room, without_masks=choice, decode_attention=operator):
                model = decode_steps.emitted(family)
                made.append(generate(model, prompts, 8))
        expected, got = (torch.tensor(tokens) for tokens in made)
        found[f"{family}: tokens"] = float((expected != got).sum())
        found[f"{family}: calls"] = float(abs(len(called) - 7 * len(model.slots)))
    return found


def main() -> None:
    torch.use_deterministic_algorithms(True)  # fills what `empty` gives with NaN, so that what is not written shows
    decode_attention_triton._multiprocessors = lambda device: 24
    match sys.argv[1:]:
        case ["faults"]:
            found = {name: fault(*how) for name, how in FAULTS.items()}
        case ["models"]:
            found = models()
        case few:
            found = errors(few == ["few"])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
