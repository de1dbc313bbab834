"""The benchmarks' prompts: what is built in, a user's own files, saved chats, datasets without network, the flags."""

import argparse
import json
import re
import sys
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import mlx.core as mx
import pytest
import tiny
from mlx_dflash.benchmarks import prompts
from mlx_dflash.benchmarks.prompts import (
    SOURCES,
    TASKS,
    Prompt,
    add_prompt_arguments,
    built_in,
    chosen,
    from_datasets,
    from_file,
    prompts_hash,
)

from mlx_dflash import RequestError, Session, load
from mlx_dflash.training.prompts import held_out_prompts, training_prompts

HI = {"role": "user", "content": "hi"}
HELLO = {"role": "assistant", "content": "hello"}
MORE = {"role": "user", "content": "more"}
SYSTEM = {"role": "system", "content": "be brief"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


# Built in


def test_every_class_has_twelve_prompts_or_more_of_its_own():
    found = built_in()
    assert set(Counter(p.task for p in found)) == set(TASKS)
    assert min(Counter(p.task for p in found).values()) >= 12
    assert len({p.id for p in found}) == len({json.dumps(p.messages) for p in found}) == len(found)
    assert all(p.id.startswith(p.task) for p in found)


def test_no_built_in_prompt_is_one_that_a_drafter_was_trained_or_validated_on():
    def plain(text):
        return re.sub(r"\W+", " ", text.lower()).strip()

    known = {plain(text) for _, text in [*training_prompts(10**6, 0), *held_out_prompts()]}
    asked = [plain(m["content"]) for p in built_in() for m in p.messages if m["role"] == "user"]
    assert len(known) > 1000 and not known & set(asked)


def test_every_built_in_prompt_is_a_conversation_that_waits_for_a_reply():
    turns = Counter()
    for prompt in built_in():
        roles = [m["role"] for m in prompt.messages]
        assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]
        turns[prompt.task] += len(roles) > 1
    assert turns["chat"] >= 3


def test_classes_about_a_text_carry_one():
    for prompt in built_in(["summarisation", "rag", "copy-edit"]):
        assert 100 <= len(prompt.messages[0]["content"].split()) <= 300, prompt.id
    assert all("[1]" in p.messages[0]["content"] and "[2]" in p.messages[0]["content"] for p in built_in(["rag"]))


def test_about_half_of_tool_json_has_tools_and_no_other_class_has():
    found = built_in()
    assert {p.task for p in found if p.tools} == {"tool-json"}
    asked = built_in(["tool-json"])
    tools = [tool for p in asked for tool in p.tools or []]
    assert 4 <= sum(p.tools is not None for p in asked) <= 8
    for tool in tools:
        parameters = tool["function"]["parameters"]
        assert tool["type"] == "function" and tool["function"]["description"]
        assert set(parameters["required"]) <= set(parameters["properties"])


def test_a_run_that_is_cut_has_all_classes():
    assert [p.task for p in built_in()[:24]] == [*TASKS, *TASKS]
    assert [p.task for p in built_in(["rag", "code"], 2)] == ["rag", "code", "rag", "code"]
    assert [p.id for p in built_in(per_class=1)] == [f"{task}-01" for task in TASKS]


def test_an_unknown_class_is_refused_naming_the_classes():
    with pytest.raises(RequestError, match=r"'poems'.*code, maths.*tool-json"):
        built_in(["code", "poems"])
    with pytest.raises(RequestError, match="--per-class"):
        built_in(per_class=0)


def test_the_hash_changes_with_what_is_asked():
    one = Prompt("a", "code", [HI])
    same = prompts_hash([one, Prompt("b", "code", [MORE])])
    assert re.fullmatch("[0-9a-f]{16}", same) and same == prompts_hash([replace(one), Prompt("b", "code", [MORE])])
    others = [
        [one],
        [Prompt("b", "code", [MORE]), one],
        [replace(one, id="c"), Prompt("b", "code", [MORE])],
        [replace(one, messages=[SYSTEM, HI]), Prompt("b", "code", [MORE])],
        [replace(one, tools=[TOOL]), Prompt("b", "code", [MORE])],
    ]
    assert len({same, *map(prompts_hash, others)}) == 6


# Files


@pytest.fixture
def file(tmp_path):
    def write(*rows, name="mine.jsonl"):
        path = tmp_path / name
        path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), encoding="utf-8")
        return path

    return write


def test_the_three_forms_of_a_line(file):
    found = from_file(
        file(
            {"prompt": "hi", "answer": 42},
            "",
            {"messages": [SYSTEM, HI, HELLO, MORE], "id": "x", "tools": [TOOL]},
            {"turns": ["hi", "more"], "tools": []},
        )
    )
    assert found == [
        Prompt("mine-1", "own", [HI]),
        Prompt("x", "own", [SYSTEM, HI, HELLO, MORE], [TOOL]),
        Prompt("mine-4", "own", [HI, MORE]),
    ]


