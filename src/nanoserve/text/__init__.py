"""Between text and token ids: tokenizers, chat templates, and the stream of text that tokens become."""
