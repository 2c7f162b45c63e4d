"""Training of small language models from a configuration: initial values, synthetic tasks, text, report.

Parameters have the names and shapes that the served model of the same configuration reads, and the layers that serve
compute with them (`train.gradients`), so a trained model is a checkpoint like any other.
"""
