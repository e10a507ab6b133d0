"""What Ladder Residual wins on CPUs where all-reduces take longer: in vLLM, and in this project's own runtime.

    make serving-venv
    .venv-serving/bin/python -m benchmarks.serving.run [--ranks 2] [--compiled] [--rounds 7] [--json FILE]

Every variant is an output of `rewrite` of one random Llama model. Each all-reduce of its ranks is delayed by so many
milliseconds, at one place for all variants (`vllm_engine.py`, `runtime.py`). In a round every variant decodes
a batch of sequences at every delay; they take turns, and all but one are stopped (SIGSTOP) meanwhile. Reported are
medians over rounds, in milliseconds per step; the share of the added time that a variant hides, 1 − (its time − its
time without delay) / (the standard model's, likewise); and the median over rounds of its time without delay to the
standard model's. Tokens of a variant are the same at every delay and in both engines, or the benchmark ends with an
error.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from rewriter.convert.save_options import SaveOptions

VARIANTS = {
    "standard": "tensor-parallel",
    "ladder-upper-half": "ladder-upper-half",
    "ladder": "ladder",
    "parallel": "parallel",
}
ENGINES = {"vllm": "benchmarks.serving.vllm_engine", "runtime": "benchmarks.serving.runtime"}
HEAD, LAYERS, VOCABULARY = 64, 12, 4096
HEADS = {2: 16, 3: 12}  # by ranks
Times = dict[str, dict[float, list[float]]]  # by variant and delay, seconds per step of each round


def write_models(directory: Path, ranks: int) -> None:
    """An output for every variant of one source."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from rewriter.api import convert

    config = LlamaConfig(
        hidden_size=HEADS[ranks] * HEAD,
        intermediate_size=2 * HEADS[ranks] * HEAD,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS[ranks],
        num_key_value_heads=HEADS[ranks] // 2,
        vocab_size=VOCABULARY,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(directory / "source")
    for name, recipe in VARIANTS.items():
        convert(directory / "source", recipe, out=directory / name, tp=ranks, options=SaveOptions(verify="none"))


class Contestant:
    """One variant in one engine, in a session of processes that is stopped but while it is asked something."""

    def __init__(self, program: str, directory: Path, asked: argparse.Namespace) -> None:
        reads, self.writes = os.pipe()
        answers, writes = os.pipe()
        command = [sys.executable, "-m", program, str(directory), str(asked.ranks)]
        command += ["compiled" if asked.compiled else "eager", str(reads), str(writes)]
        self.process = subprocess.Popen(command, pass_fds=(reads, writes), start_new_session=True)
        os.close(reads)
        os.close(writes)
        self.answers = os.fdopen(answers)
        self.tokens = self.read()  # once it is ready
        self.signal(signal.SIGSTOP)

    def read(self) -> Any:
        line = self.answers.readline()
        if not line:
            raise SystemExit(f"serving: {self.process.args} ended without an answer")
        return json.loads(line)

    def ask(self, delay: float) -> float:
        """Seconds per step where all-reduces take `delay` longer."""
        self.signal(signal.SIGCONT)
        os.write(self.writes, f"{delay}\n".encode())
        answer = self.read()
        self.signal(signal.SIGSTOP)
        if answer["tokens"] != self.tokens:
            raise SystemExit(f"serving: {self.process.args}: other tokens where all-reduces take {delay * 1e3:g} ms")
        return float(answer["seconds"])

    def signal(self, number: int) -> None:
        """Send a signal to every process of the session."""
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                session = int(stat.read_text().rpartition(")")[2].split()[3])
                if session == self.process.pid:
                    os.kill(int(stat.parent.name), number)
            except (OSError, ValueError):
                continue  # it has ended


@contextmanager
def contestant(program: str, directory: Path, asked: argparse.Namespace) -> Iterator[Contestant]:
    made = Contestant(program, directory, asked)
    try:
        yield made
    finally:
        made.signal(signal.SIGKILL)
        made.process.wait()


def measure(engine: str, root: Path, asked: argparse.Namespace) -> tuple[Times, dict[str, Any]]:
    """The times and the tokens of every variant in one engine."""
    times: Times = {name: {delay: [] for delay in asked.delays} for name in VARIANTS}
    with ExitStack() as stack:
        running = {n: stack.enter_context(contestant(ENGINES[engine], root / n, asked)) for n in VARIANTS}
        print(f"{engine}: {asked.rounds} rounds", flush=True)
        for _ in range(asked.rounds):
            for delay in asked.delays:
                for name, one in running.items():
                    times[name][delay].append(one.ask(delay))
        return times, {name: one.tokens for name, one in running.items()}


def report(engine: str, times: Times) -> None:
    """A table: milliseconds per step, the share of the added time that is hidden, the time without delay."""
    delays = list(times["standard"])
    print(f"\n{engine:18}" + "".join(f"{d * 1e3:>8g} ms {'':>6}" for d in delays) + "  without delay")
    added = {d: median(times["standard"][d]) - median(times["standard"][0.0]) for d in delays}
    for name, found in times.items():
        cells = ""
        for delay in delays:
            hidden = 1 - (median(found[delay]) - median(found[0.0])) / added[delay] if delay else 0.0
            share = f"({hidden:4.0%})" if delay and name != "standard" else ""
            cells += f"{median(found[delay]) * 1e3:11.1f} {share:>6}"
        ratio = median(a / b for a, b in zip(found[0.0], times["standard"][0.0], strict=True))
        print(f"{name:18}{cells}  × {ratio:.3f}")


def milliseconds(text: str) -> list[float]:
    """Seconds."""
    return [float(part) / 1e3 for part in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, choices=HEADS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--compiled", action="store_true", help="by torch.compile")
    parser.add_argument("--engines", default="vllm,runtime")
    parser.add_argument("--delays", type=milliseconds, default="0,1,3,10", help="milliseconds, the first of them 0")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    results, tokens = {}, {}
    with tempfile.TemporaryDirectory(prefix="serving-") as name:
        write_models(Path(name), asked.ranks)
        for engine in asked.engines.split(","):
            results[engine], tokens[engine] = measure(engine, Path(name), asked)
            report(engine, results[engine])
            if asked.json is not None:
                asked.json.write_text(json.dumps(results, indent=2))
    if any(found != tokens[next(iter(tokens))] for found in tokens.values()):
        print("serving: the engines give other tokens", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
