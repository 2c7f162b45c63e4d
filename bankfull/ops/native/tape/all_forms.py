"""The forms of all operations. Importing this module registers them."""

from bankfull.ops.attention import tape as _attention  # noqa: F401
from bankfull.ops.experts import tape as _experts  # noqa: F401
from bankfull.ops.latent import tape as _latent  # noqa: F401
from bankfull.ops.native.tape.forms import FORMS
from bankfull.ops.norm import tape as _norm  # noqa: F401
from bankfull.ops.pages import tape as _pages  # noqa: F401
from bankfull.ops.pointwise import tape as _pointwise  # noqa: F401
from bankfull.ops.products import tape as _products  # noqa: F401
from bankfull.ops.recurrence import tape as _recurrence  # noqa: F401
from bankfull.ops.rope import tape as _rope  # noqa: F401

__all__ = ["FORMS"]
