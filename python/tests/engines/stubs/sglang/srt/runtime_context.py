from types import SimpleNamespace

_parallel = SimpleNamespace(attn_dcp_size=1)


def get_parallel():
    return _parallel


_exec = SimpleNamespace(
    mamba=SimpleNamespace(
        linear_attn_backend="triton", linear_attn_decode_backend=None, linear_attn_prefill_backend=None, linear_attn_verify_backend=None
    )
)


def get_exec():
    return _exec


_spec = SimpleNamespace(speculative_num_draft_tokens=None, speculative_eagle_topk=None)


def get_spec():
    return _spec
