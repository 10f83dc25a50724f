"""Who is computed next, and in whose KV blocks. No tensors."""
