"""What quantization and other options cost in accuracy, on bundled or given texts."""
