"""The chat: in a real terminal, between pipes, and its parts."""

import io
import json
import os
import pty
import re
import select
import subprocess
import sys
import time

import pytest
import tiny

from mlx_dflash.chat.commands import Commands
from mlx_dflash.chat.lines import joined
from mlx_dflash.chat.view import Reasoning, View

TEMPLATE = (
    "{% for m in messages %}{{ 'w5 ' if m.role == 'system' else 'w6 ' if m.role == 'user' else 'w8 ' }}"
    "{{ m.content }} w9 {% endfor %}{% if add_generation_prompt %}w8 {% endif %}"
)


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """The command line of a chat with the tiny pair."""
    folder = tmp_path_factory.mktemp("chat") / "target"
    overrides = {"chat_template": TEMPLATE, "eos_token": tiny.REMOVE}
    tiny.copy_folder(tiny.target_folder(), folder, tokenizer_config=overrides)
    pair = ["--model", str(folder), "--draft-model", str(tiny.draft_folder())]
    return [sys.executable, "-m", "mlx_dflash.chat", *pair, "--block-size", "3", "--max-context", "100000", "-m", "8"]


def environment(tmp_path, **more):
    kept = {k: v for k, v in os.environ.items() if k != "NO_COLOR"}
    return {**kept, "MLX_DFLASH_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1", "TERM": "xterm", **more}


def piped(command, typed, tmp_path, **more):
    env = environment(tmp_path, **more)
    return subprocess.run(command, input=typed, capture_output=True, text=True, env=env, timeout=300)


class Terminal:
    """A program on a pseudo-terminal of its own, so that Ctrl-C typed there reaches it."""

    def __init__(self, command, env):
        self.pid, self.master = pty.fork()
        if self.pid == 0:
            os.execvpe(command[0], command, env)
        self.seen = ""

    def type(self, line):
        self.seen = ""
        os.write(self.master, line.encode() + b"\r")

    def wait(self, pattern, seconds=120):
        """Read until the pattern is seen after the last line typed; returns its match."""
        end = time.monotonic() + seconds
        while (found := re.search(pattern, self.seen)) is None:
            ready, _, _ = select.select([self.master], [], [], max(end - time.monotonic(), 0))
            assert ready, f"no {pattern!r} in {self.seen[-2000:]!r}"
            self.seen += os.read(self.master, 65536).decode(errors="replace")
        return found

    def leave(self):
        self.type("/exit")
        while True:
            try:
                if not os.read(self.master, 65536):
                    break
            except OSError:  # it has gone
                break
        assert os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]) == 0


def test_two_turns_ctrl_c_undo_save_restart_and_load_in_a_terminal(chat, tmp_path):
    terminal = Terminal(chat, environment(tmp_path))
    terminal.wait("/help lists the commands; history and completion")
    terminal.type("w50 w51")
    assert terminal.wait(r"(\d+) found in the cache.*first token").group(1) == "0"
    assert "mean accepted length" in terminal.seen and "\x1b[2m" in terminal.seen  # dimmed
    terminal.type("w60")
    assert int(terminal.wait(r"(\d+) found in the cache.*first token").group(1)) > 8
    terminal.type("/set max_tokens=90000")
    terminal.wait("max_tokens 90000")
    terminal.type("w61")
    terminal.wait(r"w\d+( w\d+){20}")
    os.write(terminal.master, b"\x03")
    terminal.wait("stopped by you")
    terminal.type("/undo")
    terminal.wait("4 messages left")
    terminal.type(f"/save {tmp_path}/talk")
    terminal.wait("saved to")
    terminal.leave()

    again = Terminal(chat, environment(tmp_path))
    again.wait("/help lists the commands")
    again.type(f"/load {tmp_path}/talk")
    again.wait("4 messages, [1-9]")
    again.type("w70")
    assert int(again.wait(r"(\d+) found in the cache.*first token").group(1)) > 8
    again.leave()


def test_between_pipes_only_replies_go_to_stdout_and_nothing_is_coloured(chat, tmp_path):
    typed = "w50 w51\n/nonsense\n/set temp=hot\n/system w40\nw60 \\\nw61\n/retry\n/stats\n"
    for more in ({}, {"NO_COLOR": "1"}):
        ran = piped(chat, typed, tmp_path, **more)
        assert ran.returncode == 0, ran.stderr
        replies = ran.stdout.splitlines()
        assert len(replies) == 3 and all(re.fullmatch(r"w\d+( w\d+)*", reply) for reply in replies)
        assert "\x1b" not in ran.stdout + ran.stderr and "Traceback" not in ran.stderr
        assert "there is no command /nonsense" in ran.stderr and "temp must be a number" in ran.stderr
        assert ran.stderr.count("tokens/s") == 3 and '"acceptance_lengths"' in ran.stderr


