"""GGUF: the container, what its header says, and the names and configurations of each architecture in it."""
