"""Triton kernels and their launchers; nothing here imports torch.nn, autograd or the environment."""
