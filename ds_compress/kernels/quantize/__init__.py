"""Group-wise quantization: formats, PyTorch reference, CPU and GPU kernels."""
