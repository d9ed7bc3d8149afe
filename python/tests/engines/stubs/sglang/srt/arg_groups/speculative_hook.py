from sglang.srt.arg_groups.model_hook import resolved_view


def handle_speculative_decoding(server_args):
    if server_args.speculative_algorithm == "DFLASH":
        server_args.draft = resolved_view(server_args).attention_backend
    else:
        _handle_eagle_family(server_args)


def _handle_eagle_family(server_args):
    view = resolved_view(server_args)
    if server_args.speculative_eagle_topk > 1 and view.page_size > 1 and view.attention_backend not in ("flashinfer", "fa3", "triton"):
        raise ValueError(f"only supported on some backends; got {view.attention_backend!r}")
