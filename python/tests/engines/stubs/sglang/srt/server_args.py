ATTENTION_BACKEND_CHOICES = ["triton", "torch_native", "fa3", "flashinfer", "intel_amx"]

add_attention_backend_choices = ATTENTION_BACKEND_CHOICES.extend