def test_a_prompt_cache_file_is_gone_on_from_and_written(chat, tmp_path):
    command = [*chat, "--prompt-cache-file", str(tmp_path / "talk")]
    first, second = (piped(command, text, tmp_path) for text in ("w50 w51\n", "w60\n"))
    assert first.returncode == second.returncode == 0
    assert "2 messages" in second.stderr and re.search(r"[1-9]\d* found in the cache", second.stderr)
    (tmp_path / "talk").write_bytes(b"not a conversation")
    third = piped(command, "", tmp_path)
    assert third.returncode == 2 and "no saved conversation" in third.stderr.splitlines()[-1]


def test_a_full_context_says_what_can_be_dropped(chat, tmp_path):
    typed = "w50 w51 w52\nw53 w54 w55 w56\nw57\n/drop 2\nw57\n"
    ran = piped([*chat, "--max-context", "30"], typed, tmp_path)
    assert "the context is full" in ran.stderr and "/drop N forgets the oldest of 4 messages" in ran.stderr
    assert len(ran.stdout.splitlines()) == 3


def test_reasoning_is_split_from_the_reply_however_its_marks_come():
    text = "<think>because of it</think>So <b>yes</b>."
    for size in range(1, len(text)):
        split = Reasoning("<think>", "</think>")
        chunks = [text[i : i + size] for i in range(0, len(text), size)]
        pieces = [p for i, c in enumerate(chunks) for p in split.feed(c, i == len(chunks) - 1)]
        assert "".join(t for t, thought in pieces if thought) == "because of it"
        assert "".join(t for t, thought in pieces if not thought) == "So <b>yes</b>."
    begun = Reasoning("<think>", "</think>", begun=True)
    assert begun.feed("hm</think>yes", True) == [("hm", True), ("yes", False)]
    assert Reasoning(None, None).feed("<think>") == [("<think>", False)]


def test_reasoning_that_the_template_opens_is_known_from_the_first_message_on(chat, tmp_path):
    folder = tmp_path / "target"
    opened = TEMPLATE.replace("w8 {% endif %}", "w8 <think> {% endif %}")
    tiny.copy_folder(tiny.target_folder(), folder, tokenizer_config={"chat_template": opened, "eos_token": tiny.REMOVE})
    words = json.loads((folder / "tokenizer.json").read_text())
    vocab = words["model"]["vocab"]
    vocab["<think>"], vocab["</think>"] = vocab.pop("w7"), vocab.pop("w11")
    (folder / "tokenizer.json").write_text(json.dumps(words))
    command = [str(folder) if part.endswith("/target") else part for part in chat]
    shown = piped(command, "w50 w51\n", tmp_path)
    hidden = piped(command, "/think hide\nw50 w51\n", tmp_path)
    assert shown.returncode == hidden.returncode == 0, shown.stderr + hidden.stderr
    assert len(shown.stdout.split()) == 8 and "error" not in shown.stderr
    assert hidden.stdout.split() == [] and hidden.stderr.count("tokens/s") == 1


@pytest.mark.parametrize("no_color", ["", "1"])
def test_a_terminal_shows_reasoning_dimmed_but_not_with_no_color(monkeypatch, no_color):
    class Tty(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("NO_COLOR", no_color)
    view = View(Tty())
    view.piece("hm", True)
    view.piece("yes", False)
    view.note("figures")
    dimmed = "\x1b[2mhm\x1b[0myes\x1b[2mfigures\x1b[0m\n"
    assert view.out.getvalue() == ("hmyesfigures\n" if no_color else dimmed)
    view.show_reasoning = False
    view.piece("hidden", True)
    assert "hidden" not in view.out.getvalue()


def test_a_backslash_at_the_end_of_a_line_goes_on_with_the_next():
    lines = iter(["a\\", "b\\", "c", "d"])
    assert joined(lambda: next(lines)) == "a\nb\nc"


def test_every_command_of_the_chat_has_its_help():
    names = Commands.names()
    wanted = "help clear undo retry system set stats block save load plain model think drop exit"
    assert set(names) == {f"/{name}" for name in wanted.split()}
    assert all(names.values())
