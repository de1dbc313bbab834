"""The width controller: its estimates, its promises on simulated machines, and what it says of a run."""

import math
import random

import pytest
from mlx_dflash.benchmarks.width import MACHINES, case

from mlx_dflash import calibrate, costs, generate, load, load_drafter
from mlx_dflash.acceptance import Acceptance
from mlx_dflash.calibrate import measure  # before conftest puts a stand-in in its place
from mlx_dflash.costs import DRAFTER, PLAIN, PLAIN_ROUND, Costs, Curve
from mlx_dflash.lookup import Lookup
from mlx_dflash.width import Controller
from tests.tiny import GOLDEN

SEEDS, TOKENS = range(2), 4800  # the benchmark's own run is longer; its result is in benchmarks/results


def table(**points):
    return Costs({0: Curve(1.0, {DRAFTER: {int(k[1:]): v for k, v in points.items()}})})


def test_costs_between_measured_rows_are_on_the_line_and_beyond_them_on_its_slope():
    known = table(r3=1.4, r5=2.0)
    assert known.seconds(PLAIN, 1) == 1.0
    assert [round(known.seconds(DRAFTER, n), 3) for n in (2, 3, 4, 5, 7)] == [1.2, 1.4, 1.7, 2.0, 2.6]


def test_a_wrong_curve_is_found_out_in_a_few_rounds_and_a_hiccup_is_forgotten():
    known = table(r8=1.2)
    for _ in range(4):
        known.observe(DRAFTER, 8, 4.0)
    assert known.seconds(DRAFTER, 8) == pytest.approx(4.0, rel=0.15)
    assert known.seconds(PLAIN, 1) == pytest.approx(1.0, rel=0.15)
    before = known.seconds(DRAFTER, 8)
    known.observe(DRAFTER, 8, 40.0)
    for _ in range(10):
        known.observe(DRAFTER, 8, 4.0)
    assert known.seconds(DRAFTER, 8) == pytest.approx(before, rel=0.1)


def test_a_first_round_that_compiles_is_not_believed():
    known = table(r8=1.2)
    assert not known.observe(DRAFTER, 8, 30.0)
    assert known.seconds(DRAFTER, 8) == 1.2
    auto = Controller(known)
    auto.observe((DRAFTER, 5), 3, 30.0)
    assert known.seconds(DRAFTER, 5) < 1.2 and auto.lost == 0.0
    assert auto.choose({DRAFTER: 8})[0] == DRAFTER
    assert known.observe(DRAFTER, 3, 0.6)  # a fast one is: a stored curve that is too high must be able to fall
    assert known.seconds(DRAFTER, 3) < 0.8


def test_a_slower_machine_is_slower_at_rows_that_were_not_run_since():
    known, noise = table(r4=1.5, r8=2.0), random.Random(0)
    for pace in (1.0, 1.4):
        for _ in range(60):
            known.observe(DRAFTER, 8, 2.0 * pace * math.exp(noise.gauss(0, 0.02)))
    assert known.seconds(DRAFTER, 8) == pytest.approx(2.8, rel=0.05)
    assert known.seconds(DRAFTER, 4) == pytest.approx(2.1, rel=0.25)
    assert known.seconds(PLAIN, 1) > 1.1


def test_a_run_begins_with_what_earlier_runs_of_the_pair_saw_and_outweighs_it_soon():
    known = table(r2=1.2, r3=1.4, r5=2.0, r8=2.9)
    assert Controller(known).choose({DRAFTER: 8}) == (DRAFTER, 5)
    earlier = Controller(known)
    for _ in range(100):
        earlier.observe((DRAFTER, 5), 1, None)
    run = Controller(known)
    assert run.choose({DRAFTER: 8}) == PLAIN_ROUND
    for _ in range(5):
        run.observe((DRAFTER, 8), 8, None)
    assert run.choose({DRAFTER: 8}) == (DRAFTER, 8)


