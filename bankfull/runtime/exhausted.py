"""Which errors say that memory was too small: of the host or of a device."""

from __future__ import annotations

_SIGNS = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""What such errors of torch and of CUDA's libraries say; they have the general type."""


def lacks_memory(error: BaseException) -> bool:
    """torch.OutOfMemoryError is a RuntimeError, too. Everything else is a bug, and must not be taken for this."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and any(s in str(error) for s in _SIGNS))


def needs_more_memory(tokens: int) -> str:
    """The error of a request whose step failed although nothing ran beside it."""
    return (
        f"The engine has too little memory for this request: a step with {tokens} of its tokens failed although no "
        "other request ran in it; shorten the prompt, ask for fewer samples or log-probabilities, or start the server "
        "with a smaller --memory, which leaves more for steps."
    )
