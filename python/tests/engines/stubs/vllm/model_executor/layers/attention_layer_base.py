from abc import ABC, abstractmethod


class AttentionLayerBase(ABC):
    def bind_kv_cache(self, kv_cache):
        self.kv_cache = kv_cache

    @abstractmethod
    def get_attn_backend(self):
        """The class of the backend."""

    @abstractmethod
    def get_kv_cache_spec(self, vllm_config):
        """None for a layer without a cache."""
