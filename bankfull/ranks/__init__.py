"""What one rank of a model knows: the layout, its place, its part of the weights, tokens and pages, its neighbours."""
