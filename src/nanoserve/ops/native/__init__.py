"""Kernels for CPUs in C++: quantized matmul, attention, norms."""
