"""fastformer's attention in Hugging Face transformers: import this module, then `attn_implementation="fastformer"`.

    import fastformer.integrations.transformers
    model = AutoModel.from_pretrained(name, attn_implementation="fastformer")
    model.set_attn_implementation("fastformer")  # or later, on any model that transformers can switch
    report = fastformer.integrations.transformers.padding_free(model)  # all other layers too; `padded` undoes it

Results equal those of `attn_implementation="eager"` at every real position. One deliberate difference: a query that may
attend to nothing (padding on the left) gives 0, where eager gives the mean over the padding; a loss depends on it only
through the label of the first token after the padding, which should be -100. Options without an argument in
`fastformer.functional.attention` raise, and so does the name on a model whose own code computes attention.

transformers >= 5.18: the oldest release tested, whose T5 passes its position bias to the attention interface.
"""

try:
    from fastformer.integrations.transformers.entry import NAME as NAME
    from fastformer.integrations.transformers.packing import PaddingFree, padded, padding_free
except ImportError as error:
    raise ImportError(
        "fastformer.integrations.transformers needs transformers 5.18 or newer: pip install 'fastformer[transformers]'"
    ) from error

__all__ = ["PaddingFree", "padded", "padding_free"]
