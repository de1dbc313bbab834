"""The benchmark commands: their figures against independent counting, comparing, verdicts, reports, going on."""

import json
import math
import time
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import tiny
from mlx_dflash.benchmarks import __main__ as benchmarks
from mlx_dflash.benchmarks import compare, context, metrics, report, schema, sweep
from mlx_dflash.benchmarks import run as runs
from mlx_dflash.benchmarks.measure import PLAIN, Arm, Bench
from mlx_dflash.benchmarks.prompts import Prompt
from mlx_dflash.benchmarks.verdict import verdicts
from stubs import StubDrafter, truth

from mlx_dflash import RequestError, generate, load
from mlx_dflash.report import first_difference, logit_margin

TEMPLATE = "{% for m in messages %}w20 {{ m.content }} w21 {% endfor %}{% if add_generation_prompt %}w22{% endif %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The tiny target with a chat template."""
    folder = tmp_path_factory.mktemp("benchmarks") / "target"
    return tiny.copy_folder(tiny.target_folder(), folder, tokenizer_config={"chat_template": TEMPLATE})


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [{"id": f"p{i}", "task": f"t{i % 2}", "prompt": f"w{30 + i} w{40 + i} w{50 + i}"} for i in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def command(*words):
    """Run a command of the package; its exit code."""
    with pytest.raises(SystemExit) as left:
        benchmarks.main([str(word) for word in words])
    return left.value.code


def pair(folder):
    return ["--model", folder, "--draft-model", tiny.draft_folder()]


def test_percentiles_and_gaps_by_hand():
    arrivals = [[1.0, 1], [1.4, 4], [1.5, 1], [1.9, 2]]
    assert metrics.burst_gaps(arrivals) == pytest.approx([0.4, 0, 0, 0, 0.1, 0.4, 0])
    assert metrics.smoothed_gaps(arrivals) == pytest.approx([0.1, 0.1, 0.1, 0.1, 0.1, 0.2, 0.2])
    values = [5.0, 1.0, 4.0, 2.0]
    found = metrics.percentiles(values, (0, 50, 90, 99, 100))
    assert found == pytest.approx({f"p{s}": float(np.percentile(values, s)) for s in (0, 50, 90, 99, 100)})
    assert metrics.percentiles([]) == {"p50": None, "p90": None, "p99": None}
    record = {"arrivals": arrivals, "tokens": 8, "seconds": 2.0}
    assert metrics.decode_tps(record) == pytest.approx(7 / 0.9) and metrics.user_tps(record) == 4.0


@pytest.mark.parametrize(
    ("tokens", "looped"),
    [
        ([*range(40), *[7] * 32], True),
        ([*range(40), *[7] * 31], False),
        ([*range(9), *list(range(100, 110)) * 4], True),
        ([*range(50), *list(range(100, 110)) * 3], False),
        (list(range(64)) * 4, True),
        (list(range(65)) * 4, False),
        ([], False),
    ],
)
def test_loops_at_the_end_of_a_text(tokens, looped):
    assert metrics.has_loop(tokens) is looped


def test_figures_equal_independent_counting_on_a_scripted_drafter(folder):
    """Of every block the first three drafts are right; each round waits 20 ms, the prompt 50 ms."""
    target, tokenizer = load(folder)
    tokenizer.eos_token_ids = set()
    drafted = []

    class Slow(StubDrafter):
        block_size = 8

        def append(self, features, context):
            if context.length == 0:
                time.sleep(0.05)
            super().append(features, context)

        def propose(self, anchor, rows, context, draw):
            time.sleep(0.02)
            drafted.append(rows - 1)
            return super().propose(anchor, rows, context, draw)

    prompt = Prompt(id="p", task="t", messages=[{"role": "user", "content": "w30 w31 w32"}])
    ids = list(tokenizer.apply_chat_template(list(prompt.messages), add_generation_prompt=True))
    tokens = generate(target, tokenizer, ids, max_tokens=41).tokens
    drafter = Slow(target, truth(ids, tokens, right=3))
    bench = Bench(target, tokenizer, {}, 41)
    started = time.perf_counter()
    record, text = bench.request(Arm("dflash", {"draft_model": drafter, "block_size": 8}), prompt)
    took = time.perf_counter() - started
    assert text == tokens

    # 40 tokens after the first, 4 a round: nine blocks of 7 drafts, and 4 drafts where only 4 tokens are left
    assert drafted == [7] * 9 + [4]
    assert [count for _, count in record["arrivals"]] == [1, *[4] * 10]
    figures = metrics.summary_of([record])
    assert (figures["rounds"], figures["drafted"], figures["accepted"]) == (10, 67, 30)
    assert figures["acceptance"] == 30 / 67 and figures["mean_accepted_length"] == 4.0
    assert figures["histogram"] == {"4": 10}
    assert figures["acceptance_by_position"] == [1, 1, 1, 0, 0, 0, 0]
    assert figures["host_reads_per_round"] == pytest.approx(1, abs=0.11)
    assert figures["block_sizes"] == {"8": 9, "5": 1}
    waits = np.diff([at for at, _ in record["arrivals"]])
    # the next round is on its way before a round's tokens are given out, so its wait comes before them
    assert 0.05 <= record["first_commit"] <= record["ttft"] - 0.02 and record["ttft"] == record["arrivals"][0][0] < took
    assert waits[:-1].min() >= 0.02 and record["seconds"] <= took
    burst = [0.0] * 30 + sorted(waits)
    for share in (50, 90, 99):
        assert figures["itl_burst"][f"p{share}"] == pytest.approx(float(np.percentile(burst, share)))
        smooth = np.repeat(waits / 4, 4)
        assert figures["itl_smoothed"][f"p{share}"] == pytest.approx(float(np.percentile(smooth, share)))
    assert figures["raw_tps"] == pytest.approx(40 / waits.sum())
    assert figures["user_tps"]["p50"] == pytest.approx(41 / record["seconds"])
    assert record["kv_bytes"]["tokens"] == len(ids) + 40 and record["kv_bytes"]["target"] > 0


def test_cold_and_failed_requests_stand_apart():
    def record(speed, **more):
        arrivals = [[1.0, 1], [1.0 + 10 / speed, 10]]
        row = {"arrivals": arrivals, "tokens": 11, "seconds": 2.0, "ttft": 1.0, "cold": False, "error": None}
        return {**row, "loop": False, "finish_reason": "stop", "prompt_tokens": 5, "cached_tokens": 2, **more}

    figures = metrics.summary_of([record(1, cold=True), record(10), record(30), record(99, error="gone")])
    assert figures["raw_tps"] == pytest.approx(20 / (1 + 1 / 3))
    assert figures["cold"] == [{"ttft": 1.0, "tps": pytest.approx(1)}]
    assert (figures["failed"], figures["finished"], figures["tokens_per_finished"]) == (1, 2, 11)
    assert (figures["prompt_tokens"], figures["cached_tokens"]) == (10, 4)


def test_divergence_and_its_margin(folder):
    target, _ = load(folder)
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1 and first_difference([1, 2], [1, 2, 3]) == 2
    logits, _ = target.forward(mx.array([[30, 31, 9]]), target.make_cache())
    by_hand = abs((logits[0, -1, 40] - logits[0, -1, 41]).item())
    assert logit_margin(target, [30, 31], [9, 40], [9, 41], 1) == pytest.approx(by_hand)
    assert logit_margin(target, [30], [9], [9, 1], 1) is None


def test_run_reports_every_arm_and_goes_on_after_ctrl_c(folder, prompts, tmp_path, monkeypatch, capsys):
    out = tmp_path / "run.json"
    words = ["run", *pair(folder), "--prompts", prompts, "-m", "12", "--block-size", "3", "--output", out]
    request, counted = Bench.request, []

    def stopping(self, arm, prompt, repeat=0, cold=False):
        counted.append((arm.name, prompt.id))
        if len(counted) == 20:
            monkeypatch.setattr(runs.Interrupt, "asked", lambda self: True)
            object.__setattr__(self, "interrupted", lambda: True)
        return request(self, arm, prompt, repeat, cold)

    with monkeypatch.context() as patched:
        patched.setattr(Bench, "request", stopping)
        assert command(*words) == 130
    monkeypatch.undo()
    kept = schema.read(out)
    assert not kept["finished"] and any("stopped" in mark for mark in kept["marks"])
    assert {r["id"] for r in kept["requests"]} == {"p0", "p1"} and len(kept["requests"]) == 3 + 2 * 7

    counted.clear()
    assert command(*words) == 0
    result = schema.read(out)
    assert result["finished"] and result["mode"] == "greedy" and not any("stopped" in m for m in result["marks"])
    assert result["requests"][: len(kept["requests"])] == kept["requests"]
    assert len(result["requests"]) == 3 + 4 * 6 + 2
    arms = result["summary"]["arms"]
    assert set(arms) == {"plain", "dflash", "mlx-lm"}
    assert arms["dflash"]["rounds"] > 0 and arms["dflash"]["drafted"] == 2 * arms["dflash"]["rounds"] - short(result)
    assert arms["plain"]["rounds"] == 0 and arms["plain"]["plain_rounds"] > 0
    assert all(found["equal"] == 4 for found in result["summary"]["equality"].values())
    assert set(result["summary"]["tasks"]) == {"t0", "t1"} and result["summary"]["phases"]["rounds"] > 0
    setup = result["setup"]
    assert setup["trained_block"] == 8 and setup["batch_size"] == 1 and setup["prompts"]["count"] == 4
    assert setup["sampling"]["temp"] == 0 and setup["sampling_from"]["temp"] == "default"
    assert {"mlx", "mlx-lm", "os", "power_source", "swap_used_bytes"} <= result["machine"].keys()
    assert "greedy, batch 1" in capsys.readouterr().out

    assert command(*words, "--temp", "0.7") == 2  # another run must not overwrite this one
    assert "holds another run" in capsys.readouterr().err


def short(result):
    """Drafts that blocks of 3 rows lacked because fewer tokens were left."""
    sizes = result["summary"]["arms"]["dflash"]["block_sizes"]
    return sum((3 - int(rows)) * count for rows, count in sizes.items() if int(rows) > 1)


def test_sampled_runs_draw_the_same_text_in_both_our_arms(folder, prompts, tmp_path):
    out = tmp_path / "run.json"
    words = ["run", *pair(folder), "--prompts", prompts, "-m", "10", "--temp", "0.8", "--block-size", "4"]
    assert command(*words, "--repeats", "1", "--no-stock", "--output", out) == 0
    result = schema.read(out)
    assert result["mode"] == "sampled" and result["setup"]["sampling_from"]["seed"] == "benchmark"
    assert result["summary"]["equality"] == {"dflash": {"equal": 4, "parted": []}}
    assert "--no-stock" in result["summary"]["stock"]


def test_sweep_marks_widths_beyond_the_trained_block(folder, prompts, tmp_path, capsys):
    out = tmp_path / "sweep.json"
    words = [
        "sweep",
        *pair(folder),
        "--prompts",
        prompts,
        "-m",
        "10",
        "--block-sizes",
        "3",
        "8",
        "10",
        "--temps",
        "0",
        "0.7",
    ]
    assert command(*words, "--repeats", "1", "--output", out) == 0
    result = schema.read(out)
    table = result["summary"]["table"]
    assert [(r["temp"], r["rows"]) for r in table] == [(t, n) for t in (0, 0.7) for n in (3, 8, 10, None)]
    assert [r["beyond_trained_block"] for r in table] == [False, False, True, False] * 2
    assert all(r["mean_accepted_length"] >= 1 for r in table if r["rows"])
    assert not any("part from" in mark for mark in result["marks"])  # with one row a block or ten
    assert "beyond the trained block" in capsys.readouterr().out
    assert sweep.widths(16) == [3, 5, 8, 12, 15, 16, 20] and sweep.widths(8) == [3, 4, 5, 8, 12]


def test_context_goes_from_an_empty_to_a_full_cache(folder, tmp_path, monkeypatch):
    text = " ".join(f"w{30 + i % 200}" for i in range(400))
    many = [Prompt(id="x", task="t", messages=[{"role": "user", "content": text}])]
    monkeypatch.setattr(context, "built_in", lambda: many)
    monkeypatch.setattr(context, "QUESTION", "w60 w61")
    out = tmp_path / "context.json"
    words = ["context", *pair(folder), "-m", "8", "--fills", "64", "700", "--windows", "100", "--block-size", "3"]
    assert command(*words, "--output", out) == 0
    result = schema.read(out)
    small, large = result["summary"]["fills"]
    assert set(small["arms"]) == {"plain", "dflash"} and set(large["arms"]) == {"plain", "dflash", "window 100"}
    assert 40 <= small["prompt_tokens"] <= 64 and 676 <= large["prompt_tokens"] <= 700
    assert large["arms"]["dflash"]["cache_bytes"] > small["arms"]["dflash"]["cache_bytes"] > 0
    assert large["arms"]["window 100"]["drafter_cache_bytes"] < large["arms"]["dflash"]["drafter_cache_bytes"]
    assert not any("part from" in mark for mark in result["marks"])


def made(speeds, **more):
    """A result of `run` as far as comparing and verdicts read it. speeds: tokens/s by arm, the same for six prompts."""
    requests = []
    for arm, speed in speeds.items():
        for i in range(6):
            scale = 1 + i / 10
            arrivals = [[0.1, 1], [0.1 + 100 / (speed * scale), 100]]
            requests.append({"arm": arm, "id": f"p{i}", "cold": False, "tokens": 101, "arrivals": arrivals})
    arms = {
        name: {"raw_tps": speed, "acceptance": None, "mean_accepted_length": None} for name, speed in speeds.items()
    }
    gain = speeds.get("dflash", 0) / speeds.get(PLAIN, math.inf)
    ratios = {"all": {"dflash": {"median": gain, "interval_95": [0.98 * gain, 1.02 * gain], "prompts": 6}}}
    setup = {"arms": list(speeds), "prompts": {"hash": "a", "source": "built in"}, "batch_size": 1, "concurrency": 1}
    setup |= {"quantization": "affine 4-bit", "sampling": {"temp": 0.0, "seed": 1}, "model_hash": "m", "max_tokens": 99}
    result = {"schema": schema.SCHEMA, "command": "run", "mode": "greedy", "finished": True, "setup": setup}
    result |= {"machine": {"memory_bytes": 10**10}, "requests": requests, "marks": []}
    result |= {"summary": {"arms": arms, "ratios": ratios, "drift": 0.0}}
    for name, value in more.items():
        result[name] = {**result[name], **value} if isinstance(value, dict) else value
    return result


def drafting(rows, acceptance, speed, plain=30.0):
    """A run at a fixed width whose rounds keep `acceptance` of their drafts."""
    result = made({PLAIN: plain, "dflash": speed}, setup={"block_size": rows})
    arm = result["summary"]["arms"]["dflash"]
    arm |= {"acceptance": acceptance, "mean_accepted_length": 1 + acceptance * (rows - 1), "rounds": 100}
    arm |= {"block_sizes": {str(rows): 100}, "acceptance_by_position": [0.8] + [acceptance] * (rows - 2)}
    return result


def test_acceptance_alone_misleads():
    """The pair that was published for it: 47.5 % at 4 rows is slower than 18.0 % at 15."""
    found = compare.compare(drafting(4, 0.475, 35.0), drafting(15, 0.18, 41.0))
    ratio = found["summary"]["second_over_first"]["dflash"]
    assert ratio["median"] == pytest.approx(41 / 35) and ratio["prompts"] == 6
    assert any("faster at a lower acceptance (18.0% against 47.5%)" in mark for mark in found["marks"])
    names = [verdict.name for verdict in verdicts(drafting(15, 0.18, 41.0))]
    assert names == ["width too large"]  # 3.5 tokens of 15 rows
    assert [verdict.name for verdict in verdicts(drafting(4, 0.475, 35.0))] == ["all well"]


def test_code_at_a_high_acceptance_and_a_mix_at_a_low_one():
    """Published of one 30B pair: 84.6 tokens/s at 38.7 % on code, 38.3 at 14.4 % on a mix."""
    code, mixed = drafting(16, 0.387, 84.6, plain=27.0), drafting(16, 0.144, 38.3, plain=27.0)
    mixed["setup"]["prompts"] = {"hash": "b", "source": "file mixed"}
    with pytest.raises(RequestError, match=r"other prompts \(built in against file mixed\)"):
        compare.compare(code, mixed)
    found = compare.compare(code, mixed, anyway=True)
    assert found["summary"]["second_over_first"]["dflash"]["median"] == pytest.approx(38.3 / 84.6)
    assert found["marks"][0].startswith("not comparable") and not any("misleads" in mark for mark in found["marks"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"mode": "sampled"}, "greedy against sampled"),
        ({"setup": {"prompts": {"hash": "b", "source": "x"}}}, "other prompts"),
        ({"setup": {"quantization": "none"}}, "quantization: affine 4-bit against none"),
        ({"setup": {"batch_size": 4}}, "batch size: 1 against 4"),
        ({"setup": {"concurrency": 8}}, "concurrency: 1 against 8"),
        ({"setup": {"sampling": {"temp": 0.6}}}, "sampling"),
        ({"setup": {"model_hash": "n"}}, "model hash"),
    ],
)
def test_what_must_not_be_compared_is_refused(change, said):
    first, second = made({PLAIN: 30, "dflash": 60}), made({PLAIN: 30, "dflash": 60}, **change)
    with pytest.raises(RequestError, match=said):
        compare.compare(first, second)
    assert any(said in mark for mark in compare.compare(first, second, anyway=True)["marks"])


