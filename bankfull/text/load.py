"""The tokenizer and the chat template of a model, from a directory of JSON files or from GGUF metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import tokenizers

from bankfull.errors import ModelError
from bankfull.text.gguf import tokenizer_from_gguf
from bankfull.text.template import ChatTemplate
from bankfull.text.tokenizer import Tokenizer

_LARGEST = 1 << 29  # bytes of one tokenizer file
_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Files(Protocol):
    """The parts of a model's files that are read here: a `ModelFiles` or a `TextFiles`."""

    @property
    def path(self) -> Path: ...
    @property
    def kind(self) -> str: ...
    @property
    def config(self) -> Mapping[str, object]: ...
    @property
    def generation(self) -> Mapping[str, object]: ...
    @property
    def metadata(self) -> Mapping[str, object]: ...


def load_tokenizer(files: Files) -> tuple[Tokenizer, ChatTemplate | None]:
    return _from_gguf(files) if files.kind == "gguf" else _from_directory(files)


def _from_gguf(files: Files) -> tuple[Tokenizer, ChatTemplate | None]:
    metadata = files.metadata
    tokenizer = tokenizer_from_gguf(metadata)
    source = metadata.get("tokenizer.chat_template")
    if source is None:
        return tokenizer, None
    names = {f"{name}_token": metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in _GGUF_TOKENS.items()}
    names["bos_token"] = tokenizer.bos_id
    spelled = {name: tokenizer.backend.id_to_token(int(str(id))) for name, id in names.items() if id is not None}
    tokens = {name: token for name, token in spelled.items() if token is not None}
    tool_source = metadata.get("tokenizer.chat_template.tool_use")
    return tokenizer, ChatTemplate(
        _text(source, "tokenizer.chat_template"),
        tokens=tokens,
        bos_token=tokens.get("bos_token"),
        eos_token=tokens.get("eos_token"),
        tool_source=None if tool_source is None else _text(tool_source, "tokenizer.chat_template.tool_use"),
    )


_GGUF_TOKENS = {"eos": "eos", "unk": "unknown", "pad": "padding"}


def _from_directory(files: Files) -> tuple[Tokenizer, ChatTemplate | None]:
    folder = Path(files.path)
    folder = folder if folder.is_dir() else folder.parent
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"{folder} has no tokenizer.json: save the model's fast tokenizer there")
    _check_size(path)
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exceptions
        raise ModelError(f"{path} is not a readable tokenizer: {error}") from None
    # A stored length limit is for training; here it would silently truncate prompts.
    backend.no_truncation()
    backend.no_padding()
    settings = {**_read(folder / "special_tokens_map.json"), **_read(folder / "tokenizer_config.json")}
    tokens = {name: token for name in _TOKEN_NAMES if (token := _content(settings.get(name))) is not None}
    _make_special(backend, tokens, settings)
    bos_id = _token_id(backend, tokens, "bos_token", path)
    if bos_id is None:
        bos_id = next(iter(_ids(files.config.get("bos_token_id"), "bos_token_id")), None)
    eos_id = _token_id(backend, tokens, "eos_token", path)
    owners = (files.generation, files.config)
    eos_ids = {id for owner in owners for id in _ids(owner.get("eos_token_id"), "eos_token_id")}
    opening = _opening(backend)
    add_bos = settings.get("add_bos_token")
    tokenizer = Tokenizer(
        backend,
        bos_id=bos_id,
        eos_ids=eos_ids if eos_id is None else eos_ids | {eos_id},
        add_bos=bool(opening) if add_bos is None else bool(add_bos),
        opening=opening,
    )
    return tokenizer, _template(folder, settings, tokens)


def _make_special(backend: tokenizers.Tokenizer, tokens: Mapping[str, str], settings: Mapping[str, object]) -> None:
    """Mark tokens as special that the settings declare so and the tokenizer file does not."""
    extra = settings.get("additional_special_tokens") or settings.get("extra_special_tokens")
    more = extra.values() if isinstance(extra, dict) else extra if isinstance(extra, list) else ()
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    named = [*tokens.values(), *(token for item in more if (token := _content(item)) is not None)]
    known = [token for token in dict.fromkeys(named) if backend.token_to_id(token) is not None]
    missing = [token for token in known if token not in special]
    if missing:
        backend.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in missing])


def _opening(backend: tokenizers.Tokenizer) -> tuple[int, ...]:
    """The tokens that the tokenizer's post-processor puts before a text."""
    bare = backend.encode("a", add_special_tokens=False).ids
    full = backend.encode("a", add_special_tokens=True).ids
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return tuple(full[:start])
    return ()


def _template(folder: Path, settings: Mapping[str, object], tokens: Mapping[str, str]) -> ChatTemplate | None:
    sources = _sources(folder, settings)
    if not sources:
        return None
    if "default" not in sources:
        raise ModelError(
            f"the chat templates of {folder} are named {', '.join(sorted(sources))}, and none is 'default': rename one "
            "to 'default'"
        )
    return ChatTemplate(
        sources["default"],
        tokens=tokens,
        bos_token=tokens.get("bos_token"),
        eos_token=tokens.get("eos_token"),
        tool_source=sources.get("tool_use"),
    )


def _sources(folder: Path, settings: Mapping[str, object]) -> dict[str, str]:
    """Chat templates by name. The .jinja files of the directory override tokenizer_config.json."""
    sources: dict[str, str] = {}
    match settings.get("chat_template"):
        case None:
            pass
        case str(text):
            sources["default"] = text
        case [*entries]:
            for entry in entries:
                fields = entry if isinstance(entry, dict) else {}
                sources[_text(fields.get("name"), "chat_template")] = _text(fields.get("template"), "chat_template")
        case _:
            raise ModelError(
                f"chat_template in {folder / 'tokenizer_config.json'} is neither a string nor a list of templates"
            )
    for name, path in (
        ("default", folder / "chat_template.jinja"),
        ("tool_use", folder / "additional_chat_templates" / "tool_use.jinja"),
    ):
        if path.is_file():
            _check_size(path)
            try:
                sources[name] = path.read_text("utf-8")
            except UnicodeDecodeError:
                raise ModelError(f"{path} is not UTF-8 text: save it as UTF-8") from None
    return sources


def _read(path: Path) -> dict[str, object]:
    if not path.is_file():
        return {}
    _check_size(path)
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not readable JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a JSON object: restore the model's own file")
    return content


def _check_size(path: Path) -> None:
    if path.stat().st_size > _LARGEST:
        raise ModelError(f"{path} is larger than {_LARGEST >> 20} MiB, so it is not a tokenizer file")


def _content(token: object) -> str | None:
    """The text of a token, which is a string or an object with one."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _token_id(backend: tokenizers.Tokenizer, tokens: Mapping[str, str], name: str, path: Path) -> int | None:
    if name not in tokens:
        return None
    id: int | None = backend.token_to_id(tokens[name])
    if id is None:
        raise ModelError(f"{name} {tokens[name]!r} is not in the vocabulary of {path}: correct tokenizer_config.json")
    return id


def _ids(value: object, name: str) -> list[int]:
    items: list[object] = value if isinstance(value, list) else [] if value is None else [value]
    ids = [item for item in items if isinstance(item, int) and not isinstance(item, bool)]
    if len(ids) != len(items):
        raise ModelError(f"{name} is {value!r} in the model's configuration: it must be an id or a list of ids")
    return [id for id in ids if id >= 0]


def _text(value: object, name: str) -> str:
    if isinstance(value, str):
        return value
    raise ModelError(f"{name} of the model is not a text: its files are damaged")
