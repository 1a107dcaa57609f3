"""Initial values of the models: how their weight matrices and their embeddings are drawn.

As nothing is set, embeddings come from N(0, 1/D), so that tied logits start near 1, and every other matrix as
`initialisation` says. `embedding_initialisation` names another way for the embeddings, learned positions included, and
for an output projection over the vocabulary that is not tied to them: the classical recipes draw both alike.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from torch import Tensor, nn

Initialisation = Literal["xavier_uniform", "xavier_normal", "normal", "uniform"]
_RANGES = {"normal": 0.02, "uniform": 0.1}


@dataclass(frozen=True, kw_only=True)
class InitialisationSettings:
    """The settings of a model's initial values; a base of the models' settings."""

    initialisation: str = field(
        default="xavier_uniform", metadata={"help": "of the weight matrices", "choices": get_args(Initialisation)}
    )
    initialisation_range: float | None = field(
        default=None,
        metadata={
            "help": "uniform: from -range to range, unset: 0.1; normal: deviation, unset: 0.02",
            "only": {"initialisation": tuple(_RANGES)},
        },
    )
    embedding_initialisation: str | None = field(
        default=None,
        metadata={
            "help": "of the embeddings, and of an output projection over the vocabulary that is not tied; unset: "
            "embeddings with deviation 1/sqrt(d_model), the projection as the other matrices",
            "choices": get_args(Initialisation),
        },
    )
    embedding_range: float | None = field(
        default=None,
        metadata={
            "help": "as initialisation_range, of the embeddings; normal, unset: 1/sqrt(d_model)",
            "only": {"embedding_initialisation": tuple(_RANGES)},
        },
    )

    def check_ranges(self) -> None:
        """Raise ValueError for a range that is none, or that nothing is drawn from."""
        for owner, name in (
            ("initialisation", "initialisation_range"),
            ("embedding_initialisation", "embedding_range"),
        ):
            how, width = getattr(self, owner), getattr(self, name)
            if width is not None and not 0 < width < float("inf"):
                raise ValueError(f"{name} must be above 0 and finite, not {width}")
            if width is not None and how not in _RANGES:
                raise ValueError(f"{name}={width} is for {owner} {' and '.join(_RANGES)}, not for {how}")


def initialise(model: nn.Module, settings: Any, output_is_over_vocabulary: bool = True) -> None:
    """Draw all weight matrices of a model, in the order of its parameters; the bias of its output becomes 0.

    Args:
        model: with its embeddings in `Embedding` modules and its output projection in `output`, not tied yet.
        settings: `InitialisationSettings` with d_model.
        output_is_over_vocabulary: False: what it projects to are classes, and it is drawn as the other matrices.
    """
    width = settings.d_model**-0.5
    matrices = _drawing(settings.initialisation, settings.initialisation_range, _RANGES["normal"])
    embeddings = _drawing(settings.embedding_initialisation or "normal", settings.embedding_range, width)
    follows = output_is_over_vocabulary and settings.embedding_initialisation is not None
    for name, parameter in model.named_parameters():
        if name.endswith(("tokens.weight", "positions.weight")) or (follows and name == "output.weight"):
            embeddings(parameter)
        elif parameter.dim() > 1:
            matrices(parameter)
        elif name == "output.bias":
            nn.init.zeros_(parameter)


def _drawing(how: str, width: float | None, deviation: float) -> Callable[[Tensor], Tensor]:
    """What fills a matrix; `deviation`: of "normal" without a range."""
    bound = _RANGES["uniform"] if width is None else width
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "xavier_uniform": nn.init.xavier_uniform_,
        "xavier_normal": nn.init.xavier_normal_,
        "normal": lambda w: nn.init.normal_(w, std=deviation if width is None else width),
        "uniform": lambda w: nn.init.uniform_(w, -bound, bound),
    }
    return ways[how]
