"""Products with weights: linear layers, their arg-max and embeddings, over every format of weights."""
