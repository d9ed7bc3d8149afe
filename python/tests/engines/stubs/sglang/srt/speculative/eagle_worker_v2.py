class TritonAttnBackend:
    pass


class EagleDraftWorker:
    def captures_draft_extend(self, backend):
        return isinstance(backend, tuple([TritonAttnBackend]))
