"""The norms over the last dimensions, a file each, and the step between two sublayers that ends in one of them."""
