ATTENTION_BACKEND_CHOICES = ["triton", "torch_native", "fa3", "flashinfer", "intel_amx"]

add_attention_backend_choices = ATTENTION_BACKEND_CHOICES.extend

DRAFT_ATTENTION_BACKEND_CHOICES = ["flashinfer", "fa3", "triton"]

add_draft_attention_backend_choices = DRAFT_ATTENTION_BACKEND_CHOICES.extend

LINEAR_ATTN_KERNEL_BACKEND_CHOICES = ["triton", "cutedsl", "flashinfer"]

add_linear_attn_kernel_backend_choices = LINEAR_ATTN_KERNEL_BACKEND_CHOICES.extend
