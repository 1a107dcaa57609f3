"""Initial values of the models' weight matrices and embeddings.

By default, embeddings are drawn from N(0, 1/D), so that tied logits start near 1, and every other matrix as set by
`initialisation`. `embedding_initialisation` changes the distribution of embeddings, learned positions included, and of
an output projection over the vocabulary that is not tied to them: the classical recipes draw both alike.
"""

from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor, nn

Initialisation = Literal["xavier_uniform", "xavier_normal", "normal", "uniform"]
RANGES = {"normal": 0.02, "uniform": 0.1}  # defaults of the distributions with a range


def initialise(model: nn.Module, settings: Any, output_is_over_vocabulary: bool = True) -> None:
    """Draw all weight matrices of a model, in the order of its parameters; the bias of its output becomes 0.

    The model's embeddings are `Embedding` modules and its output projection `output`, not tied yet. settings:
    `ModelSettings`. output_is_over_vocabulary=False: the output projects to classes, and is drawn as other matrices.
    """
    width = settings.d_model**-0.5
    matrices = _drawing(settings.initialisation, settings.initialisation_range, RANGES["normal"])
    embeddings = _drawing(settings.embedding_initialisation or "normal", settings.embedding_range, width)
    follows = output_is_over_vocabulary and settings.embedding_initialisation is not None
    for name, parameter in model.named_parameters():
        if name.endswith(("tokens.weight", "positions.weight", "types.weight")) or (
            follows and name == "output.weight"
        ):
            embeddings(parameter)
        elif parameter.dim() > 1:
            matrices(parameter)
        elif name == "output.bias":
            nn.init.zeros_(parameter)


def _drawing(how: str, width: float | None, deviation: float) -> Callable[[Tensor], Tensor]:
    """Return the function that fills a matrix; `deviation` is that of "normal" without a range."""
    bound = RANGES["uniform"] if width is None else width
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "xavier_uniform": nn.init.xavier_uniform_,
        "xavier_normal": nn.init.xavier_normal_,
        "normal": lambda w: nn.init.normal_(w, std=deviation if width is None else width),
        "uniform": lambda w: nn.init.uniform_(w, -bound, bound),
    }
    return functions[how]