def test_classes_of_a_file_come_in_turn(file):
    found = from_file(file(*({"prompt": f"{task}{i}", "task": task} for task in "ab" for i in range(2))))
    assert [p.messages[0]["content"] for p in found] == ["a0", "b0", "a1", "b1"]


def test_replies_at_the_end_are_left_out_and_results_of_tools_are_not(file):
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "look"}}]}
    result = {"role": "tool", "content": "sunny"}
    found = from_file(file({"messages": [HI, HELLO, MORE, HELLO]}, {"messages": [HI, call, result, HELLO]}))
    assert [p.messages for p in found] == [[HI, HELLO, MORE], [HI, call, result]]


def test_letters_of_any_kind_and_line_separators_in_a_text_are_kept(tmp_path):
    text = "naïve\u2028日本語"
    path = tmp_path / "bom.jsonl"
    path.write_bytes(("\ufeff" + json.dumps({"prompt": text}, ensure_ascii=False) + "\r\n").encode())
    assert from_file(path)[0].messages[0]["content"] == text


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "Expecting"),
        ('"hi"', "not a JSON object"),
        ("{}", "not none"),
        ({"prompt": "hi", "turns": ["hi"]}, "prompt and turns"),
        ({"prompt": " "}, '"prompt" must be a text'),
        ({"prompt": ["hi"]}, '"prompt" must be a text'),
        ({"turns": []}, '"turns" must be a list'),
        ({"turns": ["hi", 3]}, '"turns" must be a list'),
        ({"messages": HI}, '"messages" must be a list'),
        ({"messages": [HI, {"content": "x"}]}, "message 2 needs a role"),
        ({"messages": [{"role": "user"}]}, "message 1 needs a text"),
        ({"messages": [HI, {"role": "assistant", "content": None}]}, "message 2 needs a text"),
        ({"messages": [SYSTEM, HELLO]}, "no user message"),
        ({"messages": [HI, SYSTEM]}, "ends with a system message"),
        ({"prompt": "hi", "id": 3}, '"id" must be'),
        ({"prompt": "hi", "task": ""}, '"task" must be'),
        ({"prompt": "hi", "tools": "look"}, '"tools" must be'),
        ({"prompt": "hi", "id": "first"}, "'first' is that of line 1"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(file, line, why):
    with pytest.raises(RequestError) as refused:
        from_file(file({"prompt": "fine", "id": "first"}, "", line))
    said = str(refused.value)
    assert "mine.jsonl, line 3: " in said and why in said and "\n" not in said


def test_a_missing_an_empty_and_a_binary_file_are_refused(file, tmp_path):
    (tmp_path / "binary").write_bytes(bytes(range(128, 256)))
    for path in (tmp_path / "missing", tmp_path, file("", name="empty"), file(name="nothing"), tmp_path / "binary"):
        with pytest.raises(RequestError, match=path.name) as refused:
            from_file(path)
        assert "\n" not in str(refused.value)


# Saved chats


def test_a_saved_chat_is_asked_again_up_to_its_last_question(tmp_path):
    target, tokenizer = load(tiny.target_folder("qwen3"))
    tokenizer.has_chat_template = True
    session = Session(target, tokenizer, system="be brief")
    session.turns = [HI, HELLO, MORE, HELLO]
    session.save(tmp_path / "talk")
    assert from_file(tmp_path / "talk") == [Prompt("talk", "own", [SYSTEM, HI, HELLO, MORE])]
    session.system, session.turns = None, [HI]
    session.save(tmp_path / "talk.safetensors")
    assert from_file(tmp_path / "talk.safetensors") == [Prompt("talk", "own", [HI])]


def test_a_chat_without_questions_and_other_safetensors_files_are_refused(tmp_path):
    def save(name, **metadata):
        path = tmp_path / f"{name}.safetensors"
        mx.save_safetensors(str(path), {"a": mx.zeros(1)}, metadata)
        return path

    ours = {"format": "mlx_dflash conversation", "version": "1"}
    silent = save("silent", **ours, head=json.dumps({"facts": {"turns": [], "system": "be brief"}}))
    odd = save("odd", **ours, head="{}")
    for path, why in ((silent, "no user message"), (odd, "can't be used"), (save("weights"), "no saved chat")):
        with pytest.raises(RequestError, match=f"{path.name}.*{why}"):
            from_file(path)


# Datasets


ROWS = {
    "openai/gsm8k": {"question": "What is {} + {}?", "answer": "..."},
    "HuggingFaceH4/MATH-500": {"problem": "Solve x = {} + {}.", "solution": "..."},
    "openai/openai_humaneval": {"prompt": 'def f{}():\n    """{}"""\n', "entry_point": "f"},
    "google-research-datasets/mbpp": {"prompt": "Write f{} of {}.", "test_list": ["assert f(1) == 1", "assert f(2)"]},
    "HuggingFaceH4/mt_bench_prompts": {"prompt": ["Write a letter {} {}.", "Make it shorter."]},
}


def filled(value, i):
    return [v.format(i, i) for v in value] if isinstance(value, list) else value.format(i, i)


@pytest.fixture
def hub(monkeypatch):
    """A loader with 50 rows a dataset; what it was asked for."""
    asked = []

    def stub(repo, config, split):
        asked.append((repo, config, split))
        return [{name: filled(value, i) for name, value in ROWS[repo].items()} for i in range(50)]

    monkeypatch.setattr(prompts, "load_dataset", stub)
    return asked


def test_each_dataset_gives_single_messages_with_what_its_rows_ask(hub):
    found = from_datasets(list(SOURCES), 2)
    assert [p.task for p in found] == [*SOURCES, *SOURCES]
    texts = {p.task: p.messages[0]["content"] for p in found}
    assert all([m["role"] for m in p.messages] == ["user"] for p in found)
    assert "What is" in texts["gsm8k"] and "step by step" in texts["gsm8k"]
    assert "Solve x" in texts["math500"]
    assert "```python\ndef f" in texts["humaneval"]
    assert "assert f(1) == 1\nassert f(2)" in texts["mbpp"]
    assert texts["mt-bench"].startswith("Write a letter") and "shorter" not in texts["mt-bench"]
    assert hub == [
        ("openai/gsm8k", "main", "test"),
        ("HuggingFaceH4/MATH-500", None, "test"),
        ("openai/openai_humaneval", None, "test"),
        ("google-research-datasets/mbpp", "sanitized", "test"),
        ("HuggingFaceH4/mt_bench_prompts", None, "train"),
    ]


def test_rows_are_drawn_alike_every_time_and_a_smaller_draw_is_the_beginning_of_a_larger_one(hub):
    ten, all_rows = from_datasets(["gsm8k"], 10), from_datasets(["gsm8k"])
    assert ten == all_rows[:10] == from_datasets(["gsm8k", "gsm8k"], 10)
    assert len({p.id for p in all_rows}) == len(all_rows) == 50
    assert [p.id for p in ten] != [f"gsm8k-{i}" for i in range(10)]
    assert all(p.messages[0]["content"].startswith(f"What is {p.id.removeprefix('gsm8k-')} +") for p in ten)


def test_bad_requests_of_datasets_are_refused(hub, monkeypatch):
    with pytest.raises(RequestError, match=r"'mmlu'.*gsm8k, math500"):
        from_datasets(["mmlu"])
    with pytest.raises(RequestError, match="--samples"):
        from_datasets(["gsm8k"], 0)
    assert hub == []

    def unreachable(*_):
        raise ConnectionError("no network\nin tests")

    monkeypatch.setattr(prompts, "load_dataset", unreachable)
    with pytest.raises(RequestError, match=r"gsm8k \(openai/gsm8k\).*no network in tests"):
        from_datasets(["gsm8k"])
    monkeypatch.setattr(prompts, "load_dataset", lambda *_: [{"text": "other columns"}])
    with pytest.raises(RequestError, match=r"gsm8k .*question"):
        from_datasets(["gsm8k"])


def test_the_package_is_called_with_its_own_arguments_and_a_missing_one_is_named(monkeypatch):
    package = SimpleNamespace(load_dataset=lambda *args, **kwargs: (args, kwargs))
    monkeypatch.setitem(sys.modules, "datasets", package)
    assert prompts.load_dataset("a/b", "main", "test") == (("a/b", "main"), {"split": "test"})
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(RequestError, match=r"pip install 'mlx-dflash\[datasets\]'"):
        from_datasets(["gsm8k"])


# Flags


def choose(*argv):
    parser = argparse.ArgumentParser()
    add_prompt_arguments(parser)
    return chosen(parser.parse_args([str(word) for word in argv]))


def test_without_flags_all_built_in_prompts_are_chosen():
    assert choose() == (built_in(), "built in")


@pytest.mark.parametrize("listed", [["rag,code"], ["rag", "code"], ["rag,", "code,rag"]])
def test_classes_are_listed_with_commas_or_blanks(listed):
    assert choose("--tasks", *listed, "--per-class", 3) == (built_in(["rag", "code"], 3), "built in")


def test_files_and_datasets_are_named_as_the_source(file, hub):
    path = file({"prompt": "hi"})
    assert choose("--prompts", path) == ([Prompt("mine-1", "own", [HI])], "file mine.jsonl")
    found, source = choose("--datasets", "gsm8k,mbpp", "--samples", 3)
    assert (len(found), source) == (6, "datasets gsm8k, mbpp")


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        ("--prompts f --datasets gsm8k", "--prompts and --datasets"),
        ("--prompts f --tasks code", "--tasks and --per-class"),
        ("--datasets gsm8k --per-class 2", "--tasks and --per-class"),
        ("--samples 3", "--samples"),
        ("--prompts f --samples 3", "--samples"),
        ("--datasets gsm8k --samples 0", "--samples must be"),
        ("--per-class 0", "--per-class must be"),
        ("--tasks poems", "tool-json"),
        ("--tasks ,", "no name"),
        ("--datasets mmlu", "mt-bench"),
    ],
)
def test_flags_that_contradict_each_other_or_name_nothing_are_refused(hub, argv, why):
    with pytest.raises(RequestError, match=why):
        choose(*argv.split())
