class DraftBackendFactory:
    """What the backends of a draft worker are made by; one of the draft runner's own comes before the target's."""

    def __init__(self, draft_model_runner, topk, speculative_num_steps):
        self.draft_model_runner, self.topk, self.speculative_num_steps = draft_model_runner, topk, speculative_num_steps

    def _create_backend(self, backend_name, backend_map, error_template, stamps_children=False):
        name = self.draft_model_runner.draft_attention_backend
        if name not in backend_map:
            raise ValueError(error_template.format(backend_type=name))
        stamp, backend = backend_map[name]()
        for each in [backend, *(backend.attn_backends if stamps_children else [])]:
            each.decode_attention_backend_str = stamp
        return backend

    def create_decode_backend(self):
        if self.speculative_num_steps <= 1:
            return None
        own = {"triton": lambda: ("triton", None)}
        return self._create_backend("decode_attention_backend", own, "EAGLE is not supported in {backend_type}", stamps_children=True)

    def create_draft_extend_backend(self):
        return self._create_backend("prefill_attention_backend", {"triton": lambda: ("triton", None)}, "EAGLE is not supported in {backend_type}")
