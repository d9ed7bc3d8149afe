"""A plug-in of SGLang for the engine checks: what keeps workers of drafts from CPUs. SGLang loads it in every process, as it does imbrex's."""

import torch


class _SeenAsCuda:
    """SGLang's view of its arguments, in which the device is a GPU."""

    def __init__(self, view):
        self._view = view

    def __getattr__(self, name):
        return "cuda" if name == "device" else getattr(self._view, name)


def _admit_drafts_of_blocks():
    """Its steps for DFLASH and DSPARK, which refuse a CPU by its name."""
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

    for name in ("_handle_dflash", "_handle_dspark"):
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
    """Around the step of a worker that lacks the argument, with which SGLang 0.5.23 calls it where steps do not overlap."""
    return original(worker, *args, **kwargs)


def register():
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    _admit_drafts_of_blocks()
    register_resolution_hook("handle_model_specific_adjustments")(_admit_gemma4)
    HookRegistry.register("sglang.srt.model_executor.model_runner.ModelRunner._extend_forward_kwargs", _in_their_own_type, HookType.AROUND)
    torch.Tensor.record_stream = lambda self, stream: None  # of memory that a stream uses: CPUs have none
    torch.cuda.synchronize = lambda device=None: None  # which MiMo-V2's draft model calls on every device
    frozen = "sglang.srt.speculative.frozen_kv_mtp_worker_v2.FrozenKVMTPWorkerV2.forward_batch_generation"
    HookRegistry.register(frozen, _without_stages, HookType.AROUND)
