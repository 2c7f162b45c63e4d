"""Products with quantized weights, which stay quantized in memory."""
