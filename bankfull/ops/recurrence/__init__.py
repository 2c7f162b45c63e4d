"""Recurrent mixers: convolutions, scans, linear attention and the delta rule."""
