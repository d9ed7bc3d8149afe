def scatter_mamba_states_after_mtp_verify(caches, slots, steps, track_slots, track_steps, src_indices_raw=None):
    """As SGLang's kernel, which wants states of the pool to be contiguous."""
    for states, kept in [(caches.temporal, caches.intermediate_ssm), *zip(caches.conv, caches.intermediate_conv_window)]:
        assert states[0, 0].is_contiguous() and states.shape[2:] == kept.shape[3:]
        for row, (slot, step) in enumerate(zip(slots.tolist(), steps.tolist())):
            if step >= 0:
                states[:, slot] = kept[:, row, step]


def update_after_verify(*args):
    return scatter_mamba_states_after_mtp_verify(*args)


class Mamba2AttnBackend:
    def __init__(self, model_runner):
        pass

    def forward(self, mixer, *args, **kwargs):
        return mixer.forward(*args, **kwargs)