def test_only_results_with_arms_are_compared():
    with pytest.raises(RequestError, match="not of calibrate"):
        compare.compare({"command": "calibrate", "setup": {}, "summary": {}}, made({PLAIN: 30}))


def test_the_same_sampling_with_another_seed_may_be_compared():
    second = made({PLAIN: 30, "dflash": 60}, setup={"sampling": {"temp": 0.0, "seed": 2}})
    found = compare.compare(made({PLAIN: 30, "dflash": 60}), second)
    assert found["summary"]["second_over_first"]["dflash"]["interval_95"] == pytest.approx([1, 1])
    assert "no difference" in compare.lines(found)[1]


def swept(rows, length, speedup):
    """A row of a sweep of a drafter with a block of 8."""
    found = {"rows": rows, "beyond_trained_block": rows > 8, "mean_accepted_length": length}
    return {**found, "speedup": speedup, "interval_95": [0.97 * speedup, 1.03 * speedup]}


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({}, "all well"),
        ({"drift": -0.08}, "thermal"),
        ({"swap_grown_bytes": 2**30}, "memory pressure"),
        ({"phases": {"share": {"draft": 0.2, "verify": 0.5, "host": 0.3}}}, "host-bound"),
        ({"phases": {"share": {"draft": 0.2, "verify": 0.75, "host": 0.05}}}, "all well"),
        ({"fills": [{"fill": 512, "speedup": 2.0}, {"fill": 32768, "speedup": 1.2}]}, "long context"),
        ({"fills": [{"fill": 512, "speedup": 2.0}, {"fill": 32768, "speedup": 1.9}]}, "all well"),
        ({"table": [swept(4, 2.4, 1.6), swept(8, 3.0, 1.4)]}, "width too large"),
        ({"table": [swept(4, 3.4, 1.6), swept(8, 6.0, 2.4), swept(12, 6.2, 2.9)]}, "all well"),
        ({"table": [swept(4, 3.4, 0.95), swept(8, 6.0, 1.0)]}, "no gain"),
    ],
)
def test_verdicts(change, name):
    assert [v.name for v in verdicts(made({PLAIN: 30, "dflash": 60}, summary=change))] == [name]


