"""The feed-forward network of a layer."""
