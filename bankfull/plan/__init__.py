"""`bankfull plan`: finds the configuration for a given traffic by simulating the engine's own scheduler."""
