"""The device's side of a step: the mirror of rows, the forward pass, sampling, and how much memory there is."""
