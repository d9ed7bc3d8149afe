"""A stand-in for vLLM 0.33: the modules, names, signatures and calling order that an attention backend meets, and nothing else."""

__version__ = "0.33.0"
