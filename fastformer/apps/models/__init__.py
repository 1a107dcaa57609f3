"""Components of the applications' models: embeddings, positions, initial values, sizes, random numbers of samples."""

from fastformer.apps.models.embeddings import Embedding, sinusoidal_positions
from fastformer.apps.models.sampling import RandomStreams

__all__ = ["Embedding", "RandomStreams", "sinusoidal_positions"]
