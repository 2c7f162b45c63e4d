"""Triton's interpreter beside a current numpy, which no longer takes an array of one number for that number."""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter


def let_loops_run_to_a_loaded_number() -> None:
    """`range` in a kernel asks its bounds for an index; the interpreter's own answer is an error since numpy 2.4."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched
