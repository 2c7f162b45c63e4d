"""Tool calls as JSON objects or lists between tags: Hermes, Qwen, SmolLM, Phi-4-mini, Granite."""

from __future__ import annotations

from bankfull.serve.parsers.json_calls import json_calls
from bankfull.serve.parsers.pythonic import python_calls
from bankfull.serve.parsers.session import CallBlock

_HERMES = CallBlock("<tool_call>", ("</tool_call>",), (json_calls("</tool_call>"),))
_BARRED = CallBlock("<|tool_call|>", ("<|/tool_call|>",), (json_calls("<|/tool_call|>"),))

HERMES_BLOCKS = (_HERMES,)
SMOLLM3_BLOCKS = (_HERMES, CallBlock("<code>", ("</code>",), (python_calls,)))
PHI_BLOCKS = (_BARRED, CallBlock("functools", (), (json_calls(),)))
GRANITE_BLOCKS = (_BARRED, _HERMES)
