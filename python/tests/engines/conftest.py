"""Stand-ins of the engines, each on the path for the tests that ask for it."""

import importlib
import sys
from pathlib import Path

import pytest

STUBS = Path(__file__).resolve().parent / "stubs"
torch = pytest.importorskip("torch")


def _forget(engine):
    for name in list(sys.modules):
        if name == engine or name.startswith(engine + ".") or name.startswith(f"imbrex.{engine}"):
            del sys.modules[name]
    import imbrex

    if hasattr(imbrex, engine):
        delattr(imbrex, engine)


def _engine(name, monkeypatch):
    for variable in ("IMBREX_ENGINE_CONFIG", "IMBREX_ENGINE_ANY_VERSION", "IMBREX_VLLM_CPU_ATTN", "IMBREX_VLLM_STATES", "IMBREX_BACKEND"):
        monkeypatch.delenv(variable, raising=False)
    _forget(name)
    monkeypatch.syspath_prepend(str(STUBS))
    importlib.invalidate_caches()
    module = importlib.import_module(name)
    assert Path(module.__file__).is_relative_to(STUBS) if hasattr(Path, "is_relative_to") else str(STUBS) in module.__file__
    torch.manual_seed(11)
    yield module
    _forget(name)


@pytest.fixture
def vllm(monkeypatch):
    yield from _engine("vllm", monkeypatch)


@pytest.fixture
def vllm_on_cpu(vllm, monkeypatch):
    """vLLM on a CPU takes CPU_ATTN, so there the plug-in is asked to stand in for it."""
    monkeypatch.setenv("IMBREX_VLLM_CPU_ATTN", "1")
    return vllm


@pytest.fixture
def plain_rows(monkeypatch):
    """Pages of vLLM hold rows on every CPU, also where AMX would have them packed (test_vllm_packed.py)."""
    monkeypatch.setenv("IMBREX_CPU_ISA", "avx2")


@pytest.fixture
def sglang(monkeypatch):
    yield from _engine("sglang", monkeypatch)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))])
def device(request):
    return request.param


@pytest.fixture
def states(vllm, monkeypatch):
    """vLLM's stand-in, whose layers with a state are to be imbrex's."""
    monkeypatch.setenv("IMBREX_VLLM_STATES", "1")
    return vllm


@pytest.fixture
def registry(sglang):
    """The registry of attention backends, with the hooks of plug-ins."""
    import imbrex.sglang
    from sglang.srt.layers.attention import attention_registry
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.server_args import LINEAR_ATTN_KERNEL_BACKEND_CHOICES

    imbrex.sglang.register()
    imbrex.sglang.register()
    assert LINEAR_ATTN_KERNEL_BACKEND_CHOICES.count("imbrex") == 1 and len(HookRegistry._hooks) == 3
    HookRegistry.apply_hooks()
    return attention_registry


@pytest.fixture
def on_device(sglang, monkeypatch, device):
    """Plans of SGLang's from lengths on the GPU, which CPUs do not have: there the same calls plan on the host, from what the tensors have at that moment."""
    if device == "cuda":
        return
    import imbrex
    from imbrex.sglang import backend

    def update_on_device(plan, starts, lens, *, max_num_tokens, **arrays):
        assert starts.dtype == lens.dtype == torch.int32 and max_num_tokens >= int(starts[-1])
        plan.update(starts, lens, **arrays)

    def init(self, runner, plain=backend.Backend.__init__):
        plain(self, runner)
        self.on_device, self.needs_cpu_seq_lens = True, False

    def make_plan(*arguments, on_device, plain=backend.make_plan, **limits):
        return plain(*arguments, **limits)

    monkeypatch.setattr(imbrex.Plan, "update_on_device", update_on_device)
    monkeypatch.setattr(backend.Backend, "__init__", init)
    monkeypatch.setattr(backend, "make_plan", make_plan)
