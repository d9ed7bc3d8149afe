from collections import namedtuple

DeviceCapability = namedtuple("DeviceCapability", ["major", "minor"])


class Platform:
    """A GPU's platform takes what is asked for or says why not; a CPU's always takes CPU_ATTN."""

    def __init__(self):
        self.kind = "cpu"

    def is_cpu(self):
        return self.kind == "cpu"

    def get_device_capability(self):
        if self.is_cpu():
            return None
        import torch

        return DeviceCapability(*torch.cuda.get_device_capability()) if torch.cuda.is_available() else DeviceCapability(9, 0)

    def get_attn_backend_cls(self, selected_backend, attn_selector_config, num_heads=None):
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        if self.is_cpu():
            member = AttentionBackendEnum.CPU_ATTN
            if not member.get_class().supports_kv_cache_dtype(attn_selector_config.kv_cache_dtype):
                raise ValueError(f"--kv-cache-dtype {attn_selector_config.kv_cache_dtype} is not supported")
            return member.get_path()
        try:
            found = selected_backend.get_class()
            reasons = found.validate_configuration(device_capability=self.get_device_capability(), **attn_selector_config._asdict())
        except (ImportError, OSError) as error:
            raise ValueError(f"Selected backend {selected_backend} is not valid: [{type(error).__name__}: {error}]") from error
        if reasons:
            raise ValueError(f"Selected backend {selected_backend} is not valid: {reasons}")
        return ".".join(found.full_cls_name())


current_platform = Platform()
