"""Layouts over NCCL, on as many GPUs as there are: `make test-multi-gpu`."""
