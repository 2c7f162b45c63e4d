"""Quantization of a model before it is served: methods that read a layer's weights, and its inputs on a text."""
