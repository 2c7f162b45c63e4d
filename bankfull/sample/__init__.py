"""From logits to a token: sampling parameters, penalties, logprobs, grammars."""
