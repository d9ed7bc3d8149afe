from sglang.srt.arg_groups.model_hook import attention_backends_of, resolved_view


def handle_speculative_decoding(server_args):
    if server_args.speculative_algorithm == "DFLASH":
        server_args.draft = resolved_view(server_args).attention_backend
    elif server_args.speculative_algorithm == "UNO":
        _handle_uno(server_args)
    else:
        _handle_eagle_family(server_args)


def _handle_eagle_family(server_args):
    view = resolved_view(server_args)
    if server_args.speculative_eagle_topk > 1 and view.page_size > 1 and view.attention_backend not in ("flashinfer", "fa3", "triton"):
        raise ValueError(f"only supported on some backends; got {view.attention_backend!r}")


def _handle_uno(server_args):
    prefill, decode = attention_backends_of(resolved_view(server_args))
    if (prefill, decode) != ("fa3", "fa3"):
        raise ValueError(f"UNO requires FA3 for both prefill and decode attention; got prefill={prefill!r}, decode={decode!r}.")
