"""Options shared by several commands, as dataclasses, and the decorator that turns their fields into options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_type_hints

import typer

from bankfull import speculation
from bankfull.choices import ACTIVATIONS, DTYPES, PAGE_TYPES, TIERS
from bankfull.cli.scheduling import USUAL_SCHEDULING, SchedulingOptions
from bankfull.declared import meanings
from bankfull.errors import ConfigError
from bankfull.ranks.mesh import LAYOUTS

if TYPE_CHECKING:
    from bankfull.llm import LLM
    from bankfull.sample.params import SamplingParams

Command = Callable[..., int | None]

Model = Annotated[
    str,
    typer.Option("-m", "--model", help="A directory, a .gguf file, a hub id (org/name), or a short name (smollm2)."),
]
Dtype = Annotated[str, typer.Option(help=f"Dtype of the computation. {meanings(DTYPES)}.")]
KvDtype = Annotated[str, typer.Option(help=f"Format of the KV cache. {meanings(PAGE_TYPES)}.")]
KvEvict = Annotated[
    str | None,
    typer.Option(
        metavar="sinks:N,window:M",
        help="Keep only the first N and the last M tokens of a sequence in layers with full attention (lossy): their "
        "pages are freed while it runs.",
        show_default="keep all",
    ),
]
Activations = Annotated[str, typer.Option(help=f"Format of activations in matrix products. {meanings(ACTIVATIONS)}.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
NoLimit = Annotated[bool, typer.Option("--no-limit", help="Do not compare the speed with this machine's limit.")]
ForecastSpeculative = Annotated[
    str,
    typer.Option(
        "--speculative",
        metavar="NAME[:MODEL][,KEY=VALUE]",
        help="Predict the gain of speculative decoding: suffix or ngram (width), draft:MODEL (depth, breadth, "
        "quantize; a config.json is enough), medusa (heads, nodes, layers, vocabulary; medusa:DIR for trained heads) "
        "or eagle (depth, nodes, vocabulary; eagle:DIR for trained heads). Nothing needs to be trained.",
    ),
]
ForecastAcceptance = Annotated[
    str | None,
    typer.Option(
        "--acceptance",
        help="Chance that a draft is accepted, by position, each given that all before it were accepted: "
        "0.8,0.7,0.6,0.5. It sets the number of positions.",
        show_default="an assumption, which is printed",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(min=1, help="CPU threads.", show_default="BANKFULL_THREADS, or all cores available to the process"),
]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The model and the engine's configuration."""

    model: Model = "smollm2"
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto"
    dtype: Dtype = "auto"
    max_model_len: Annotated[
        int | None, typer.Option(help="Most tokens of a sequence, including the prompt.", show_default="the model's")
    ] = None
    memory: Annotated[
        str | None,
        typer.Option(
            help="Memory for the KV cache and other state: 2GiB, or 50% of the free memory.", show_default="automatic"
        ),
    ] = None
    kv_host: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help=f"Size (8GiB) of {TIERS['kv_host'].about}.",
            show_default="none",
        ),
    ] = None
    kv_disk: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE[:PATH]",
            help=f"Size (100GiB, 100GiB:/var/cache/kv) of {TIERS['kv_disk'].about}. The files are private to the "
            "user; `bankfull cache` lists and deletes them.",
            show_default="none",
        ),
    ] = None
    kv_host_rate: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Bytes per second written to --kv-host at most.", show_default="no limit"),
    ] = None
    kv_disk_rate: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Bytes per second written to --kv-disk at most.", show_default="no limit"),
    ] = None
    kv_disk_age: Annotated[
        float | None,
        typer.Option(metavar="HOURS", help="Do not use older content of --kv-disk.", show_default="no limit"),
    ] = None
    pin_share: Annotated[
        float,
        typer.Option(
            help="Fraction of that memory, with --kv-host and --kv-disk, that pinned prefixes may hold (cache_control)."
        ),
    ] = 0.5
    rows: Annotated[
        int | None, typer.Option(help="Most sequences in the batch.", show_default="64 on a CPU, 256 on a GPU")
    ] = None
    step_tokens: Annotated[
        int | None,
        typer.Option(
            help="Most tokens computed in one step.", show_default="128 for each CPU thread, 512 to 2048; 8192 on a GPU"
        ),
    ] = None
    scheduling: SchedulingOptions = USUAL_SCHEDULING
    page_tokens: Annotated[int, typer.Option(help="Tokens per page of the KV cache.")] = 16
    no_prefix_cache: Annotated[bool, typer.Option("--no-prefix-cache", help="Turn off the prefix cache.")] = False
    depth: Annotated[
        int | None,
        typer.Option(help="Steps that the host may lag behind the device: 0 or 1.", show_default="by device"),
    ] = None
    providers: Annotated[str, typer.Option(help="auto (the fastest kernels) or torch (the reference).")] = "auto"
    expand: Annotated[bool, typer.Option("--expand", help="Dequantize the weights at load; needs more memory.")] = False
    quantize: Annotated[
        str | None,
        typer.Option(
            help="Quantize the matrices of an unquantized checkpoint at load (lossy): int8, int4, int4:64 (groups of "
            "64 columns; 32 is the default on a CPU, 128 on a GPU), int8:row (one scale per row, the int8 of a GPU), "
            "fp8 (on a GPU activations are rounded per token, too, unless --activations float; on a CPU weights only), "
            "llm.int8 (int8 beside columns in bfloat16, as load_in_8bit), or a GGUF type such as q4_k,keep. "
            "int4,tables quantizes the embeddings and the head, too. 2:4 drops the zeros of a checkpoint that was "
            "pruned so (on a GPU; not lossy).",
            show_default=False,
        ),
    ] = None
    kv_dtype: KvDtype = "auto"
    kv_evict: KvEvict = None
    activations: Activations = "auto"
    parallel: Annotated[
        str,
        typer.Option(
            metavar="AXIS=RANKS[,AXIS=RANKS]",
            help="Split the model over ranks, each a process with its own device or its share of the cores, as in "
            f"tp=2,pp=2,ep=2. {meanings(LAYOUTS)}.",
            show_default="one rank",
        ),
    ] = ""
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="The Ray cluster to join, this machine being one of its nodes: it runs the ranks of --parallel after "
            "the first one, or the engines of `serve` with --replicas or --separate.",
            show_default="ranks and engines are processes of this machine; with --replicas also RAY_ADDRESS. local: a "
            "Ray of its own",
        ),
    ] = None
    threads: Threads = None
    speculative: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[:MODEL][,KEY=VALUE]",
            show_default="BANKFULL_SPECULATIVE, or auto; off in `bankfull bench`",
            help=f"Speculative decoding: off, or {speculation.summary()}. rule=same keeps the tokens of plain "
            "decoding, rule=rejection their distribution; rule=typical is lossy.",
        ),
    ] = None
    diffusion: Annotated[
        str,
        typer.Option(
            metavar="KEY=VALUE[,KEY=VALUE]",
            show_default="threshold=0.9",
            help="Denoising of a diffusion model (LLaDA, Dream, SDAR): threshold (each step fixes every token with a "
            "higher confidence; 1: only the most confident one), tokens (at least this many), order (confidence or "
            "random), block (positions denoised together), and where tokens see the whole sequence length (mask tokens "
            "after the prompt) and cache=block (lossy; refresh: steps until all is computed again).",
        ),
    ] = ""

    def rounding(self) -> dict[str, str]:
        """The given options that change results, under the names of RunConfig."""
        asked = {"quantize": self.quantize, "kv_dtype": self.kv_dtype, "activations": self.activations}
        return {name: value for name, value in asked.items() if value not in (None, "auto")}

    def options(self) -> dict[str, Any]:
        """All options but the model, under the names of `LLM`."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        del named["model"], named["scheduling"]
        named.update(self.scheduling.given())
        named["prefix_cache"] = not named.pop("no_prefix_cache")
        if self.speculative is None:
            del named["speculative"]
        return named

    def load(self, *, chats: bool = False) -> LLM:
        """The model, ready to run. The engine's notices go to stderr. `chats`: start the chat template's process
        meanwhile."""
        import logging

        logging.basicConfig(format="bankfull: %(message)s", level=logging.WARNING)
        from bankfull.cli.startup import read_text_while_torch_loads
        from bankfull.cli.terminal import say
        from bankfull.collector import garbage_collector_off
        from bankfull.familiar import configure

        with garbage_collector_off():
            configuration = configure(self.options())
            text = read_text_while_torch_loads(self.model)
            if chats:
                from bankfull.text.render_process import short_calls

                short_calls.begin()
            from bankfull.llm import LLM
            from bankfull.loading import load

            llm = LLM(self.model, loaded=load(self.model, *configuration, text=text))
        if (start := llm.loaded.start) is not None:
            say(f"bankfull: loaded in {start}")
        return llm


def refuse_unread(options: EngineOptions, read: Sequence[str], what: str) -> None:
    """Refuse an option that was given although this mode reads only those named in `read`. `what`: what the others
    describe, and the way out."""
    usual = EngineOptions()
    for field in fields(options):
        if field.name not in read and getattr(options, field.name) != getattr(usual, field.name):
            raise ConfigError(f"--{field.name.replace('_', '-')} describes {what}")


NO_LIMIT = 0


def _token_limit(value: str) -> int:
    """The value of --max-tokens: a number, or `none` for no limit but the context."""
    if value == "none":
        return NO_LIMIT
    try:
        limit = int(value)
    except ValueError:
        limit = 0
    if limit < 1:
        raise typer.BadParameter(f"{value[:40]!r} is not a number of at least 1; give one, or none.")
    return limit


def _max_tokens(usual: str) -> Any:
    return typer.Option(
        parser=_token_limit,
        metavar="N|none",
        show_default=usual,
        help="Most tokens to generate; none: until the context is full.",
    )


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """Sampling parameters. The model's recommendation replaces those not given (`bankfull.sample.recommended`)."""

    temperature: Annotated[
        float | None, typer.Option(help="0: greedy decoding.", show_default="the model's recommendation, or 0.7")
    ] = None
    top_k: Annotated[
        int | None, typer.Option(help="Sample from the k most likely tokens; 0: all.", show_default=False)
    ] = None
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Sample from the most likely tokens with this total probability.",
            show_default="the model's recommendation, or 0.9",
        ),
    ] = None
    min_p: Annotated[
        float | None,
        typer.Option(help="Least probability of a token, relative to the most likely one.", show_default=False),
    ] = None
    repetition_penalty: Annotated[float | None, typer.Option(help="1: no penalty.", show_default=False)] = None
    presence_penalty: Annotated[float | None, typer.Option(help="0: no penalty.", show_default=False)] = None
    frequency_penalty: Annotated[float | None, typer.Option(help="0: no penalty.", show_default=False)] = None
    max_tokens: Annotated[int | None, _max_tokens("none")] = None
    seed: Annotated[int | None, typer.Option(help="Random seed; makes sampling repeatable.", show_default="random")] = (
        None
    )
    stop: Annotated[
        list[str] | None, typer.Option(help="Stop string; may be given several times.", show_default=False)
    ] = None
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Continue after the end-of-text token.")] = False

    def given(self) -> dict[str, Any]:
        """The given options, under the names of SamplingParams."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        if values["max_tokens"] == NO_LIMIT:
            del values["max_tokens"]
        return {name: value for name, value in values.items() if value is not None and value is not False}

    def params(self, llm: LLM) -> SamplingParams:
        from bankfull.cli.sampling import params_from

        return params_from(llm.default_params(), self.given())


@dataclass(frozen=True, slots=True)
class LimitedSampling(SamplingOptions):
    """Interactive commands: an answer has a default limit."""

    usual: ClassVar[int]

    def limit(self, room: int) -> dict[str, Any]:
        """The default of `max_tokens`, if it was not given; `room` is the number of tokens left in the context."""
        return {"max_tokens": min(self.usual, room)} if self.max_tokens is None and room > 0 else {}


@dataclass(frozen=True, slots=True)
class RunSampling(LimitedSampling):
    """One answer: 512 tokens are a page of text, ten seconds of a small model on two slow cores."""

    usual = 512
    max_tokens: Annotated[int | None, _max_tokens("512")] = None


@dataclass(frozen=True, slots=True)
class ChatSampling(LimitedSampling):
    """A turn of a conversation may be a long text or a program, and Ctrl-C stops it."""

    usual = 1024
    max_tokens: Annotated[int | None, _max_tokens("1024")] = None


def flat(command: Command) -> Callable[..., int | None]:
    """A command that takes dataclasses of options, as typer needs it: each field an option of its own."""
    hints = get_type_hints(command, include_extras=True)
    hints.pop("return", None)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters = []
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name in groups:
            parameters += _spread(groups[parameter.name])
        else:
            kind = inspect.Parameter.KEYWORD_ONLY
            parameters.append(parameter.replace(kind=kind, annotation=hints[parameter.name]))

    @wraps(command)
    def run(**values: Any) -> int | None:
        for name, group in groups.items():
            values[name] = _gathered(group, values)
        return command(**values)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    del run.__wrapped__  # typer would look behind the signature
    return run


def _spread(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    parameters = list[inspect.Parameter]()
    for field in fields(group):
        assert field.default is not MISSING, f"{group.__name__}.{field.name} needs a default"
        hint, kind = hints[field.name], inspect.Parameter.KEYWORD_ONLY
        if is_dataclass(hint):
            parameters += _spread(hint)
        else:
            parameters.append(inspect.Parameter(field.name, kind, default=field.default, annotation=hint))
    return parameters


def _gathered(group: Any, values: dict[str, Any]) -> Any:
    """The group of options with these values, which are removed; a field may be a group itself."""
    hints = get_type_hints(group, include_extras=True)
    taken = {
        field.name: _gathered(hints[field.name], values) if is_dataclass(hints[field.name]) else values.pop(field.name)
        for field in fields(group)
    }
    return group(**taken)
