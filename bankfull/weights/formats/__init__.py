"""Every storage scheme that the engine reads, by name."""

from bankfull.weights.formats import dense, fp8_groups, groups, importance, kquants, legacy, mxfp4, rows, two_of_four
from bankfull.weights.scheme import Scheme

SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        *dense.SCHEMES,
        *legacy.SCHEMES,
        *kquants.SCHEMES,
        *groups.SCHEMES,
        *rows.SCHEMES,
        fp8_groups.SCHEME,
        *two_of_four.SCHEMES,
    )
}
READ_ONLY: dict[str, Scheme] = {scheme.name: scheme for scheme in (mxfp4.SCHEME, *importance.SCHEMES)}
"""Schemes of files that nothing is quantized to."""
