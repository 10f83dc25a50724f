"""Paged attention: the KV pool's tensors, what a step tells the kernels, and one backend a file."""
