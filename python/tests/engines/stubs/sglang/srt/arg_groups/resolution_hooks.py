_HOOKS = {}


def register_resolution_hook(name):
    if name not in ("handle_model_specific_adjustments", "handle_attention_backend_compatibility", "handle_speculative_decoding"):
        raise ValueError(f"{name!r} is not an overridable resolution hook")

    def decorator(fn):
        _HOOKS.setdefault(name, []).append(fn)
        return fn

    return decorator


def run_hook(builtin, server_args):
    step = builtin
    for fn in _HOOKS.get(builtin.__name__, ()):
        step = (lambda fn, previous: lambda args: fn(args, previous))(fn, step)
    step(server_args)
