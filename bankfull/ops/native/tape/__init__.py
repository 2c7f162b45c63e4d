"""A model's step as a flat list of kernels: recorded once, fused, laid out in an arena, replayed in one call into C++.

`record` runs a model on tensors without data and records its operations; `forms` maps an operation to kernels; `fuse`
joins kernels whose intermediate results need not go through memory; `layout` places intermediate results in the arena;
`replay` runs the tape; `origins` finds the source line of an expression that cannot be recorded.
"""

from bankfull.ops.native.tape.record import Recorder
from bankfull.ops.native.tape.replay import ChoosingStep, RowsAt, Tape

__all__ = ["ChoosingStep", "Recorder", "RowsAt", "Tape"]
