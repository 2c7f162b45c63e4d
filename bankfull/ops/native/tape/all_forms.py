"""The forms of all operations. Importing this module registers them."""

from bankfull.ops.native.tape import forms_columns as _columns  # noqa: F401
from bankfull.ops.native.tape import forms_latent as _latent  # noqa: F401
from bankfull.ops.native.tape import forms_linear as _linear  # noqa: F401
from bankfull.ops.native.tape import forms_products as _products  # noqa: F401
from bankfull.ops.native.tape import forms_state_space as _state_space  # noqa: F401
from bankfull.ops.native.tape.forms import FORMS

__all__ = ["FORMS"]
