"""Doors to other libraries, a file a library; each needs that library, and nothing else of the package needs them."""
