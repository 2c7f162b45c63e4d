"""Trained heads for SmolLM2-135M-Instruct: data, each folder made by the recipe in its config.json."""
