"""Convert models of Hugging Face transformers, with their weights, to models of fastformer and back."""

from fastformer.apps.pretrained.models import from_transformers, to_transformers

__all__ = ["from_transformers", "to_transformers"]
