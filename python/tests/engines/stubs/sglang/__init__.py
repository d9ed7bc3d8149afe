"""A stand-in for SGLang 0.5.23: the modules, names, signatures and calling order that an attention backend meets, and nothing else."""

__version__ = "0.5.23"
