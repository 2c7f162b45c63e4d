"""What each way to run a model costs and loses: bits, bytes, seconds, KL divergence, perplexity, recall."""
