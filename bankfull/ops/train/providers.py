"""Importing this module registers the providers for training of all operations with state, and of the embedding."""

from bankfull.ops.attention import train as _attention  # noqa: F401
from bankfull.ops.latent import train as _latent  # noqa: F401
from bankfull.ops.products import train as _products  # noqa: F401
from bankfull.ops.recurrence import train as _recurrence  # noqa: F401
