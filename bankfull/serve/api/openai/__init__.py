"""OpenAI's APIs: chat completions, completions, embeddings, responses, models."""
