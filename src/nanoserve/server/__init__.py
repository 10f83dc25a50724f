"""The HTTP face: OpenAI-compatible routes over an AsyncEngine and a Tokenizer. No tensors."""
