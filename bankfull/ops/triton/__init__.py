"""What the Triton kernels of all operations share. Imported only if a CUDA device is used."""
