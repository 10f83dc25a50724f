"""How weights are stored: one file a format. Its dequantize is its definition; faster kernels are tested against it."""
