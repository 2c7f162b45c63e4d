"""The CPU kernels of csrc/, registered as provider "native" if the extension was built.

Without the extension the torch bodies run, and `status` returns a line that reports it.
"""

from bankfull.ops.native.cores import nodes as memory_nodes
from bankfull.ops.native.extension import (
    copies_weights,
    kernels,
    notify,
    select_isa,
    set_threads,
    status,
    thread_choice,
    threads,
)

if kernels is not None:
    from bankfull.ops.native import activation as _activation  # noqa: F401
    from bankfull.ops.native import attention as _attention  # noqa: F401
    from bankfull.ops.native import columns as _columns  # noqa: F401
    from bankfull.ops.native import experts as _experts  # noqa: F401
    from bankfull.ops.native import latent as _latent  # noqa: F401
    from bankfull.ops.native import linear as _linear  # noqa: F401
    from bankfull.ops.native import linear_attention as _linear_attention  # noqa: F401
    from bankfull.ops.native import norm as _norm  # noqa: F401
    from bankfull.ops.native import outliers as _outliers  # noqa: F401
    from bankfull.ops.native import packed as _packed  # noqa: F401
    from bankfull.ops.native import recurrent as _recurrent  # noqa: F401
    from bankfull.ops.native import rope as _rope  # noqa: F401
    from bankfull.ops.native import state_space as _state_space  # noqa: F401

__all__ = [
    "copies_weights",
    "memory_nodes",
    "notify",
    "select_isa",
    "set_threads",
    "status",
    "thread_choice",
    "threads",
]
