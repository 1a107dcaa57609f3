"""Attention and padding-free models in Hugging Face transformers; importing this module registers "fastformer".

Example::

    import fastformer.integrations.transformers
    model = AutoModel.from_pretrained(name, attn_implementation="fastformer")
    model.set_attn_implementation("fastformer")  # or later, on any model that transformers can switch
    report = fastformer.integrations.transformers.padding_free(model)  # all other layers too; `padded` undoes it

Results equal those of `attn_implementation="eager"` at every real position; a query that may attend to nothing (padding
on the left) gives 0. Options without an argument in `fastformer.functional.attention` raise, and so does the name on a
model whose own code computes attention. transformers >= 5.18 is the oldest release tested.
"""

try:
    from fastformer.integrations.transformers.entry import NAME as NAME
    from fastformer.integrations.transformers.packing import PaddingFree, padded, padding_free
except ImportError as error:
    raise ImportError(
        "fastformer.integrations.transformers needs transformers 5.18 or newer: pip install 'fastformer[transformers]'"
    ) from error

__all__ = ["PaddingFree", "padded", "padding_free"]
