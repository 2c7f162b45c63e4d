"""Training of small language models from a configuration: differentiable layers, synthetic tasks, text, report.

Parameters have the names and shapes that the served model of the same configuration reads, so a trained model is a
checkpoint like any other. A mixer here is a function over whole sequences, built on the same functions of `ops` as the
served one, which takes a sequence in pieces. Tests hold their logits equal.
"""
