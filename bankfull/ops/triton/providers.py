"""Importing this module registers the Triton kernels of all operations as providers for CUDA devices."""

from bankfull.ops.attention.triton import paged as _paged  # noqa: F401
from bankfull.ops.attention.triton import partial as _partial  # noqa: F401
from bankfull.ops.experts.triton import experts as _experts  # noqa: F401
from bankfull.ops.experts.triton import route as _route  # noqa: F401
from bankfull.ops.latent.triton import attention as _latent_attention  # noqa: F401
from bankfull.ops.latent.triton import heads as _heads  # noqa: F401
from bankfull.ops.norm import triton as _norm  # noqa: F401
from bankfull.ops.pages import triton as _pages  # noqa: F401
from bankfull.ops.pointwise import triton as _pointwise  # noqa: F401
from bankfull.ops.products.triton import embedding as _embedding  # noqa: F401
from bankfull.ops.products.triton import linear as _linear  # noqa: F401
from bankfull.ops.products.triton import outliers as _outliers  # noqa: F401
from bankfull.ops.products.triton import w8a8 as _w8a8  # noqa: F401
from bankfull.ops.products.triton.quantized import linear as _quantized  # noqa: F401
from bankfull.ops.products.triton.sparse24 import linear as _sparse24  # noqa: F401
from bankfull.ops.recurrence.triton import delta as _delta  # noqa: F401
from bankfull.ops.recurrence.triton import linear_attention as _linear_attention  # noqa: F401
from bankfull.ops.recurrence.triton import ssm as _ssm  # noqa: F401
from bankfull.ops.recurrence.triton import state_space as _state_space  # noqa: F401
from bankfull.ops.rope import triton as _rope  # noqa: F401
