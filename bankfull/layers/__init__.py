"""The parts that models are built from: linear layers, norms, RoPE, attention, state-space mixers."""
