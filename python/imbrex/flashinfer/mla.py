"""The names of flashinfer.mla that imbrex has."""
from ._mla import BatchMLAPagedAttentionWrapper
from ._mla_metadata import MLAPlanMetadata

__all__ = ["BatchMLAPagedAttentionWrapper", "MLAPlanMetadata"]
