from sglang.srt.mem_cache.memory_pool import KVCache


class BaseSWAKVPool(KVCache):
    pass