def test_verdicts_of_pairs_widths_and_speeds():
    poor = drafting(8, 0.05, 24.0)
    poor["summary"]["arms"]["dflash"]["acceptance_by_position"] = [0.1]
    assert [v.name for v in verdicts(poor)] == ["pair mismatched", "width too large", "slower than plain"]
    level = made({PLAIN: 30, "dflash": 30})
    assert [v.name for v in verdicts(level)] == ["no gain"]
    full = made({PLAIN: 30, "dflash": 60})
    full["requests"][0]["peak_bytes"] = 95 * 10**8
    assert [v.name for v in verdicts(full)] == ["memory pressure"]


def test_reports_are_one_page_with_a_verdict(folder, prompts, tmp_path, capsys):
    out, page, text = tmp_path / "run.json", tmp_path / "run.html", tmp_path / "run.md"
    words = ["run", *pair(folder), "--prompts", prompts, "-m", "12", "--block-size", "3", "--output", out]
    assert command(*words) == 0
    capsys.readouterr()
    assert command("report", out, "--html", page, "--markdown", text) == 0
    written = page.read_text()
    assert written.count("<svg") == 3 and "</html>" in written and 'class="verdict"' in written
    assert "http" not in written.replace("http://www.w3.org/2000/svg", "")  # nothing is fetched
    result = schema.read(out)
    acceptance = f"{result['summary']['arms']['dflash']['acceptance']:.1%}"
    assert acceptance in written and acceptance in text.read_text()
    assert verdicts(result)[0].name in text.read_text()
    assert command("report", out) == 0
    assert capsys.readouterr().out == text.read_text()
    assert command("compare", out, out) == 0
    assert "no difference that the data shows" in capsys.readouterr().out


