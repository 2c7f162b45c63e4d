"""`bankfull info`: describe a model and its limits on this machine without reading its weights."""

from __future__ import annotations

import json as json_text
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bankfull.cli.options import Json

if TYPE_CHECKING:
    from bankfull.limits.meter.roofline import Roofline
    from bankfull.weights.source import ModelFiles

Title = str


def info(
    model: Annotated[
        str,
        typer.Argument(
            help="A model directory, a config.json, a .gguf file, a hub id (org/name), a shape of make-model --list, "
            "or a short name (smollm2)."
        ),
    ] = "smollm2",
    *,
    roofline: Annotated[
        bool, typer.Option("--roofline", help="Show what bounds each operation on this machine, and the least times.")
    ] = False,
    weights: Annotated[
        bool, typer.Option("--weights", help="List the weights: name, axes, scheme, home, bytes, generation.")
    ] = False,
    dtype: Annotated[str | None, typer.Option(help="Dtype of the computation.", show_default="as saved")] = None,
    json: Json = False,
) -> None:
    """Describe a model: its shape, its size, its state per token, and the cost of a token."""
    from bankfull.cli.terminal import print_table
    from bankfull.limits.model.info import describe
    from bankfull.limits.model.inventory import weights_of
    from bankfull.limits.model.recipe import config_without_weights, files_for_config
    from bankfull.weights.locate import locate
    from bankfull.weights.source import open_model

    bare = config_without_weights(model)
    files = open_model(locate(model)) if bare is None else files_for_config(bare, model)
    description = describe(files, dtype=dtype)
    bounds = _rooflines(files, description.dtype, description.context_length) if roofline else {}
    listed = weights_of(files, dtype=dtype) if weights else []
    if json:
        extra: dict[str, Any] = (
            {"roofline": {title: bound.as_rows() for title, bound in bounds.items()}} if roofline else {}
        )
        extra |= {"weights": [weight.to_dict() for weight in listed]} if weights else {}
        print(json_text.dumps(description.to_dict() | extra))
        return
    from bankfull.limits.model.tables import info_table, roofline_table, weights_table

    print_table(info_table(description))
    if listed:
        print_table(weights_table(listed))
    if bounds:
        from bankfull.ops.native import thread_choice

        chosen = thread_choice()
        print(f"On {chosen.threads} threads: {chosen.why}.")
    for title, bound in bounds.items():
        print_table(roofline_table(bound, title))


def _rooflines(files: ModelFiles, dtype: str, longest: int) -> dict[Title, Roofline]:
    from bankfull.cli.terminal import say
    from bankfull.limits.machine.ceilings import measure
    from bankfull.limits.meter.metered import MeteredModel
    from bankfull.limits.meter.roofline import roofline
    from bankfull.limits.meter.step import StepShape
    from bankfull.limits.model.info import DECODE_CONTEXTS, PREFILL_TOKENS

    metered, ceilings = MeteredModel(files, dtype=dtype), measure()
    caveat = ceilings.caveat(dtype, metered.cost(StepShape.decode()).sum())
    if caveat is not None:
        say(f"bankfull: {caveat}")
    tokens, context = min(PREFILL_TOKENS, longest), min(max(DECODE_CONTEXTS), longest)
    steps: dict[Title, Any] = {
        f"prefill of {tokens} tokens": StepShape.prefill(tokens),
        f"decode at context {context}": StepShape.decode(1, context),
    }
    return {title: roofline(metered.cost(step), ceilings, dtype) for title, step in steps.items()}
