class Mamba2AttnBackend:
    def __init__(self, model_runner):
        pass

    def forward(self, mixer, *args, **kwargs):
        return mixer.forward(*args, **kwargs)