def test_files_of_other_kinds_and_versions_are_refused(tmp_path, capsys):
    path = Path(tmp_path) / "x.json"
    for content, said in (("{", "can't be read"), ("[]", "no benchmark result"), ('{"schema": "other/9"}', "other/9")):
        path.write_text(content)
        assert command("report", path) == 2
        assert said in capsys.readouterr().err
    assert report.as_markdown([("table", (("a",), [["x|y"]]))]) == "| a |\n| --- |\n| x\\|y |\n"


def test_flags_of_the_caches_reach_every_arm(folder, prompts, capsys, monkeypatch):
    seen = []
    run_ours = Bench.ours

    def ours(self, arm, ids):
        seen.append((arm.name, self.options["kv_bits"], self.options["kv_group_size"]))
        object.__setattr__(self, "options", {**self.options, "kv_bits": None, "kv_group_size": None})
        found = run_ours(self, arm, ids)
        object.__setattr__(self, "options", {**self.options, "kv_bits": 8, "kv_group_size": 32})
        return found

    words = ["run", *pair(folder), "--prompts", prompts, "-m", "6", "--kv-bits", "8", "--kv-group-size", "32"]
    assert command(*words, "--no-stock") == 2
    assert "head_dim" in capsys.readouterr().err  # the tiny heads can't be quantized, and the library says so
    monkeypatch.setattr(Bench, "ours", ours)
    assert command(*words, "--no-stock", "--repeats", "1") == 0
    assert {(name, 8, 32) for name in ("plain", "dflash", "profiled")} == set(seen)


