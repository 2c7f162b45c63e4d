"""What the providers for training share: a pass over whole sequences, whose state is nothing but its own rows.

Operations with state have a provider of that name, a function of whole sequences with gradients; all others run their
torch bodies, which have them. A training kit (`registry.training_kit`) binds both.
"""
