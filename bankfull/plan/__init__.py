"""`bankfull plan`: which configuration serves a given traffic, found by simulating the engine's own scheduler."""
