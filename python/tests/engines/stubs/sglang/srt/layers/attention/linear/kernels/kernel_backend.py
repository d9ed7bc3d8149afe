from abc import ABC, abstractmethod


class LinearAttnKernelBase(ABC):
    uses_state_checkpoints = False
    supports_track_state_snapshot = False

    @abstractmethod
    def decode(self, q, k, v, a, b, *, A_log, dt_bias, ssm_states, cache_indices, query_start_loc, **kwargs):
        ...

    @abstractmethod
    def extend(self, q, k, v, g, beta, *, ssm_states, cache_indices, query_start_loc, **kwargs):
        ...
