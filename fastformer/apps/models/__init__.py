"""Components of the applications' models: embeddings, positions, initial values, sizes."""

from fastformer.apps.models.embeddings import Embedding, sinusoidal_positions

__all__ = ["Embedding", "sinusoidal_positions"]
