"""Models as files: compressed-tensors in safetensors, and GGUF; tensor by tensor, whole or not at all."""
