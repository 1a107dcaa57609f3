"""Host code around ops: devices and transfers, registration and autograd Functions, autocast, CUDA graphs."""
