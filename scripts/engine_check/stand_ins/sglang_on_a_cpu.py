"""A plug-in of SGLang for the engine checks: what keeps workers of drafts from CPUs. SGLang loads it in every process, as it does imbrex's."""

import dataclasses

import torch


class _SeenAsCuda:
    """SGLang's view of its arguments, in which the device is a GPU."""

    def __init__(self, view):
        self._view = view

    def __getattr__(self, name):
        return "cuda" if name == "device" else getattr(self._view, name)


def _admit_by_device():
    """Its steps for DFLASH, DSPARK and UNO, which refuse a CPU by its name."""
    from sglang.srt.arg_groups import speculative_hook as hook

    plain_view = hook.resolving_view

    def on_a_gpu(step):
        def seen(server_args):
            hook.resolving_view = lambda args: _SeenAsCuda(plain_view(args))
            try:
                step(server_args)
            finally:
                hook.resolving_view = plain_view
            hook._disable_overlap_schedule_for_cpu(server_args)

        return seen

    for name in ("_handle_dflash", "_handle_dspark", "_handle_uno"):
        setattr(hook, name, on_a_gpu(getattr(hook, name)))


def _admit_gemma4(server_args, previous):
    """Its list of attention backends for Gemma 4, of which the drafts over the target's own cache (FROZEN_KV_MTP) are."""
    from sglang.srt.arg_groups import model_hook

    plain = model_hook.attention_backends_of
    if model_hook.model_config_of(server_args).hf_config.architectures[0] == "Gemma4ForCausalLM":
        model_hook.attention_backends_of = lambda args: tuple("triton" if name == "imbrex" else name for name in plain(args))
    try:
        previous(server_args)
    finally:
        model_hook.attention_backends_of = plain


def _in_their_own_type(original, runner, batch, *args):
    """Around a runner's arguments of its model: SGLang gives a draft of blocks its embeddings in bf16, whatever the model's type."""
    found = original(runner, batch, *args)
    if batch.input_embeds is not None:
        found["input_embeds"] = batch.input_embeds
    return found


def _without_stages(original, worker, *args, pp_proxy_tensors=None, **kwargs):
    """Around the step of workers that lack the argument, with which SGLang 0.5.23 calls them where steps do not overlap."""
    return original(worker, *args, **kwargs)


def noise(seeds, count, vocabulary):
    """[requests, count] tokens that UNO drafts from, behind each request's last [requests]: by that, where SGLang's are random."""
    return (7 * seeds[:, None] + 11 * torch.arange(1, count + 1)) % vocabulary


def _with_known_noise(original, *, seed_tokens, forward_width, vocab_size):
    return original(
        seed_tokens=seed_tokens, forward_width=forward_width, vocab_size=vocab_size, noise_tokens=noise(seed_tokens, forward_width - 1, vocab_size)
    )


class _OnAGpu(torch.Tensor):
    is_cuda = True


def _tree_on_a_gpu(original, roots, logits, **options):
    """Around what makes UNO's trees: Triton kernels, which refuse a CPU by its tensors."""
    found = original(roots.as_subclass(_OnAGpu), logits.as_subclass(_OnAGpu), **options)
    return dataclasses.replace(found, **{name: x.as_subclass(torch.Tensor) for name, x in vars(found).items() if torch.is_tensor(x)})


def _first_product(backend, x, weights, *, num_slices=1):
    """In the place of the first product with UNO's adapter, which SGLang computes in another stream of the GPU."""
    from sglang.srt.lora.backend.uno_cublas_backend import _PendingLoRAA

    route = backend._route()
    product = backend._compute_lora_a(backend._lora_a_input(x, route), weights[route.weight_index, : num_slices * route.rank], route)
    backend._pending_lora_a = _PendingLoRAA(product, None)


def _taken_product(backend, pending):
    backend._pending_lora_a = None
    return pending.output


def register():
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    _admit_by_device()
    register_resolution_hook("handle_model_specific_adjustments")(_admit_gemma4)
    HookRegistry.register("sglang.srt.model_executor.model_runner.ModelRunner._extend_forward_kwargs", _in_their_own_type, HookType.AROUND)
    make = torch.tensor
    torch.tensor = lambda *args, pin_memory=False, **options: make(*args, **options)  # layers with adapters pin memory on every device
    torch.Tensor.pin_memory = lambda self, device=None: self
    torch.Tensor.record_stream = lambda self, stream: None  # of memory that a stream uses: CPUs have none
    torch.cuda.synchronize = lambda device=None: None  # which MiMo-V2's draft model calls on every device
    frozen, worker = "sglang.srt.speculative.frozen_kv_mtp_worker_v2", "sglang.srt.speculative.uno_worker_v2"
    adapter = "sglang.srt.lora.backend.uno_cublas_backend.UnoCublasLoRABackend"
    for name in (f"{frozen}.FrozenKVMTPWorkerV2", f"{worker}.UnoWorkerV2"):
        HookRegistry.register(f"{name}.forward_batch_generation", _without_stages, HookType.AROUND)
    HookRegistry.register(f"{worker}.build_uno_draft_input", _with_known_noise, HookType.AROUND)
    HookRegistry.register(f"{worker}.build_uno_tree_proposal", _tree_on_a_gpu, HookType.AROUND)
    HookRegistry.register(f"{adapter}.start_lora_a_overlap", _first_product, HookType.REPLACE)
    HookRegistry.register(f"{adapter}._consume_lora_a_overlap", _taken_product, HookType.REPLACE)
