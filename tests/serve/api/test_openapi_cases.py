"""Bodies made from our own OpenAPI document, whole or with one part spoiled: none may end in a server error.

`make soak` does the same with schemathesis and 20,000 cases."""

from __future__ import annotations

import copy
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bankfull.serve.api.openapi import POSTED, document
from tests.quick import examples
from tests.serve.scripted import Scripted
from tests.serve.server import shared

DOCUMENT = document(POSTED)
SCHEMAS = DOCUMENT["components"]["schemas"]
DEPTH = 4
"""Of objects within objects; deeper ones are left empty, because some schemas hold themselves."""
ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 2),
    st.sampled_from([2**40, -(2**70), 1e300]),
    st.text(max_size=4),
    st.lists(st.integers(0, 9), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(0, 9), max_size=2),
)


def values_of(schema: dict[str, Any], depth: int = DEPTH) -> st.SearchStrategy[Any]:
    if "$ref" in schema:
        return values_of(SCHEMAS[schema["$ref"].rpartition("/")[2]], depth)
    if "anyOf" in schema:
        return st.one_of([values_of(one, depth) for one in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if "const" in schema:
        return st.just(schema["const"])
    kind = schema.get("type")
    if kind == "object":
        return objects_of(schema, depth)
    if kind == "array":
        smallest = schema.get("minItems", 0)
        if depth <= 0 and not smallest:
            return st.just([])
        items = schema.get("items")
        return st.lists(values_of(items, depth - 1) if items else ANYTHING, min_size=smallest, max_size=smallest + 2)
    if kind == "integer":
        return st.integers(schema.get("minimum", -5), schema.get("maximum", 40))
    if kind == "number":
        return st.floats(schema.get("minimum", -3), schema.get("maximum", 3), allow_nan=False)
    if kind == "string":
        return st.one_of(st.sampled_from(["tiny", "a river", "<|im_end|>", ""]), st.text(max_size=6))
    return {"boolean": st.booleans(), "null": st.none()}.get(kind, ANYTHING)


def objects_of(schema: dict[str, Any], depth: int) -> st.SearchStrategy[Any]:
    properties, needed = schema.get("properties", {}), schema.get("required", [])
    if not properties:
        others = schema.get("additionalProperties")
        values = values_of(others, depth - 1) if isinstance(others, dict) and others and depth > 0 else ANYTHING
        return st.dictionaries(st.text(max_size=4), values, max_size=2)
    always = {name: values_of(properties[name], depth - 1) for name in needed}
    if depth <= 0:
        return st.fixed_dictionaries(always)

    @st.composite
    def some(draw: st.DrawFn) -> dict[str, Any]:
        left_out = sorted(set(properties) - set(needed))
        chosen = draw(st.lists(st.sampled_from(left_out), max_size=4, unique=True)) if left_out else []
        made = {name: draw(values) for name, values in always.items()}
        return made | {name: draw(values_of(properties[name], depth - 1)) for name in chosen}

    return some()


@st.composite
def spoiled(draw: st.DrawFn, bodies: st.SearchStrategy[Any]) -> Any:
    """Mostly as the schema has it; sometimes one value on the way down is something else."""
    body = copy.deepcopy(draw(bodies))
    inner = body
    while draw(st.booleans()) and inner:
        place = draw(st.sampled_from(sorted(inner) if isinstance(inner, dict) else range(len(inner))))
        if not isinstance(inner[place], dict | list) or draw(st.booleans()):
            inner[place] = draw(ANYTHING)
            break
        inner = inner[place]
    return body


@pytest.fixture(scope="module")
def client() -> Any:
    with httpx.Client(base_url=shared(Scripted(["a ", "river"])), timeout=20) as made:
        yield made


@pytest.mark.parametrize("path", sorted(POSTED))
def test_no_body_that_resembles_the_schema_breaks_the_server(client: httpx.Client, path: str) -> None:
    schema = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    seen: set[int] = set()

    @examples(25)
    @given(spoiled(values_of(schema)))
    def ask(body: Any) -> None:
        response = client.post(path, json=body)
        seen.add(response.status_code)
        assert response.status_code < 500, (body, response.text)
        assert response.status_code == 200 or response.json()["error"]["message"]

    ask()
    assert 400 in seen, "nothing was ever refused: the bodies are too tame"
