"""Checkpoints: what is in the files, where they come from, and streaming them into a model."""
