"""Text around the model: tokenizers, detokenizing, stop strings, and chat templates in a process of their own."""
