"""`python -m mlx_dflash.generate` on the golden pairs: what goes to stdout and stderr, what ran, how it ends."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tiny

import mlx_dflash
from mlx_dflash import generate, load
from mlx_dflash.download import say

command_line = tiny.command_line()
pytestmark = pytest.mark.usefixtures("offline")
CONTEXT = 17  # the recorded prompt whose drafts are accepted most


class Pair(NamedTuple):
    flags: list[str]
    prompt: str
    tokens: list[int]  # what the reference went on with

    @property
    def text(self) -> str:
        return tiny.words(self.tokens)


class Ended(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        assert len(self.out.splitlines()) == 1
        return dict(json.loads(self.out))


def make_pair(family: str, target: Path, config: dict[str, Any] | None = None) -> Pair:
    tiny.copy_folder(tiny.target_folder(family), target, config, tokenizer_config={"eos_token": tiny.REMOVE})
    golden = tiny.golden(family)
    flags = ["--model", str(target), "--draft-model", str(tiny.draft_folder(family))]
    return Pair(flags, tiny.words(golden[f"p{CONTEXT}_ids"]), golden[f"p{CONTEXT}_tokens"].tolist())


@pytest.fixture(scope="module")
def pair(request, tmp_path_factory) -> Pair:
    return make_pair(getattr(request, "param", "qwen3"), tmp_path_factory.mktemp("pair") / "target")


both = pytest.mark.parametrize("pair", ["qwen3", "llama"], indirect=True)


@pytest.fixture
def command(capfd, pair):
    """Run the command line in this process on the pair and its prompt."""

    def run(*argv: str, tokens: int = len(pair.tokens), base: list[str] | None = None) -> Ended:
        flags = pair.flags if base is None else base
        capfd.readouterr()
        with pytest.raises(SystemExit) as exit_:
            command_line.main([*flags, "--prompt", pair.prompt, "--max-tokens", str(tokens), *argv])
        out, err = capfd.readouterr()
        assert isinstance(exit_.value.code, int)
        return Ended(exit_.value.code, out, err)

    return run


# What goes where


@both
def test_the_text_goes_to_stdout_and_all_else_to_stderr(command, pair):
    code, out, err = command()
    assert (code, out) == (0, pair.text + "\n")
    names, sampling, summary = err.splitlines()
    assert sampling.startswith("sampling | default: temp 0.0, ")
    assert all(flag in names for flag in pair.flags if not flag.startswith("--"))
    assert summary.startswith("dflash | ")
    for part in ("tokens/s", "mean accepted length", "acceptance", "block sizes", f"{len(pair.tokens)} tokens, length"):
        assert part in summary


@both
def test_json_prints_one_object_and_speculation_ran(command, pair):
    ended = command("--json", "--block-size", "8")
    assert set(ended.json) == {"text", "tokens", "finish_reason", "stats"}
    assert (ended.code, ended.json["text"], ended.json["tokens"]) == (0, pair.text, pair.tokens)
    assert ended.json["finish_reason"] == "length"
    stats = ended.json["stats"]
    assert (stats["mode"], stats["timing"], stats["plain_rounds"]) == ("dflash", "fused", 0)
    assert stats["rounds"] > 0 and stats["accepted"] > 0
    assert stats["acceptance_lengths"] == tiny.golden(family_of(pair))[f"p{CONTEXT}_accept"].tolist()
    assert stats["generation_tokens"] == len(pair.tokens)
    assert stats["prompt_tokens"] == CONTEXT


def family_of(pair: Pair) -> str:
    return Path(pair.flags[3]).parent.name


def test_json_and_text_runs_say_the_same(command):
    assert command("--json").json["text"] + "\n" == command().out


def test_json_keeps_characters_outside_ascii_and_is_one_line(command, pair, tmp_path):
    folder = tmp_path / "target"
    tiny.copy_folder(Path(pair.flags[1]), folder)
    words = json.loads((folder / "tokenizer.json").read_text())
    words["model"]["vocab"] = {w if i < 3 else f"\u00e9\n{i}": i for w, i in words["model"]["vocab"].items()}
    (folder / "tokenizer.json").write_text(json.dumps(words))
    ended = command("--json", "--prompt", "\u00e9\n5", base=["--model", str(folder)])
    assert "\u00e9" in ended.out and "\n" in ended.json["text"]


def test_verbose_false_leaves_stderr_empty(command, pair):
    assert command("--verbose", "False") == (0, pair.text + "\n", "")
    assert command("--verbose", "F", "--json").err == ""


def test_what_takes_long_is_said_but_not_with_verbose_false(command, pair, capfd):
    assert command("--verbose", "False").err == ""
    say("measuring")
    assert capfd.readouterr().err == ""
    command()
    say("measuring")
    assert capfd.readouterr().err == "measuring\n"


def test_plain_decoding_for_want_of_a_drafter_is_said_in_one_line(command, pair):
    ended = command(base=pair.flags[:2])
    assert (ended.code, ended.out) == (0, pair.text + "\n")
    names, _, summary = ended.err.splitlines()
    assert "plain decoding" in names and "no drafter is known" in names and "--draft-model" in names
    assert summary.startswith("plain | ")


def test_plain_is_plain(command, pair):
    ended = command("--plain", "--json", base=pair.flags[:2])
    stats = ended.json["stats"]
    assert (ended.json["tokens"], stats["mode"], stats["rounds"], stats["drafted"]) == (pair.tokens, "plain", 0, 0)
    assert "--plain" in ended.err


@pytest.mark.parametrize("argv", [["--version"], ["--help"]])
def test_version_and_help_go_to_stdout(capfd, argv):
    with pytest.raises(SystemExit) as exit_:
        command_line.main(argv)
    out, err = capfd.readouterr()
    assert (exit_.value.code, err) == (0, "")
    assert out == f"mlx_dflash {mlx_dflash.__version__}\n" if argv == ["--version"] else "--block-size" in out


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("terminal", "no_color", "coloured"),
    [(True, None, True), (True, "", True), (True, "1", False), (False, None, False), (False, "1", False)],
)
def test_escape_codes_only_on_a_terminal_without_no_color(command, monkeypatch, terminal, no_color, coloured):
    stderr = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color is not None:
        monkeypatch.setenv("NO_COLOR", no_color)
    ended = command("--compare", tokens=4)
    assert ended.code == 0 and stderr.getvalue()
    assert ("\x1b" in stderr.getvalue()) == coloured
    assert "\x1b" not in ended.out


# Prompts


@pytest.mark.parametrize("text", ["{}", "{}\n", "\n{}\n\n"])
def test_a_dash_reads_the_prompt_from_stdin(command, pair, monkeypatch, text):
    monkeypatch.setattr(sys, "stdin", io.StringIO(text.format(pair.prompt)))
    assert command("--prompt", "-").out == pair.text + "\n"


def test_escapes_in_the_prompt_become_white_space_as_in_mlx_lm(command, pair):
    assert command("--prompt", pair.prompt.replace(" ", "\\n", 3).replace(" ", "\\t", 3)).out == pair.text + "\n"


TEMPLATE = (
    "{% for m in messages %}{{ 'w5 ' if m.role == 'system' else 'w6 ' if m.role == 'user' else 'w7 ' }}"
    "{{ m.content }} {% endfor %}{% if add_generation_prompt %}w8 {{ extra }}{% endif %}"
)


@pytest.mark.parametrize(
    ("argv", "prompt"),
    [
        ([], "w6 w30 w8"),
        (["--system-prompt", "w31"], "w5 w31 w6 w30 w8"),
        (["--prefill-response", "w32 w33"], "w6 w30 w7 w32 w33"),
        (["--chat-template-config", '{"extra": "w34"}'], "w6 w30 w8 w34"),
        (["--use-default-chat-template"], "w6 w30 w8"),
        (["--ignore-chat-template"], "w30"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_chat_template_is_applied_as_in_mlx_lm(command, pair, tmp_path, argv, prompt):
    folder = tmp_path / "target"
    tiny.copy_folder(Path(pair.flags[1]), folder, tokenizer_config={"chat_template": TEMPLATE})
    got = command(*argv, "--prompt", "w30", "--json", base=["--model", str(folder)], tokens=12).json
    model, tokenizer = load(folder)
    assert got["tokens"] == generate(model, tokenizer, prompt, max_tokens=12).tokens
    assert got["stats"]["prompt_tokens"] == len(prompt.split())


# What ran


def test_num_draft_tokens_is_the_block_size_less_the_anchor(command):
    drafts, block = command("--num-draft-tokens", "4", "--json").json, command("--block-size", "5", "--json").json
    assert drafts["tokens"] == block["tokens"]
    for key in ("block_sizes", "acceptance_lengths", "drafted", "accepted"):
        assert drafts["stats"][key] == block["stats"][key]
    assert max(map(int, drafts["stats"]["block_sizes"])) == 5


def test_block_size_1_is_plain(command, pair):
    for argv in (["--block-size", "1"], ["--num-draft-tokens", "0"]):
        got = command(*argv, "--json").json
        assert (got["tokens"], got["stats"]["mode"], got["stats"]["drafted"]) == (pair.tokens, "plain", 0)


@pytest.mark.parametrize(
    "argv", [[], ["--temp", "0.9", "--top-p", "0.95", "--seed", "3"], ["--temp", "1.5", "--seed", "7"]], ids=" ".join
)
def test_compare_finds_the_tokens_of_plain_decoding_equal(command, pair, argv):
    ended = command("--compare", *argv)
    assert ended.code == 0
    last = ended.err.splitlines()[-1]
    assert "tokens equal" in last and "plain" in last and " x " in last
    assert len(ended.out.splitlines()) == 1
    report = command("--compare", "--json", *argv).json
    assert report["compare"]["equal"] is True
    assert report["stats"]["rounds"] > 0
    assert report["compare"]["plain_tokens_per_second"] > 0


def test_compare_says_where_the_tokens_part(command, monkeypatch):
    stream = mlx_dflash.api.stream_generate
    calls = []

    def other(model: Any, tokenizer: Any, ids: Any, **options: Any) -> Any:
        calls.append(options)
        changed = {} if options.get("draft_model") else {"temp": 5.0, "seed": 1}
        return stream(model, tokenizer, ids, **options | changed)

    monkeypatch.setattr(command_line, "stream_generate", other)
    ended = command("--compare")
    assert "tokens part at " in ended.err and "logit margin" in ended.err
    report = command("--compare", "--json").json["compare"]
    assert report["equal"] is False and report["first_difference"] >= 0 and report["logit_margin"] > 0


def test_compare_samples_the_plain_run_with_the_seed_of_the_first(command, monkeypatch):
    seeds = iter(range(5, 99))
    monkeypatch.setattr("mlx_dflash.accept.secrets.randbits", lambda bits: next(seeds))
    report = command("--compare", "--json", "--temp", "1.5").json
    assert (report["compare"]["equal"], report["stats"]["sampling"]["seed"]) == (True, 5)


def test_a_seed_makes_sampling_repeatable_and_is_reported(command):
    once = command("--temp", "1.2", "--json").json
    seed = once["stats"]["sampling"]["seed"]
    again = command("--temp", "1.2", "--seed", str(seed))
    assert again.out == once["text"] + "\n"
    assert f"seed {seed}" in again.err


def test_profile_times_drafting_and_verifying_apart(command, pair):
    ended = command("--profile", "--json")
    stats = ended.json["stats"]
    assert (ended.json["tokens"], stats["timing"]) == (pair.tokens, "profiled")
    assert stats["draft_time"] > 0 and stats["verify_time"] > 0
    assert "draft " in ended.err and "verify " in ended.err


@pytest.mark.parametrize("flag", ["--stop", "--extra-eos-token"])
def test_stops_end_the_text_and_are_not_shown(command, pair, flag):
    at = next(i for i, token in enumerate(pair.tokens) if i > 5 and token not in pair.tokens[:i] and token > 99)
    got = command(flag, f"w{pair.tokens[at]}", "--json", "--block-size", "8").json
    assert got["tokens"] == pair.tokens[: at + 1]
    assert got["text"].rstrip() == tiny.words(pair.tokens[:at])
    assert got["finish_reason"] == "stop"


def test_max_tokens_is_exact(command, pair):
    for count in (1, 2, 7, 8, 9):
        got = command("--max-tokens", str(count), "--json", "--block-size", "8").json
        assert (got["tokens"], got["finish_reason"]) == (pair.tokens[:count], "length")


# Endings


@pytest.fixture(scope="module")
def endless(tmp_path_factory) -> Pair:
    """A pair without stop ids, so that a text of 2000 tokens is one."""
    pair = make_pair("qwen3", tmp_path_factory.mktemp("endless") / "target", {"eos_token_id": None})
    (Path(pair.flags[1]) / "generation_config.json").unlink()
    return pair


def start(pair: Pair, folder: Path, *argv: str, **options: Any) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "mlx_dflash.generate", *pair.flags, "--prompt", pair.prompt]
    command += ["--max-tokens", "2000", "--ignore-chat-template", *argv]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    return subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True, **options)


@pytest.mark.parametrize("plain", [False, True], ids=["dflash", "plain"])
def test_ctrl_c_ends_with_the_text_so_far_a_summary_and_code_130(endless, tmp_path, plain):
    pair = endless._replace(flags=endless.flags[:2]) if plain else endless
    output = tmp_path / "out"
    with output.open("w") as file:
        process = start(pair, tmp_path, stdout=file)
    while output.stat().st_size < 20 and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    text = output.read_text()
    tokens = text.split()
    assert text.endswith("\n") and 4 < len(tokens) < 2000
    assert tokens[: len(pair.tokens)] == pair.text.split()[: len(tokens)]
    *_, summary = err.splitlines()  # before it, at first use, a word that rounds are measured
    assert summary.startswith("plain | " if plain else "dflash | ")
    assert f"{len(tokens)} tokens, interrupted" in summary


def press_ctrl_c_at(monkeypatch: pytest.MonkeyPatch, calls: set[int]) -> None:
    """Ctrl-C during the given forward passes of the target."""
    forward, count = mlx_dflash.targets.Target.forward, iter(range(10**9))

    def pressed(*args: Any, **options: Any) -> Any:
        if next(count) in calls:
            signal.raise_signal(signal.SIGINT)
        return forward(*args, **options)

    monkeypatch.setattr(mlx_dflash.targets.Target, "forward", pressed)


def test_ctrl_c_still_prints_the_json_object_of_what_there_is(command, pair, monkeypatch):
    press_ctrl_c_at(monkeypatch, {5})
    ended = command("--json", "--compare", "--block-size", "8")
    assert ended.code == 130
    assert ended.json["finish_reason"] == "interrupted"
    tokens = ended.json["tokens"]
    assert 0 < len(tokens) < len(pair.tokens) and tokens == pair.tokens[: len(tokens)]
    assert sum(ended.json["stats"]["acceptance_lengths"]) == len(tokens) - 1
    assert "compare" not in ended.json


def test_ctrl_c_in_the_plain_run_of_a_comparison_keeps_the_first_result(command, pair, monkeypatch):
    press_ctrl_c_at(monkeypatch, {len(pair.tokens)})
    ended = command("--json", "--compare", "--block-size", "8")
    assert (ended.code, ended.json["tokens"]) == (130, pair.tokens)
    assert "compare" not in ended.json and "tokens part" not in ended.err


def test_ctrl_c_while_loading_ends_at_once(command, monkeypatch):
    def load(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(command_line, "load", load)
    old = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits an ignored SIGINT
    try:
        assert command() == (130, "", "interrupted\n")
    finally:
        signal.signal(signal.SIGINT, old)


def test_ctrl_c_in_a_long_prompt_ends_at_once(command, monkeypatch):
    press_ctrl_c_at(monkeypatch, {2})
    assert command("--prefill-step-size", "2") == (130, "", "interrupted\n")


def test_a_second_ctrl_c_ends_at_once(command, monkeypatch):
    press_ctrl_c_at(monkeypatch, {4, 5})
    monkeypatch.setattr(command_line.Interrupt, "asked", lambda self: False)  # a round that takes long
    ended = command()
    assert (ended.code, ended.err) == (130, "interrupted\n")


def test_the_old_signal_handler_is_back_afterwards(command, monkeypatch):
    before = signal.getsignal(signal.SIGINT)
    command(tokens=2)
    press_ctrl_c_at(monkeypatch, {3})
    command()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_reader_that_leaves_early_ends_it_quietly(endless, tmp_path):
    process = start(endless, tmp_path, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()  # as `| head -c 1` does
    err = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=30) == 0
    assert "Traceback" not in err and "BrokenPipe" not in err, err


def test_a_reader_that_is_gone_before_the_json_ends_it_quietly(endless, tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    process = start(endless, tmp_path, "--max-tokens", "4", "--json", "--verbose", "False", stdout=writing)
    os.close(writing)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, "")


def test_a_long_prompt_shows_how_far_it_is_on_a_terminal_only(monkeypatch, capsys):
    cli = tiny.command_line()
    cli.prompt_bar(5000, 10_000)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    cli.prompt_bar(500, 1000)
    assert capsys.readouterr().err == ""
    cli.prompt_bar(5000, 10_000)
    cli.prompt_bar(10_000, 10_000)
    shown = capsys.readouterr().err
    assert "[###############...............] 5,000 of 10,000 tokens" in shown and shown.endswith("\r\x1b[K")


def test_lookup_and_the_draft_window_are_flags(capsys):
    main = tiny.command_line().main
    base = ["--model", str(tiny.target_folder()), "--prompt", "w1 w2 w3", "--max-tokens", "8"]
    with pytest.raises(SystemExit) as done:
        main([*base, "--draft-model", "lookup"])
    assert done.value.code == 0 and "drafts from the text itself (lookup)" in capsys.readouterr().err
    paired = [*base, "--draft-model", str(tiny.draft_folder()), "--no-lookup"]
    with pytest.raises(SystemExit) as done:
        main([*paired, "--draft-window", "4", "--draft-sink", "2"])
    assert done.value.code == 0 and "dflash" in capsys.readouterr().err
    for flags, words in (
        (["--draft-window", "0"], "draft_window must be 1 or more"),
        (["--draft-window", "4", "--draft-sink", "-1"], "draft_sink must be 0 or more"),
        (["--draft-sink", "4"], "draft_window must be 1 or more"),
    ):
        with pytest.raises(SystemExit) as done:
            main([*paired, *flags])
        error = capsys.readouterr().err
        assert done.value.code == 2 and words in error and error.count("\n") == 1
    with pytest.raises(SystemExit) as done:
        main([*base, "--draft-model", "lookup", "--draft-window", "4"])
    assert done.value.code == 2 and "draft_window needs a draft model" in capsys.readouterr().err
    windowed = [
        "--model",
        str(tiny.target_folder("qwen3_sliding")),
        "--draft-model",
        str(tiny.draft_folder("qwen3_sliding")),
    ]
    with pytest.raises(SystemExit) as done:
        main([*windowed, "--prompt", "w1 w2", "--draft-window", "4"])
    assert done.value.code == 2 and "has a window of its own" in capsys.readouterr().err
