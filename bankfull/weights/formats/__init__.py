"""Every storage scheme that the engine reads, by name."""

from bankfull.weights.formats import dense, groups, kquants, legacy, rows
from bankfull.weights.scheme import Scheme

SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (*dense.SCHEMES, *legacy.SCHEMES, *kquants.SCHEMES, *groups.SCHEMES, *rows.SCHEMES)
}
