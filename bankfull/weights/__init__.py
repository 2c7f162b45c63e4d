"""From model files to quantized tensors: GGUF and safetensors readers, storage formats, requantization."""
