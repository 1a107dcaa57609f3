"""Integrations with other libraries, one module per library; the rest of fastformer does not need these libraries."""
