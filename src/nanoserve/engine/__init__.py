"""The loop that turns requests into tokens, how it is built, and how it is reached from other processes."""
