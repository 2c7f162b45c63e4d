"""Multi-token prediction: the module that a checkpoint was trained with drafts the tokens after the next one.

The module is one decoder layer over the embedding of a token and the target model's last hidden state of the token
before it, as an EAGLE-1 head is, with its state in the same pages. A checkpoint's first module drafts every token of
the chain: it gets its own last hidden states where the target model's are not known yet.
"""

from __future__ import annotations

from collections.abc import Callable

from bankfull.decode.eagle import CHAIN, Eagle
from bankfull.layers.decoder import Decoder
from bankfull.layers.eagle import EagleHead


class MultiTokenPrediction(Eagle):
    def __init__(self, build: Callable[[Decoder], EagleHead], width: int = 2) -> None:
        """`build`: makes the module for the target model. `width`: draft tokens of a chain."""
        super().__init__(build, depth=width, tree=CHAIN)
