"""How weights are stored: one file a format. The dequantize of each is its definition; faster kernels are tested against it."""
