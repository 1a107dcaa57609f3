"""Export models for other programs: CTranslate2, or safetensors with their settings."""

from fastformer.apps.export.ctranslate2 import export_ctranslate2
from fastformer.apps.export.weights import export_safetensors
from fastformer.apps.runs.application import load_safetensors

__all__ = ["export_ctranslate2", "export_safetensors", "load_safetensors"]