def test_contexts_have_curves_of_their_own():
    known = table(r8=2.0)
    for _ in range(30):
        known.observe(DRAFTER, 8, 3.0, context=5000)
    known.settle(5000)
    assert known.seconds(DRAFTER, 8, context=100) == 2.0
    assert known.seconds(DRAFTER, 8, context=5000) == pytest.approx(3.0, rel=0.05)
    assert known.seconds(DRAFTER, 8, context=50_000) == known.seconds(DRAFTER, 8, context=5000)


def test_curves_survive_a_process_and_files_of_another_make_are_not_believed(tmp_path):
    path = tmp_path / "costs" / "a.json"
    known = table(r4=1.5, r8=2.0)
    known.curves[3] = Curve(2.0, {DRAFTER: {8: 5.0}, "lookup": {4: 2.1}})
    Controller(known).observe((DRAFTER, 4), 3, None)
    costs.save(known, path)
    stored = costs.load(path)
    assert stored.curves == known.curves
    assert (stored.outcomes[DRAFTER].kept, stored.outcomes[DRAFTER].tried) == ([1, 1, 0], [1, 1, 1])
    uneven = path.read_text().replace('"kept": [', '"kept": [0.5,')
    for text in ("", "[]", "{}", uneven, '{"version": 2, "curves": {}, "outcomes": {}}', path.read_text()[:-20]):
        path.write_text(text)
        assert costs.load(path) is None
    assert costs.load(tmp_path / "missing.json") is None


def test_acceptance_follows_the_text_and_a_turn_of_it_quickly():
    seen = Acceptance()
    assert seen.expected(4) == pytest.approx([1, 1.75, 1.75 + 0.75**2, 1.75 + 0.75**2 + 0.75**3])
    for i in range(400):  # two of three drafts kept in every second round
        seen.observe(4, 2 if i % 2 else 0)
    assert seen.expected(4)[-1] == pytest.approx(2.0, abs=0.05)
    for _ in range(20):
        seen.observe(4, 3)
    assert seen.expected(4)[-1] > 3


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("text", ["code-like", "zero"])
def test_within_three_percent_of_the_best_fixed_width_on_steady_texts(machine, text):
    found = case(machine, text, SEEDS, TOKENS)
    assert found.against_best >= 0.97 and found.against_plain >= 0.98
    assert sum(n for rows, n in found.widths.items() if rows > 1) > 0


@pytest.mark.parametrize("machine", [m for m in MACHINES if m != "linear"])
def test_ahead_of_every_fixed_width_on_drifting_texts(machine):
    found = case(machine, "drifting", SEEDS, TOKENS)
    assert found.against_best >= 1.05 and found.against_plain >= 1.05


@pytest.mark.parametrize("condition", ["throttled", "stale"])
@pytest.mark.parametrize("machine", MACHINES)
def test_a_machine_that_is_not_what_was_measured(machine, condition):
    found = case(machine, "prose-like", SEEDS, TOKENS, condition)
    assert found.against_best >= 0.96 and found.against_plain >= 0.98


def test_where_even_the_best_text_could_not_win_it_hardly_tries():
    auto = Controller(Costs({0: Curve(1.0, {DRAFTER: {n: 1.5 * n for n in range(2, 9)}})}))
    for at in range(1000):
        kind = auto.choose({DRAFTER: 8}, at)
        auto.observe(kind, 1, 1.0 if kind == PLAIN_ROUND else 1.5 * kind[1], at)
    drafted = sum(n for kind, n in auto.taken.items() if kind != PLAIN_ROUND)
    assert 1 <= drafted <= 3
    assert auto.why(1000).startswith(f"{drafted} of 1000 rounds speculated, then plain: ")


def test_it_begins_with_five_rows_or_the_trained_block():
    flat = dict.fromkeys(range(2, 17), 1.1)
    for block, rows in ((16, 5), (8, 5), (4, 4)):
        assert Controller(Costs({0: Curve(1.0, {DRAFTER: flat})})).choose({DRAFTER: block}) == (DRAFTER, rows)


