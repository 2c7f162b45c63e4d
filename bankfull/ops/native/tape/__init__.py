"""A model's step as a flat list of kernels: recorded once, fused, laid out in an arena, replayed in one call into C++.

`record` runs a model on tensors without data and notes its operations; `forms` says which kernels an operation is;
`fuse` joins what need not go through memory; `layout` gives every intermediate result its place; `replay` runs it.
"""

from bankfull.ops.native.tape.record import Recorder
from bankfull.ops.native.tape.replay import ChoosingStep, RowsAt, Tape

__all__ = ["ChoosingStep", "Recorder", "RowsAt", "Tape"]
