"""The norms over the last dimensions, and the step between two sublayers that ends in one: a file an op."""
