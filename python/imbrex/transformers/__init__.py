"""Models of transformers on imbrex.

    import imbrex.transformers
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="imbrex")

Registers "imbrex" with transformers' attention and mask interfaces, and "paged|imbrex" for continuous batching. Masks, sliding windows, sinks, soft
caps and T5's position bias are passed through; what would change the result and cannot be, and models that would not call this function, are refused by
name. Recurrent layers and short convolutions of hybrid models are switched by

    imbrex.transformers.set_recurrent_implementation(model)

Inference only: there is no backward pass. docs/transformers.md has the versions and the models.
"""
from . import _versions

_versions.check()  # before the others ask for what an older version lacks

from transformers import AttentionInterface, AttentionMaskInterface

from ._forward import attention_forward
from ._latent import LatentCache
from ._masks import attention_mask
from ._models import refuse_at_load
from ._paged import keep_in_continuous_batching, paged_attention_forward
from ._recurrent import set_recurrent_implementation

__all__ = ["LatentCache", "attention_forward", "attention_mask", "paged_attention_forward", "register", "set_recurrent_implementation"]


def register() -> None:
    """Makes "imbrex" and "paged|imbrex" known to transformers. Done on import; doing it again changes nothing."""
    AttentionInterface.register("imbrex", attention_forward)
    AttentionInterface.register("paged|imbrex", paged_attention_forward)
    AttentionMaskInterface.register("imbrex", attention_mask)
    refuse_at_load()
    keep_in_continuous_batching()


register()
