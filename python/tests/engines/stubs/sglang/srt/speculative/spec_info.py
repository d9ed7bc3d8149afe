class SpeculativeAlgorithm:
    def create_worker(self, server_args):
        from sglang.srt.speculative.frozen_kv_mtp_worker_v2 import FrozenKVMTPDraftWorker

        return FrozenKVMTPDraftWorker
