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
    from bankfull.ops.attention import native as _attention  # noqa: F401
    from bankfull.ops.experts import native as _experts  # noqa: F401
    from bankfull.ops.latent import native as _latent  # noqa: F401
    from bankfull.ops.norm import native as _norm  # noqa: F401
    from bankfull.ops.pointwise import native as _activation  # noqa: F401
    from bankfull.ops.pointwise import native_columns as _columns  # noqa: F401
    from bankfull.ops.products.native import linear as _linear  # noqa: F401
    from bankfull.ops.products.native import outliers as _outliers  # noqa: F401
    from bankfull.ops.products.native import packed as _packed  # noqa: F401
    from bankfull.ops.recurrence.native import linear_attention as _linear_attention  # noqa: F401
    from bankfull.ops.recurrence.native import ssm as _recurrent  # noqa: F401
    from bankfull.ops.recurrence.native import state_space as _state_space  # noqa: F401
    from bankfull.ops.rope import native as _rope  # noqa: F401

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
