"""Training of drafters: data, hidden states, loop, checkpoints, and the command."""
