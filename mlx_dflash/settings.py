"""The sampling settings of a request: which are in force, and where each value comes from.

A value given with the request goes first, then those of the source that the request names (the model card's or
generation_config.json), then the defaults. Nothing but the request's own word brings in a source.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .accept import LOWEST_TEMP, Sampler, Sampling
from .errors import RequestError, UnsupportedError
from .facts import recommended_names, target_facts
from .processors import WINDOW, Processors, is_number, is_whole

DEFAULTS: dict[str, Any] = {
    "temp": 0.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "min_tokens_to_keep": 1,
    "repetition_penalty": None,
    "repetition_context_size": WINDOW,
    "presence_penalty": None,
    "presence_context_size": WINDOW,
    "frequency_penalty": None,
    "frequency_context_size": WINDOW,
    "logit_bias": None,
    "seed": None,
    "proposals": "argmax",
    "draft_temp": None,
}
SOURCES = ("recommended", "generation_config")
# generation_config.json's names of what we have under another one or the same.
GENERATION_CONFIG = {
    "temperature": "temp",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
}
PROPOSALS = ("argmax", "coupled")
COUPLED_FROM = 0.5  # temperature from which coupled drafts, measured to be kept more often there, are the default
MOST_TOP_LOGPROBS = 100

# Options of mlx-lm that are refused by name: name -> the value that means "not used".
UNSUPPORTED: dict[str, Any] = {
    "quantized_kv_start": 0,
    "max_kv_size": None,
    "prompt_cache": None,
    "sampler": None,
    "input_embeddings": None,
    "xtc_probability": 0.0,
}


@dataclass(frozen=True)
class Settings:
    """Every sampling setting in force (the keys of DEFAULTS) and, under the same keys, its origin."""

    values: dict[str, Any]
    origins: dict[str, str]

    def sampler(self, own: Any = None, logprobs: bool = False, top_logprobs: int = 0, vocab: int = 0) -> Sampler:
        """The sampler that follows them; raises RequestError for a setting out of range, or a contradiction.

        own: the user's logits processors. vocab: the target's tokens; 0 leaves the ids of logit_bias unchecked.
        """
        v = self.values
        sampling = Sampling(
            **{key: v[key] for key in ("temp", "top_p", "top_k", "min_p", "min_tokens_to_keep", "seed")}
        )
        if callable(own) or not (own is None or isinstance(own, (list, tuple))):
            raise RequestError("logits_processors must be a list of functions of (tokens, logits)")
        penalties = {key: v[key] for key in v if "penalty" in key or "context_size" in key or key == "logit_bias"}
        processors = Processors(**penalties, own=tuple(own or ()))
        if vocab:
            processors.check_vocabulary(vocab)
        if not is_whole(top_logprobs) or not 0 <= top_logprobs <= MOST_TOP_LOGPROBS:
            raise RequestError(f"top_logprobs must be 0 to {MOST_TOP_LOGPROBS}, not {top_logprobs!r}")
        if top_logprobs and not logprobs:
            raise RequestError("top_logprobs needs logprobs; ask for both, or drop top_logprobs")
        if vocab and top_logprobs > vocab:
            raise RequestError(f"top_logprobs is {top_logprobs}, and the model has {vocab} tokens; lower it")
        coupled = self.coupled()
        temp = sampling.temp if v["draft_temp"] is None else v["draft_temp"]
        return Sampler(sampling, processors, logprobs, top_logprobs, coupled, temp, vocab)

    def coupled(self) -> bool:
        kind, temp = self.values["proposals"], self.values["draft_temp"]
        if kind not in PROPOSALS:
            raise RequestError(f"proposals must be one of {', '.join(PROPOSALS)}, not {kind!r}")
        if temp is not None and kind != "coupled":
            raise RequestError("draft_temp needs coupled proposals; set proposals to coupled, or drop draft_temp")
        if temp is not None and not (is_number(temp) and LOWEST_TEMP <= temp < float("inf")):
            raise RequestError(f"draft_temp = {temp!r} is out of range; it must be a number above 0")
        return bool(kind == "coupled")

    def report(self, sampler: Sampler) -> dict[str, Any]:
        """For the stats: every value in force, the seed that was drawn included, and under "from" the origins."""
        values, origins = dict(self.values), dict(self.origins)
        if values["seed"] is None and sampler.sampling.seed is not None:
            values["seed"], origins["seed"] = sampler.sampling.seed, "drawn"
        if values["logit_bias"] is not None:
            values["logit_bias"] = dict(values["logit_bias"])
        if sampler.processors.own:
            values["logits_processors"], origins["logits_processors"] = len(sampler.processors.own), "request"
        return {**values, "from": origins}


def resolve(
    given: Mapping[str, Any],
    source: str | None = None,
    model_name: str = "",
    generation_config: Mapping[str, Any] | None = None,
    thinking: bool | None = None,
) -> Settings:
    """Settings from what a request gives (None: not given) and the source of defaults that it names.

    Raises RequestError for an unknown source, or one that this model does not have.
    """
    values, origins = dict(DEFAULTS), dict.fromkeys(DEFAULTS, "default")
    if source is not None:
        found, origin = look_up(source, model_name, generation_config or {}, thinking)
        values |= found
        origins |= dict.fromkeys(found, origin)
    for key, value in given.items():
        if value is not None:
            values[key], origins[key] = value, "request"
    if origins["proposals"] == "default" and is_number(values["temp"]) and values["temp"] >= COUPLED_FROM:
        values["proposals"] = "coupled"
    return Settings(values, origins)


def look_up(
    source: str, model_name: str, generation_config: Mapping[str, Any], thinking: bool | None
) -> tuple[dict[str, Any], str]:
    """The values of a source of defaults, and what to call it."""
    if source == "recommended":
        facts = target_facts(model_name)
        found = facts.sampling(thinking) if facts else {}
        if facts is None or not found:
            known = ", ".join(recommended_names())
            raise RequestError(
                f"no recommended sampling is known for {model_name or 'this model'}; set temp and the rest yourself "
                f"(known: {known})"
            )
        return found, f"model card of {facts.name}"
    if source == "generation_config":
        found = {ours: generation_config[key] for key, ours in GENERATION_CONFIG.items() if generation_config.get(key)}
        if generation_config.get("do_sample") is False:
            found["temp"] = 0.0
        if not found:
            raise RequestError("the model's generation_config.json has no sampling settings; set temp and the rest")
        found.setdefault("temp", 1.0)  # Hugging Face's value where the file has none
        return found, "generation_config.json"
    raise RequestError(f"sampling_defaults must be one of {', '.join(SOURCES)}, not {source!r}")


def refuse_option(name: str, value: Any) -> None:
    """Refuse an option that is unknown, or mlx-lm's and not served here."""
    if name not in UNSUPPORTED:
        raise RequestError(f"unknown option {name!r}")
    if value is not None and value != UNSUPPORTED[name]:
        raise UnsupportedError(f"the option {name!r} is not supported yet")
