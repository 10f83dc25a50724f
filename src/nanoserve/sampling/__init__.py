"""From logits to tokens: penalties, bias, masks, the draw, logprobs. No requests, no text, no schedule."""
