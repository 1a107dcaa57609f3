"""Models of Hugging Face transformers as ours, with their weights, and back."""

from fastformer.apps.pretrained.models import from_transformers, to_transformers

__all__ = ["from_transformers", "to_transformers"]
