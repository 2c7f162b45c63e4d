"""The core uses the parameter names of OpenAI's chat completions; other APIs have names of their own."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from bankfull.errors import RequestError
from bankfull.serve.api.calls import named
from bankfull.serve.api.errors import GenerationFailed, Refusal

_WRONG_VALUE = re.compile(r"(?P<path>\S+): Invalid (?:enum )?value '(?P<value>.*)'\.", re.DOTALL)


@contextmanager
def own_names(names: Mapping[str, str]) -> Iterator[None]:
    """Refusals raised inside use the API's own parameter names."""
    try:
        yield
    except GenerationFailed:
        raise
    except RequestError as error:
        raise _renamed(error, names) from None


def _renamed(error: RequestError, names: Mapping[str, str]) -> Refusal:
    told = error if isinstance(error, Refusal) else named(error)
    message, param, code, status = str(told), None, None, 400
    if isinstance(told, Refusal):
        param, code, status = told.param, told.code, told.status
    wrong = _WRONG_VALUE.fullmatch(message)
    if wrong is not None:
        message = f"{wrong['path']} is {wrong['value'][:80]!r}, which this server does not take."
        return Refusal(message, param=param, code="unsupported_value", status=status)
    for name, own in names.items():
        message = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)" if name.isidentifier() else re.escape(name), own, message)
    return Refusal(message, param=names.get(param, param) if param else None, code=code, status=status)
