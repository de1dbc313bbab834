"""One decoder of benchmarks/peers.py, in a Python of its own: `peer_worker.py NAME MODEL DRAFTER`.

Reads a JSON job a line from stdin, {"prompt": ids, "max_tokens": n, "block_size": rows}, and answers each with a line:
{"tokens": ids, "seconds": from the first token's arrival to the last one's, "rounds": verify passes in that time}. A
block size of 1 is plain decoding. Needs nothing but the peer itself and what it brings, so no import of mlx_dflash
stands outside its own decoder. Every decoder is called as its authors call it, greedily, with its other defaults.
"""

import json
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

Decode = Callable[[list[int], int, int], dict[str, Any]]  # prompt, most tokens, block size


def timed(steps: Any) -> dict[str, Any]:
    """Tokens and times of an iterable of token lists, one list a round (or a token)."""
    tokens: list[int] = []
    first = last = 0.0
    rounds = -1  # what the prompt gave is no round
    for new in steps:
        if not new:
            continue
        last = perf_counter()
        first = first or last
        tokens += [int(token) for token in new]
        rounds += 1
    return {"tokens": tokens, "seconds": last - first, "rounds": rounds}


def mlx_lm_plain(model: str, _: str) -> Decode:
    import mlx.core as mx
    from mlx_lm import load
    from mlx_lm.generate import generate_step

    target, tokenizer = load(model)

    def steps(prompt: list[int], limit: int) -> Any:
        for token, _ in generate_step(mx.array(prompt), target, max_tokens=limit):
            yield [token]
            if token in tokenizer.eos_token_ids:
                return

    return lambda prompt, limit, rows: timed(steps(prompt, limit))


def ours(model: str, drafter: str) -> Decode:
    from mlx_dflash import load, load_drafter, stream_generate

    target, tokenizer = load(model)
    draft = load_drafter(drafter, target)

    def decode(prompt: list[int], limit: int, rows: int) -> dict[str, Any]:
        options: dict[str, Any] = {"draft_model": draft, "block_size": rows} if rows > 1 else {}
        stats: list[Any] = []

        def steps() -> Any:
            for response in stream_generate(target, tokenizer, prompt, max_tokens=limit, **options):
                stats.append(response.stats)
                yield [response.token]

        found = timed(steps())
        found["rounds"] = stats[-1].rounds + stats[-1].plain_rounds
        return found

    return decode


def zlab(model: str, drafter: str) -> Decode:
    from dflash import model_mlx
    from dflash.model_mlx import load, load_draft, stream_generate

    model_mlx.snapshot_download = lambda folder, **_: folder  # it takes hub names only
    target, tokenizer = load(model)
    draft = load_draft(drafter)

    def steps(prompt: list[int], limit: int, rows: int) -> Any:
        for response in stream_generate(target, draft, tokenizer, prompt, block_size=rows, max_tokens=limit):
            yield response.tokens

    return lambda prompt, limit, rows: timed(steps(prompt, limit, rows))


def mlx_dspark(model: str, drafter: str) -> Decode:
    from mlx_dspark.generate import dflash_generate, greedy_generate
    from mlx_dspark.load import load_dflash, load_target

    target, tokenizer = load_target(model, require_tap=True)
    draft, _ = load_dflash(drafter, quantize=False)

    def decode(prompt: list[int], limit: int, rows: int) -> dict[str, Any]:
        if rows == 1:
            result = greedy_generate(target, tokenizer, prompt_ids=prompt, max_new_tokens=limit)
        else:
            result = dflash_generate(
                target, tokenizer, draft, prompt_ids=prompt, max_new_tokens=limit, max_draft_tokens=rows - 1
            )
        return {"tokens": result.token_ids, "seconds": result.decode_seconds, "rounds": result.num_rounds}

    return decode


def mlx_vlm(model: str, drafter: str) -> Decode:
    import mlx.core as mx
    from mlx_vlm import load
    from mlx_vlm.generate import generate_step
    from mlx_vlm.speculative.drafters import load_drafter

    target, processor = load(model)
    tokenizer = getattr(processor, "tokenizer", processor)
    ends = getattr(tokenizer, "eos_token_ids", None) or [tokenizer.eos_token_id]
    ends = {ends} if isinstance(ends, int) else set(ends)
    draft, kind = load_drafter(drafter)

    def steps(prompt: list[int], limit: int, rows: int) -> Any:
        options = {"draft_model": draft, "draft_kind": kind, "draft_block_size": rows} if rows > 1 else {}
        ids = mx.array(prompt)[None]
        for token, _ in generate_step(ids, target, None, None, max_tokens=limit, temperature=0.0, **options):
            token = int(token)
            yield [token]
            if token in ends:
                return

    def decode(prompt: list[int], limit: int, rows: int) -> dict[str, Any]:
        found = timed(steps(prompt, limit, rows))
        if rows > 1:
            found["rounds"] = len(draft.accept_lens)
            found["drafted"] = sum(getattr(draft, "draft_lens", None) or [])
        return found

    return decode


def dflash_mlx(model: str, drafter: str) -> Decode:
    from dflash_mlx.engine.events import SummaryEvent, TokenEvent
    from dflash_mlx.runtime import get_stop_token_ids, stream_dflash_generate
    from dflash_mlx.runtime.bundle import load_runtime_bundle
    from dflash_mlx.runtime.context import build_offline_runtime_context

    contexts: dict[int, Any] = {}
    bundle: Any = None

    def decode(prompt: list[int], limit: int, rows: int) -> dict[str, Any]:
        nonlocal bundle
        if rows not in contexts:
            # its default mode shortens a full block when drafts fail, which would not be equal width
            contexts[rows] = build_offline_runtime_context(verify_len_cap=rows, verify_mode="dflash")
        if bundle is None:
            bundle = load_runtime_bundle(
                model_ref=model, draft_ref=drafter, draft_quant="none", verify_config=contexts[rows].verify
            )
        summaries: list[Any] = []

        def steps() -> Any:
            for event in stream_dflash_generate(
                target_model=bundle.target_model,
                target_ops=bundle.target_ops,
                tokenizer=bundle.tokenizer,
                draft_model=bundle.draft_model,
                draft_backend=bundle.draft_backend,
                prompt="",
                prompt_tokens_override=prompt,
                max_new_tokens=limit,
                use_chat_template=False,
                stop_token_ids=get_stop_token_ids(bundle.tokenizer),
                runtime_context=contexts[rows],
            ):
                if isinstance(event, TokenEvent):
                    yield [event.token_id]
                elif isinstance(event, SummaryEvent):
                    summaries.append(event)

        found = timed(steps())
        found["rounds"] = summaries[-1].cycles_completed
        return found

    return decode


PEERS: dict[str, Callable[[str, str], Decode]] = {
    "mlx_dflash": ours,
    "mlx-lm": mlx_lm_plain,
    "z-lab dflash": zlab,
    "mlx-dspark": mlx_dspark,
    "mlx-vlm": mlx_vlm,
    "dflash-mlx": dflash_mlx,
}


def main() -> None:
    name, model, drafter = sys.argv[1:]
    answers, sys.stdout = sys.stdout, sys.stderr  # a peer may print

    def answer(value: dict[str, Any]) -> None:
        print(json.dumps(value), file=answers, flush=True)

    try:
        decode = PEERS[name](model, drafter)
        answer({"ready": True})
        for line in sys.stdin:
            job = json.loads(line)
            answer(decode(job["prompt"], job["max_tokens"], job["block_size"]))
    except Exception as error:  # whatever a peer raises is its answer
        answer({"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]})


if __name__ == "__main__":
    main()