def test_it_takes_the_source_that_is_worth_more():
    curves = {source: dict.fromkeys(range(2, 9), 1.2) for source in (DRAFTER, "lookup")}
    auto = Controller(Costs({0: Curve(1.0, curves)}))
    for at in range(60):
        kind = auto.choose({DRAFTER: 8, "lookup/4": 8}, at)
        auto.observe(kind, {DRAFTER: 2, "lookup/4": 6, PLAIN: 1}[kind[0]], None, at)
    assert auto.taken[max(auto.taken, key=auto.taken.get)] > 40
    assert max(auto.taken, key=auto.taken.get)[0] == "lookup/4"
    assert auto.choose({DRAFTER: 8})[0] == DRAFTER


def test_a_run_says_which_widths_it_took_and_keeps_what_it_learned(monkeypatch, tmp_path):
    monkeypatch.setattr(calibrate, "folder", lambda: tmp_path)
    target, tokenizer = load(GOLDEN / "qwen3" / "target")
    drafter = load_drafter(GOLDEN / "qwen3" / "draft", target)
    run = generate(target, tokenizer, [40, 41, 42], draft_model=drafter, max_tokens=40)
    assert "rounds speculated" in run.stats.width_reason
    assert sum(run.stats.block_sizes.values()) == run.stats.rounds + run.stats.plain_rounds
    (file,) = tmp_path.glob("*.json")
    assert costs.load(file).curves[0].plain != 1e-3  # the stand-in's
    other, _ = load(GOLDEN / "qwen3" / "target")
    monkeypatch.setattr(calibrate, "measure", lambda *_: pytest.fail("measured again"))
    generate(other, tokenizer, [40], draft_model=load_drafter(GOLDEN / "qwen3" / "draft", other), max_tokens=3)
    pinned = generate(target, tokenizer, [40, 41, 42], draft_model=drafter, block_size=4, max_tokens=40)
    assert pinned.stats.width_reason == "" and max(pinned.stats.block_sizes) == 4


def test_measured_curves_never_fall_with_rows_and_cover_what_may_be_asked():
    target, _ = load(GOLDEN / "qwen3" / "target")
    drafter = load_drafter(GOLDEN / "qwen3" / "draft", target)
    found = measure(target, drafter, Lookup(target), seconds=0.5)
    curve = found.curve(0)
    for source, block in ((DRAFTER, 8), ("lookup", 16)):
        seconds = [curve.sources[source][n] for n in sorted(curve.sources[source])]
        assert seconds == sorted(seconds) and min(seconds) > 0
        assert {5, block} <= set(curve.sources[source])
        assert found.seconds(source, 2) > 0 and found.seconds(source, block) >= found.seconds(source, 2) > 0
    hurried = measure(target, drafter, None, seconds=0.0)
    assert list(hurried.curve(0).sources[DRAFTER]) == [5]


def test_a_curve_that_noise_lets_fall_is_never_negative_beyond_its_last_point():
    curve = Curve(0.06, {DRAFTER: {2: 0.08, 5: 0.05}})
    assert [curve.seconds(DRAFTER, n) for n in (1, 2, 5)] == [0.06, 0.08, 0.05]
    assert curve.seconds(DRAFTER, 3) == pytest.approx(0.07) and curve.seconds(DRAFTER, 16) == 0.05
    rising = Curve(0.06, {DRAFTER: {5: 0.08}})
    assert rising.seconds(DRAFTER, 9) == pytest.approx(0.10)
    assert Curve(0.06, {DRAFTER: {}}).seconds(DRAFTER, 7) == 0.06


def test_costs_of_all_widths_at_once_are_those_one_by_one():
    rng = random.Random(0)
    for _ in range(200):
        points = rng.sample(range(2, 17), rng.randint(1, 10))
        costs = Costs({0: Curve(0.06, {DRAFTER: {n: 0.06 + 0.01 * n * rng.random() for n in points}})})
        for _ in range(rng.randint(0, 8)):
            costs.observe(DRAFTER, rng.randint(1, 16), 0.05 + 0.1 * rng.random())
        most = rng.randint(1, 18)
        assert costs.up_to(DRAFTER, most) == pytest.approx([costs.seconds(DRAFTER, n) for n in range(1, most + 1)])
