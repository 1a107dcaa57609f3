"""Where a language model looks: every attention weight for a text."""

from fastformer.apps.language.text_generator import TextGenerator
from fastformer.apps.plots.attention_maps import AttentionMaps, attend_ids


def attend_text(generator: TextGenerator, text: str) -> AttentionMaps:
    """Compute every attention weight of a language model that reads a text.

    Row t is where the model looked when it had read token t, and was about to predict the next one.

    Args:
        generator: a model with its tokenizer and its context; of a longer text, the last tokens are read, with a
            warning.
        text: read as a prompt of `TextGenerator` is; an empty one leaves what stands before every text.
    """
    [ids] = generator.encode([text])
    ids = ids[-generator.context :]
    return attend_ids(generator.model.eval(), ids, generator.tokenizer.pieces(ids), text)
