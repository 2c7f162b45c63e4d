"""JSON objects, or lists of them, between tags: Hermes, Qwen, SmolLM, Phi-4-mini, Granite."""

from __future__ import annotations

from bankfull.serve.parsers.json_calls import json_calls
from bankfull.serve.parsers.pythonic import python_calls
from bankfull.serve.parsers.session import Block

_HERMES = Block("<tool_call>", ("</tool_call>",), (json_calls("</tool_call>"),))
_BARRED = Block("<|tool_call|>", ("<|/tool_call|>",), (json_calls("<|/tool_call|>"),))

HERMES_BLOCKS = (_HERMES,)
SMOLLM3_BLOCKS = (_HERMES, Block("<code>", ("</code>",), (python_calls,)))
PHI_BLOCKS = (_BARRED, Block("functools", (), (json_calls(),)))
GRANITE_BLOCKS = (_BARRED, _HERMES)
