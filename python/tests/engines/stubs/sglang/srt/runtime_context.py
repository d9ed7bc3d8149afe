from types import SimpleNamespace

_parallel = SimpleNamespace(attn_dcp_size=1)


def get_parallel():
    return _parallel
