"""Models in the formats of other programs: CTranslate2, safetensors with their settings, the Hugging Face Hub."""

from fastformer.apps.export.ctranslate2 import export_ctranslate2
from fastformer.apps.export.hub import on_hub
from fastformer.apps.export.weights import export_safetensors, load_safetensors

__all__ = ["export_ctranslate2", "export_safetensors", "load_safetensors", "on_hub"]
