"""From a model's name to an engine that runs it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields

from bankfull.assembly import Assembled, assemble
from bankfull.combinations import Asked
from bankfull.config import RunConfig, SchedConfig, StateConfig
from bankfull.decode.strategy import Strategy
from bankfull.frontend import Frontend
from bankfull.models.registry import family_of
from bankfull.runtime.device import Device, open_device
from bankfull.runtime.refused import refuse_other_format
from bankfull.sched.policies import policy_of
from bankfull.text.load import load_tokenizer
from bankfull.text.template import ChatTemplate
from bankfull.text.tokenizer import Tokenizer
from bankfull.weights.locate import locate
from bankfull.weights.source import open_model


@dataclass(slots=True)
class Loaded(Assembled):
    """A model that is ready to run on text."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    frontend: Frontend


def load(
    name: str,
    run: RunConfig,
    sched: SchedConfig,
    state: StateConfig,
    max_len: int | None = None,
    *,
    device: Device | None = None,
    strategy: Strategy | None = None,
    text: tuple[Tokenizer, ChatTemplate | None] | None = None,
    also: Asked = (),
) -> Loaded:
    """`device`, `strategy`: instead of the configuration's. `text`: tokenizer and chat template, if read already.
    `also`: what the engine is for, beside its options."""
    policy_of(sched)  # an unknown name is refused before the model is read
    files = open_model(locate(name))
    refuse_other_format(files, run.stored)
    family_of(files.config)  # refuses an unsupported architecture before anything else is read
    with ThreadPoolExecutor(1) as pool:  # one thread reads the vocabulary; the kernels' threads repack weights
        reading = pool.submit(lambda: text or load_tokenizer(files))
        device = device or open_device(run.device)
        if run.mesh.ranks > 1:
            from bankfull.parallel.leading import assemble_leader  # only several ranks need it

            assembled = assemble_leader(name, files, run, sched, state, max_len, device, strategy, also)
        else:
            assembled = assemble(files, run, sched, state, max_len=max_len, device=device, strategy=strategy, also=also)
        tokenizer, template = reading.result()
    frontend = Frontend(
        assembled.engine,
        tokenizer,
        template,
        vocab=assembled.model.vocab,
        max_len=assembled.sizes.max_len,
        seed=run.seed,
    )
    parts = {field.name: getattr(assembled, field.name) for field in fields(assembled)}
    return Loaded(**parts, tokenizer=tokenizer, template=template, frontend=frontend)
