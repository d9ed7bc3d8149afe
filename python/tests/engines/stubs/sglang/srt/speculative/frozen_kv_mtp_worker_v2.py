class FrozenKVMTPDraftWorker:
    """What makes the backend of drafts over the target's own cache; a chain has the draft runner's."""

    def __init__(self, draft_model_runner, topk):
        self.draft_model_runner, self.topk = draft_model_runner, topk

    def _resolve_draft_backend_type(self):
        return self.draft_model_runner.draft_attention_backend

    def _init_draft_attn_backend(self):
        if self.topk == 1:
            return self.draft_model_runner.attn_backend
        if self._resolve_draft_backend_type() == "triton":
            return "triton's"
        raise ValueError(f"Frozen-KV MTP topk > 1 currently supports triton, got {self._resolve_draft_backend_type()}.")
