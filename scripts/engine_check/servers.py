"""The servers of vLLM and SGLang as processes on 127.0.0.1, and their HTTP interfaces made alike."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
START_SECONDS, REQUEST_SECONDS, STOP_SECONDS = 300, 300, 30


@dataclass
class Answer:
    """What a request got."""

    tokens: list
    logprobs: list
    cached: int  # prompt tokens that came out of the prefix cache


@dataclass
class Variant:
    """One way to start a server."""

    name: str  # of the attention backend, as the tables have it
    options: list = field(default_factory=list)
    environment: dict = field(default_factory=dict)

    @property
    def is_imbrex(self):
        return self.name.startswith("imbrex")


class Vllm:
    """vLLM for CPUs. imbrex stands in for CPU_ATTN and for layers with a state where the variables say so."""

    variants = [
        Variant("CPU_ATTN", environment={"VLLM_PLUGINS": ""}),
        Variant("imbrex", environment={"VLLM_PLUGINS": "imbrex", "IMBREX_VLLM_CPU_ATTN": "1", "IMBREX_VLLM_STATES": "1"}),
    ]
    drafts = ["--speculative-config", json.dumps({"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2})]
    health = "/health"

    def command(self, model, port, chunk):
        program = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port), "--model", model]
        limits = ["--max-model-len", "8192", "--max-num-batched-tokens", str(chunk), "--max-num-seqs", "16", "--enforce-eager"]
        return program + limits + ["--served-model-name", "m", "--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]

    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}

    def body(self, prompt, count):
        asked = dict(model="m", prompt=prompt, max_tokens=count, temperature=0, logprobs=1, ignore_eos=True, return_token_ids=True)
        return "/v1/completions", asked

    def answer(self, given):
        (choice,) = given["choices"]
        details = given["usage"].get("prompt_tokens_details") or {}
        return Answer(choice["token_ids"], choice["logprobs"]["token_logprobs"], details.get("cached_tokens") or 0)


class Sglang:
    """SGLang's engine for CPUs, without its own kernels: of its backends torch_native runs, which has neither windows nor sinks nor soft caps."""

    variants = [
        Variant("torch_native", ["--attention-backend", "torch_native"], {"SGLANG_PLUGINS": "none"}),
        Variant("imbrex, pages of 1", ["--attention-backend", "imbrex"]),
        Variant("imbrex, pages of 16", ["--attention-backend", "imbrex", "--page-size", "16"]),
    ]
    drafts = None
    health = "/health"

    def command(self, model, port, chunk):
        program = [sys.executable, "-m", "sglang.launch_server", "--host", "127.0.0.1", "--port", str(port), "--model-path", model]
        limits = ["--context-length", "8192", "--chunked-prefill-size", str(chunk), "--max-total-tokens", "65536", "--max-running-requests", "16"]
        return program + limits + ["--device", "cpu", "--disable-overlap-schedule", "--disable-hybrid-swa-memory", "--skip-server-warmup"]

    environment = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(HERE / "stand_ins")}

    def body(self, prompt, count):
        sampling = dict(temperature=0, max_new_tokens=count, ignore_eos=True)
        return "/generate", dict(input_ids=prompt, sampling_params=sampling, return_logprob=True)

    def answer(self, given):
        pairs = given["meta_info"]["output_token_logprobs"]
        return Answer([p[1] for p in pairs], [p[0] for p in pairs], given["meta_info"]["cached_tokens"])


ENGINES = {"vllm": Vllm(), "sglang": Sglang()}


class Server:
    """A server for the time of a `with`. `stopped` is the seconds it took to end after SIGTERM, None where it had to be killed."""

    def __init__(self, engine, variant, model, log, chunk=256, drafts=False):
        self.engine, self.variant, self.log = engine, variant, Path(log)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.command = engine.command(str(model), self.port, chunk) + variant.options + (engine.drafts if drafts else [])
        self.stopped = None

    def __enter__(self):
        environment = {**os.environ, **self.engine.environment, **self.variant.environment}
        with self.log.open("w") as out:
            self.process = subprocess.Popen(self.command, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end and self.process.poll() is None:
            try:
                self._fetch(self.engine.health, None, 5)
                return self
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        self.__exit__()
        raise RuntimeError(f"{self.variant.name} does not start, see {self.log}:\n" + "\n".join(self.text().splitlines()[-12:]))

    def __exit__(self, *error):
        began = time.monotonic()
        self.process.terminate()
        try:
            self.process.wait(STOP_SECONDS)
            self.stopped = time.monotonic() - began
        except subprocess.TimeoutExpired:
            pass
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()

    def _fetch(self, path, body, seconds):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=seconds) as reply:
            return reply.read()

    def generate(self, prompts, count):
        """All prompts at once. Returns their answers and the seconds they took together."""

        def one(prompt):
            return self.engine.answer(json.loads(self._fetch(*self.engine.body(prompt, count), REQUEST_SECONDS)))

        began = time.monotonic()
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = list(pool.map(one, prompts))
        return answers, time.monotonic() - began

    def accepted_drafts(self):
        """Of vLLM's metrics; 0 without drafts."""
        lines = self._fetch("/metrics", None, 10).decode().splitlines() if self.engine.drafts else []
        return sum(int(float(x.split()[-1])) for x in lines if x.startswith("vllm:spec_decode_num_accepted_tokens_total"))

    def text(self):
        return self.log.read_text(errors="replace")
