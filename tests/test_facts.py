"""Model facts, and where settings come from: nothing but the request brings in the values of a card or a file."""

import json
from pathlib import Path

import pytest
import tiny

from mlx_dflash import RequestError, generate, load, load_drafter
from mlx_dflash.facts import decide_thinking, drafter_facts, name_of, read
from mlx_dflash.settings import DEFAULTS, resolve

THINKS = "{% for m in messages %}{{ m.content }} {% endfor %}{% if enable_thinking is false %}w9 {% endif %}"


def test_muse_recommends_what_its_card_says():
    settings = resolve({}, "recommended", "facebook/Muse-Glimmer-30B")
    assert {key: settings.values[key] for key in ("temp", "top_p", "top_k")} == {
        "temp": 1.0,
        "top_p": 0.95,
        "top_k": 64,
    }
    assert settings.origins["temp"] == "model card of Muse Glimmer"


@pytest.mark.parametrize(
    ("name", "thinking", "temp", "top_p"),
    [
        ("Qwen/Qwen3-4B", None, 0.6, 0.95),
        ("Qwen/Qwen3-8B", True, 0.6, 0.95),
        ("mlx-community/Qwen3-4B-4bit", False, 0.7, 0.8),
        ("Qwen/Qwen3-4B-Instruct-2507", None, 0.7, 0.8),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", None, 0.7, 0.8),
        ("Qwen3-Coder-Next", None, 1.0, 0.95),
        ("Qwen/Qwen3.5-9B", False, 0.7, 0.8),
    ],
)
def test_recommended_values_depend_on_the_model_and_on_thinking(name, thinking, temp, top_p):
    values = resolve({}, "recommended", name, {}, thinking).values
    assert (values["temp"], values["top_p"]) == (temp, top_p)


def test_the_request_goes_before_the_source_and_the_source_before_the_default():
    file = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": None, "eos_token_id": 2}
    settings = resolve({"top_p": 0.5, "top_k": None}, "generation_config", "", file)
    assert (settings.values["temp"], settings.origins["temp"]) == (0.6, "generation_config.json")
    assert (settings.values["top_p"], settings.origins["top_p"]) == (0.5, "request")
    assert (settings.values["top_k"], settings.origins["top_k"]) == (0, "default")
    assert resolve({}, None, "Qwen/Qwen3-4B", file).values == DEFAULTS


def test_a_file_that_says_not_to_sample_is_greedy():
    file = {"do_sample": False, "temperature": 0.6}
    assert resolve({}, "generation_config", "", file).values["temp"] == 0.0


@pytest.mark.parametrize(
    ("source", "name", "file"),
    [("recommended", "mine", {}), ("generation_config", "", {"eos_token_id": 2}), ("x", "", {})],
)
def test_a_source_that_has_nothing_is_refused(source, name, file):
    with pytest.raises(RequestError):
        resolve({}, source, name, file)


def test_every_entry_is_a_valid_request():
    for entry in read()["targets"]:
        for values in entry["recommended"].values():
            assert set(values) <= set(DEFAULTS)
            resolve(values).sampler()


def test_a_name_is_the_hubs_in_its_cache_and_else_the_folders():
    assert name_of(Path("/c/models--z-lab--Qwen3-4B-DFlash-b16/snapshots/0a")) == "z-lab/Qwen3-4B-DFlash-b16"
    assert name_of(Path("/home/Qwen3-4B/mine")) == "mine"


class Template:
    chat_template = THINKS


def test_thinking_is_off_with_a_drafter_that_never_saw_it_unless_it_is_asked_for():
    b16 = "z-lab/Qwen3-8B-DFlash-b16"
    assert drafter_facts(b16).thinking is False
    assert decide_thinking(None, Template, b16)[0] is False
    assert decide_thinking(True, Template, b16) == (True, "request")
    assert decide_thinking(None, Template, None)[0] is None
    assert decide_thinking(None, Template, "another")[0] is None
    assert decide_thinking(None, object(), b16)[0] is None


@pytest.fixture(scope="module")
def b16(tmp_path_factory):
    """The tiny pair, named as a drafter that was trained without thinking; its template has the switch."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = {"chat_template": THINKS, "eos_token": tiny.REMOVE}
    target_folder = tiny.copy_folder(tiny.target_folder(), folder / "Qwen3-4B", tokenizer_config=tokenizer)
    (target_folder / "generation_config.json").write_text(
        json.dumps({"do_sample": True, "temperature": 0.6, "top_k": 20})
    )
    draft_folder = tiny.copy_folder(tiny.draft_folder(), folder / "Qwen3-4B-DFlash-b16")
    return target_folder, draft_folder


def test_messages_are_templated_without_thinking_and_the_stats_say_why(b16, monkeypatch):
    target, tokenizer = load(b16[0])
    monkeypatch.setattr(type(tokenizer), "has_thinking", property(lambda self: True))  # then mlx-lm turns it on
    drafter = load_drafter(b16[1], target)
    messages = [{"role": "user", "content": "w5 w6"}]
    run = generate(target, tokenizer, messages, draft_model=drafter, max_tokens=3, sampling_defaults="recommended")
    sampling = run.stats.sampling
    assert sampling["thinking"] is False and "trained without thinking" in sampling["from"]["thinking"]
    assert run.stats.prompt_tokens == 3
    assert (sampling["temp"], sampling["top_p"], sampling["top_k"]) == (0.7, 0.8, 20)
    assert sampling["from"]["top_k"] == "model card of Qwen3" and sampling["from"]["seed"] == "drawn"
    asked = generate(target, tokenizer, messages, draft_model=drafter, max_tokens=3, thinking=True)
    assert asked.stats.prompt_tokens == 2 and asked.stats.sampling["from"]["thinking"] == "request"
    plain = generate(target, tokenizer, messages, max_tokens=3, sampling_defaults="generation_config")
    assert plain.stats.prompt_tokens == 2 and "thinking" not in plain.stats.sampling
    assert (plain.stats.sampling["temp"], plain.stats.sampling["top_k"]) == (0.6, 20)


def test_the_command_line_says_what_is_in_force_and_where_it_comes_from(b16, capfd):
    command = ["--model", str(b16[0]), "--draft-model", str(b16[1]), "--prompt", "w5 w6", "--max-tokens", "3"]

    def run(*flags):
        with pytest.raises(SystemExit) as exit_:
            tiny.command_line().main([*command, *flags])
        out, err = capfd.readouterr()
        assert exit_.value.code == 0, err
        return out, err

    _, err = run("--recommended", "--top-k", "5", "--presence-penalty", "0.5")
    assert "model card of Qwen3: temp 0.7, top_p 0.8" in err and "request: top_k 5, presence_penalty 0.5" in err
    assert "drawn: seed " in err and "thinking is off: Qwen3-4B-DFlash-b16 was trained without it" in err
    out, err = run("--chat-template-config", '{"enable_thinking": true}', "--json", "--logprobs", "--top-logprobs", "2")
    assert "warning: Qwen3-4B-DFlash-b16 was trained without thinking" in err
    result = json.loads(out)
    assert len(result["logprobs"]) == len(result["tokens"]) == len(result["top_logprobs"])
    assert all(best[0][1] == value for best, value in zip(result["top_logprobs"], result["logprobs"], strict=True))
    assert result["stats"]["sampling"]["thinking"] is True