def test_a_plain_arm_that_slows_down_marks_the_run():
    result = made({PLAIN: 30, "dflash": 60})
    assert abs(runs.drift_of(result["requests"]) - (1.4 / 1.1 - 1)) < 1e-9  # the made speeds rise from prompt to prompt
    result["requests"] = [r for r in result["requests"] if r["id"] == "p0"]
    assert runs.drift_of(result["requests"]) is None


def test_cold_requests_are_kept_together_or_not_at_all(folder):
    target, tokenizer = load(folder)
    prompt = Prompt(id="p", task="t", messages=[{"role": "user", "content": "w30 w31"}])
    asked = []
    stopped = Bench(target, tokenizer, {}, 4, lambda: len(asked.append(0) or asked) > 6)
    assert stopped.cold([Arm("one"), Arm("two")], prompt) is None
    assert stopped.turns([Arm("one"), Arm("two")], prompt, 2) is None
    whole = Bench(target, tokenizer, {}, 4)
    assert [(r["arm"], r["cold"]) for r in whole.cold([Arm("one"), Arm("two")], prompt)] == [
        ("one", True),
        ("two", True),
    ]
    turns = whole.turns([Arm("one"), Arm("two")], prompt, 3)
    assert [r["arm"] for r, _ in turns] == ["one", "two", "two", "one", "one", "two"]
    assert [r["repeat"] for r, _ in turns] == [0, 0, 1, 1, 2, 2]
