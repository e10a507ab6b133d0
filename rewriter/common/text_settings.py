"""Settings of the language model in a config.json, which is often one of several models in the file.

transformers keeps the settings of the text model under another name, and looks for some of them there and for
some at the top: everything here reads as it does (`PreTrainedConfig.get_text_config(decoder=True)`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rewriter.common.errors import RewriterError

_NESTED = ("decoder", "generator", "text_config")
_OF_TEXT = ("bos_", "eos_", "pad_", "_pad_", "sep_", "cls_", "decoder_start_", "forced_", "user_")
_TOKENS = ("_token_id", "_token_index", "image_patch_id")
_IMAGES = ("image_token_id", "image_token_index", "img_context_token_id", "image_patch_id")
_QUANTIZATION = ("quantization_config", "compression_config")


def nested_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config that is its text model's alone; empty where the whole config is one model's."""
    parts = (config.get(name) for name in _NESTED)
    return next((part for part in parts if isinstance(part, Mapping) and part), {})


def text_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the text model: its own, and of those that it has not, the ones at the top."""
    return {**config, **nested_settings(config)}


def with_text_settings(config: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """A config with other `settings` of its text model, at the place where it has that model's."""
    inside = next((name for name in _NESTED if isinstance(config.get(name), Mapping) and config[name]), None)
    return {**config, **settings} if inside is None else {**config, inside: {**config[inside], **settings}}


ON_LOAD = "rewriter_on_load"


def given_on_load(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that a config names for whoever loads the model, since its class refuses them in config.json."""
    said = config.get(ON_LOAD)
    return dict(said) if isinstance(said, Mapping) else {}


def top_setting(config: Mapping[str, Any], *names: str) -> Any:
    """The first of `names` that is set (not null) at the top, else that of the text model; None where neither is."""
    for part in (config, nested_settings(config)):
        value = next((part[name] for name in names if part.get(name) is not None), None)
        if value is not None:
            return value
    return None


def special_tokens(config: Mapping[str, Any]) -> dict[str, int]:
    """The tokens by which a config around a language model marks images and sound, by name; none of another one."""
    if not nested_settings(config):
        return {}
    names = ((name, value) for name, value in config.items() if name.endswith(_TOKENS))
    return {name: value for name, value in names if type(value) is int and not name.startswith(_OF_TEXT)}


def image_token(config: Mapping[str, Any]) -> int | None:
    """The token that a config says images stand at; None where it says none."""
    said = special_tokens(config)
    return next((said[name] for name in _IMAGES if name in said), None)


def quantization_settings(config: Mapping[str, Any]) -> Any:
    """A config's settings on quantized weights, by either name that tools use; None where it has none."""
    return top_setting(config, *_QUANTIZATION)


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config that does not say that weights are quantized, neither at the top nor for the text model."""
    kept = {key: value for key, value in config.items() if key not in _QUANTIZATION}
    inside = {key: without_quantization(kept[key]) for key in _NESTED if isinstance(kept.get(key), Mapping)}
    return kept | inside


def declared_dtype(config: Mapping[str, Any]) -> str | None:
    """The torch dtype that a config names, as "bfloat16"; None where it names none."""
    said = top_setting(config, "dtype", "torch_dtype")
    return None if said is None else str(said).removeprefix("torch.")


def context_length(config: Mapping[str, Any]) -> int:
    """The positions that a config says the model has; where it says none, very many."""
    names = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions")
    return min(_numbers(config, *names), default=1 << 30)


def stream_width(config: Mapping[str, Any]) -> int | None:
    """The width of the residual stream, by a config; None where it does not say."""
    return next(iter(_numbers(config, "hidden_size", "n_embd", "d_model")), None)


def vocabulary_size(config: Mapping[str, Any]) -> int | None:
    """The rows of the table of token embeddings, by a config; None where it does not say."""
    return next(iter(_numbers(config, "vocab_size")), None)


def _numbers(config: Mapping[str, Any], *names: str) -> list[int]:
    table = text_settings(config)
    return [table[name] for name in names if isinstance(table.get(name), int)]


def not_a_token(ids: Iterable[int], vocabulary: int | None, tokenizer: Any = None) -> str | None:
    """Message on the first of `ids` that is beyond a `vocabulary` of that many tokens (None: not known): its number,
    its text by the `tokenizer`, the size, and what can be done. None where there is none."""
    wrong = next((i for i in ids if not 0 <= i < vocabulary), None) if vocabulary is not None else None
    if wrong is None:
        return None
    text, advice = "", "Give ids of this model's tokens"
    if tokenizer is not None:
        text = f" ({tokenizer.convert_ids_to_tokens(wrong)!r})" if wrong >= 0 else ""
        advice = "Take the model's own tokenizer, or resize its embeddings and rewrite it again"
    return f"token {wrong}{text} is beyond the model's vocabulary of {vocabulary}. {advice}"


def check_tokens(what: str, ids: Iterable[int], vocabulary: int | None, tokenizer: Any = None) -> None:
    """Raise RewriterError where one of `ids` is no token of the model: see `not_a_token`."""
    if (wrong := not_a_token(ids, vocabulary, tokenizer)) is not None:
        raise RewriterError(f"{what}: {wrong}")


def check_positions(prompt: int, new: int, table: int | None) -> None:
    """Raise RewriterError where `prompt` tokens and `new` ones after them need more positions than the model's `table`
    of them has (None: it has no table). The last new token is not read, and needs none."""
    if table is not None and prompt + new - 1 > table:
        room = table - prompt + 1
        advice = f"Ask for at most {room} new tokens" if room > 0 else "Give a shorter prompt"
        raise RewriterError(
            f"a prompt of {prompt} tokens and {new} new ones need {prompt + new - 1} positions, and the model has a "
            f"table of {table}. {advice}"
        )
