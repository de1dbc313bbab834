"""`endpoint`: an OpenAI-compatible server (vLLM, SGLang, llama.cpp, mlx_lm.server) at several levels of concurrency.

At a level of N, N users each send the next prompt as soon as their last answer has ended. One request goes first, cold,
and is told apart. What the server itself says of its drafting is read before and after each level.
"""

import argparse
import os
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_dflash.benchmarks.endpoint_client import (
    Client,
    Reply,
    add_sampler_flags,
    fields_of,
    sampling_of,
    server_at,
)
from mlx_dflash.benchmarks.endpoint_metrics import (
    GROWTH,
    HALF,
    TOP_K_OFF,
    arm_of,
    kind_by,
    known_of,
    level_of,
    marks_of,
    merged,
    nothing,
    read_page,
    reading,
    turning_points,
)
from mlx_dflash.benchmarks.metrics import Record, decode_tps, number
from mlx_dflash.benchmarks.prompts import Prompt, add_prompt_arguments, chosen, prompts_hash
from mlx_dflash.benchmarks.schema import Result, new_result, resumed, write

from mlx_dflash.command import Interrupt, bar
from mlx_dflash.download import say
from mlx_dflash.errors import RequestError

COLD = "cold"
TICK = 0.2  # seconds between looks at Ctrl-C and the progress line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--url", required=True, help="of the API, e.g. http://127.0.0.1:8080/v1")
    add("--model", default=None, help="its name there (default: the first that the server lists)")
    add("--api-key-env", default=None, metavar="NAME", help="environment variable with the key, which is not recorded")
    add("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8], metavar="N", help="levels (default 1 2 4 8)")
    add_prompt_arguments(parser)
    add("--requests", type=int, default=None, metavar="N", help="a level (default: every prompt once)")
    add("--max-tokens", "-m", type=int, default=256, help="an answer (default 256)")
    add_sampler_flags(parser)
    add("--timeout", type=float, default=120.0, metavar="S", help="without a byte before a request is given up")
    add("--output", type=Path, default=None, metavar="FILE", help="result; a run that stopped goes on")


@dataclass(frozen=True)
class Job:
    arm: str
    users: int
    prompt: Prompt
    repeat: int

    @property
    def key(self) -> tuple[str, str, int]:
        return self.arm, self.prompt.id, self.repeat


Ended = tuple[Job, Reply] | Exception


def run(args: argparse.Namespace) -> int:
    check(args)
    prompts, source = chosen(args)
    prompts = prompts[: args.requests]
    server = server_at(args.url, key_in(args.api_key_env), args.timeout)
    model, kind, listed = known_of(server, args.model)
    levels = sorted(set(args.concurrency))
    sampling, origins = sampling_of(args)
    setup = {
        "url": server.url,
        "server": kind,
        "model": model,
        "draft_model": None,  # the server's own affair, as are the next three
        "quantization": None,
        "trained_block": None,
        "batch_size": None,
        "sampling": sampling,
        "sampling_from": origins,
        "sent": fields_of(sampling, TOP_K_OFF.get(kind or "", 0), args.send_only_openai),
        "send_only_openai": args.send_only_openai,
        "concurrency": levels,
        "arms": [arm_of(n) for n in levels],
        "prompts": {"hash": prompts_hash(prompts), "count": len(prompts), "source": source},
        "requests": args.requests or len(prompts),
        "max_tokens": args.max_tokens,
    }
    mode = "greedy" if sampling["temp"] == 0 else "sampled"
    result = resumed(args.output, new_result("endpoint", mode, setup))
    say(f"{mode} | {model} at {server.url} | {len(prompts)} prompts, {source} | {args.max_tokens} tokens at most")
    if result["finished"]:
        say(f"{args.output} holds this run, finished; remove it to measure again")
        conclude(result)
    else:
        result["summary"].setdefault("server", {"listed_models": listed, "fingerprint": None, "levels": {}})
        result["summary"]["timeout"] = args.timeout
        with Interrupt() as interrupt:
            stopped = measure(result, Client(server), prompts, lambda: write(result, args.output), interrupt.check)
        result["finished"] = not stopped
        conclude(result)
        write(result, args.output)
    print("\n".join(lines(result)))
    return 0 if result["finished"] else 130


def check(args: argparse.Namespace) -> None:
    wanted = {"concurrency": min(args.concurrency), "requests": args.requests, "max-tokens": args.max_tokens}
    for name, value in wanted.items():
        if value is not None and value < 1:
            raise RequestError(f"--{name} must be 1 or more, not {value}")
    if args.timeout <= 0 or (args.temp or 0) < 0:
        raise RequestError("--timeout must be more than 0, and --temp 0 or more")


def key_in(name: str | None) -> str | None:
    if name is None:
        return None
    if not os.environ.get(name):
        raise RequestError(f"--api-key-env {name}: the environment has no {name}")
    return os.environ[name]


def body_of(setup: dict[str, Any], prompt: Prompt) -> dict[str, Any]:
    return {
        "model": setup["model"],
        "messages": list(prompt.messages),
        **({"tools": list(prompt.tools)} if prompt.tools else {}),
        "max_tokens": setup["max_tokens"],
        **setup["sent"],
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def jobs_of(users: int, prompts: Sequence[Prompt], count: int) -> Iterator[Job]:
    for i in range(count):
        yield Job(arm_of(users), users, prompts[i % len(prompts)], i // len(prompts))


def measure(
    result: Result,
    client: Client,
    prompts: Sequence[Prompt],
    save: Callable[[], None],
    check: Callable[[], None],
) -> bool:
    """Send what the result lacks. True: stopped by Ctrl-C, for which `check` looks; the rest is kept.

    Written between levels only: writing within one would hold up the threads that read the clock.
    """
    kept = [r for r in result["requests"] if r["error"] is None]
    if again := len(result["requests"]) - len(kept):
        result["marks"].append(f"{again} requests that failed before were sent again")
    result["requests"] = kept
    setup, known = result["setup"], {(r["arm"], r["id"], r["repeat"]) for r in kept}
    try:
        if not any(r["cold"] for r in kept):
            send(result, client, [Job(COLD, 1, prompts[0], 0)], check)
        for users in setup["concurrency"]:
            jobs = [j for j in jobs_of(users, prompts, setup["requests"]) if j.key not in known]
            if jobs:
                run_level(result, client, jobs, check)
            save()
    except KeyboardInterrupt:
        return True
    finally:
        client.close()
        save()
    return False


def run_level(result: Result, client: Client, jobs: Sequence[Job], check: Callable[[], None]) -> None:
    """Send the jobs of a level, and read what the server says of its drafts before and after."""
    arm, server, before = jobs[0].arm, result["summary"]["server"], read_page(client.server)
    try:
        send(result, client, jobs, check)
    finally:
        records = [r for r in result["requests"] if r["arm"] == arm]
        kind = result["setup"]["server"] or kind_by(server["fingerprint"])
        new = reading(kind, before, read_page(client.server), records)
        server["levels"][arm] = merged(server["levels"].get(arm), new)
    if not sys.stderr.isatty():
        level = level_of(records, new)
        total, one = number(level["aggregate_tps"], ".1f"), number(level["user_tps"]["p50"], ".1f")
        say(f"{arm}: {len(records)} requests, {level['failed']} failed, {total} tokens/s in all, {one} a user (P50)")


def send(result: Result, client: Client, jobs: Sequence[Job], check: Callable[[], None]) -> None:
    """Send jobs, as many at once as they say, and add their records, those before a Ctrl-C in any case."""
    todo, done = deque(jobs), queue.SimpleQueue[Ended]()
    finished: list[tuple[Job, Reply]] = []

    def user() -> None:
        while not client.closed:
            try:
                job = todo.popleft()
            except IndexError:
                return
            try:
                found: Ended = (job, client.ask(body_of(result["setup"], job.prompt)))
            except Exception as error:  # a mistake of ours: the main thread is to end with it
                found = error
            if not client.closed:
                done.put(found)

    try:
        for _ in range(min(jobs[0].users, len(jobs))):
            threading.Thread(target=user, daemon=True).start()
        while len(finished) < len(jobs):
            check()
            progress(jobs[0].arm, finished, len(jobs))
            take(done, finished, TICK)
        progress(jobs[0].arm, finished, len(jobs))
    finally:
        if len(finished) < len(jobs):  # those under way are given up, and not recorded
            client.close()
            while not done.empty():
                take(done, finished, 0)
        note(result, finished)


def take(done: "queue.SimpleQueue[Ended]", finished: list[tuple[Job, Reply]], wait: float) -> None:
    try:
        found = done.get(timeout=wait)
    except queue.Empty:
        return
    if isinstance(found, Exception):
        raise found
    finished.append(found)


def note(result: Result, finished: Sequence[tuple[Job, Reply]]) -> None:
    """Add the records of what has ended."""
    result["requests"] += [described(job) | reply.record() for job, reply in finished]
    server = result["summary"]["server"]
    prints = (reply.fingerprint for _, reply in finished if reply.fingerprint)
    server["fingerprint"] = server["fingerprint"] or next(prints, None)


def described(job: Job) -> Record:
    names = {"id": job.prompt.id, "task": job.prompt.task, "arm": job.arm, "repeat": job.repeat}
    return {**names, "cold": job.arm == COLD, "concurrency": job.users}


def conclude(result: Result) -> None:
    """Fill in the summary and the marks from the requests."""
    records, summary, server = result["requests"], result["summary"], result["summary"]["server"]
    server["kind"] = result["setup"]["server"] or kind_by(server["fingerprint"])
    by_arm = {arm: [r for r in records if r["arm"] == arm] for arm in result["setup"]["arms"]}
    unread = nothing("the level did not run")
    summary["arms"] = {arm: level_of(rows, server["levels"].get(arm, unread)) for arm, rows in by_arm.items()}
    users = dict(zip(result["setup"]["concurrency"], summary["arms"].values(), strict=True))
    summary["more_users"] = turning_points(users)
    summary["cold"] = [{n: r[n] for n in ("ttft", "error")} | {"tps": decode_tps(r)} for r in records if r["cold"]]
    result["marks"] = list(dict.fromkeys([*result["marks"], *marks_of(result)]))


def progress(arm: str, finished: Sequence[tuple[Job, Reply]], total: int) -> None:
    """A line that is written over, on a terminal."""
    if sys.stderr.isatty():
        failed = sum(reply.error is not None for _, reply in finished)
        end = "\n" if len(finished) == total else ""
        text = f"{arm}: {len(finished)} of {total} requests" + (f", {failed} failed" if failed else "")
        print(f"\r\x1b[K{bar(len(finished), total)} {text}", end=end, file=sys.stderr, flush=True)


def lines(result: Result) -> list[str]:
    """What is printed at the end: the levels side by side, where more users stop paying, drafting, the marks."""
    summary, setup = result["summary"], result["setup"]
    kind = summary["server"]["kind"] or "unknown server"
    out = [
        f"{result['mode']}, {setup['model']} at {setup['url']} ({kind})",
        f"{'':11}{'tokens/s':>9}"
        + "".join(f"{name:>16}" for name in ("a user", "first token s", "gap s", "smoothed s"))
        + f"{'length':>8}{'failed':>8}",
        f"{'':11}{'in all':>9}" + f"{'P50':>8}{'P90':>8}" * 2 + f"{'P50':>8}{'P99':>8}" * 2,
    ]
    for arm, level in summary["arms"].items():
        pairs = [(level["user_tps"], "p90", ".1f"), (level["ttft"], "p90", ".3f")]
        pairs += [(level[name], "p99", ".4f") for name in ("itl_burst", "itl_smoothed")]
        cells = "".join(number(found[p], form).rjust(8) for found, high, form in pairs for p in ("p50", high))
        length = number(level["mean_accepted_length"], ".2f")
        out.append(f"{arm:11}{number(level['aggregate_tps'], '.1f'):>9}{cells}{length:>8}{level['failed']:>8}")
    points, last = summary["more_users"], max(setup["concurrency"])
    ends = {
        f"all users together gain less than {GROWTH:.0%} over the level before": points["little_growth"],
        f"a user's speed is under {HALF:.0%} of that at {setup['concurrency'][0]} at once": points["half_speed"],
    }
    for end, users in ends.items():
        out.append(
            f"more users stop paying | {end}: "
            + (f"at no level up to {last}" if users is None else f"first at {users} at once")
        )
    return [*out, *drafting_lines(summary["server"]["levels"]), *(f"mark | {mark}" for mark in result["marks"])]


def drafting_lines(found: dict[str, Any]) -> list[str]:
    """What the server says of its drafts, by level; one line where it says nothing."""
    reasons = {drafting["reason"] for drafting in found.values()}
    if None not in reasons:
        return [f"acceptance unknown: {'; '.join(sorted(reasons)) or 'no level ran'}"]
    rates = ", ".join(f"{arm} {number(drafting['acceptance'], '.1%')}" for arm, drafting in found.items())
    return [f"acceptance by the server: {rates}", next(d["definition"] for d in found.values() if d["reason"] is None)]
