from abc import ABC


class AttentionBackend(ABC):
    needs_cpu_seq_lens = True
    forward_metadata = None
    extend_dummy_seqs_capped_by_req_pool = False
    supports_full_cuda_graph_chunked_prefix = False
    use_captured_forward_metadata_for_breakable_cuda_graph = False

    _required = (
        "init_forward_metadata_out_graph",
        "init_cuda_graph_state",
        "get_cuda_graph_seq_len_fill_value",
        "forward_decode",
        "forward_extend",
    )

    def __init_subclass__(cls, **kwargs):
        """SGLang's methods raise or do nothing when they are called; here what every served model needs must be there from the start."""
        super().__init_subclass__(**kwargs)
        missing = [name for name in cls._required if getattr(cls, name) is getattr(AttentionBackend, name)]
        if missing:
            raise TypeError(f"{cls.__name__} lacks {', '.join(missing)}")

    def init_forward_metadata(self, forward_batch):
        self.init_forward_metadata_out_graph(forward_batch)
        self.init_forward_metadata_in_graph(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch, in_capture=False):
        pass

    def init_forward_metadata_in_graph(self, forward_batch):
        pass

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        raise NotImplementedError

    def get_cuda_graph_seq_len_fill_value(self):
        raise NotImplementedError

    def on_after_cuda_graph_warmup(self):
        pass

    @property
    def verify_mask(self):
        return None

    def update_verify_buffers_to_fill_after_draft(self, spec_info, cuda_graph_bs):
        raise NotImplementedError

    def forward(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        mode = forward_batch.forward_mode
        if mode.is_idle():
            return q.new_empty(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
        if mode.is_decode():
            return self.forward_decode(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)
        return self.forward_extend(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        raise NotImplementedError

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        raise NotImplementedError

    def forward_mixed(self, q, k, v, layer, forward_batch, save_kv_cache=True):
        raise NotImplementedError
