"""The command line `python -m mlx_dflash.generate`: one prompt, streamed text, and a line that says what ran.

Results go to stdout, everything else to stderr. Exit 0 when text was generated, 2 with one line for anything the user
can mend, 130 after Ctrl-C.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from .api import (
    GenerationResponse,
    GenerationResult,
    check_kv_quantization,
    collect,
    stream_generate,
    thinking_option,
)
from .choice import choose_drafter, show_memory
from .command import Interrupt, Parser, add_pair_flags, log_to_stderr, prompt_bar, wanted_rows
from .errors import DFlashError, RequestError, UnsupportedError
from .facts import decide_thinking, has_thinking_switch
from .loading import load
from .report import compare, comparison, remarks, sampling_line, summary
from .sampling_flags import add_sampling_flags, wanted_sampling
from .text import apply_template, encode_prompt

DEFAULT_PROMPT = "hello"  # mlx-lm's
# Flags of mlx_lm.generate that are refused by name, with what to do instead.
REFUSED: dict[str, str] = {
    "adapter-path": "fuse the LoRA adapter into the model first (mlx_lm.fuse)",
    "image": "only text prompts are supported",
    "trust-remote-code": "no remote code is run",
    "xtc-probability": "XTC sampling is not supported",
    "xtc-threshold": "XTC sampling is not supported",
    "max-kv-size": "a rotating cache would change the text",
    "prompt-cache-file": "a conversation and its caches are kept by python -m mlx_dflash.chat",
    "quantize-activations": "it would change the text",
}


def build_parser() -> Parser:
    parser = Parser(prog="python -m mlx_dflash.generate", description="Generate text with DFlash speculative decoding.")
    add = parser.add_argument
    add_pair_flags(add)
    add("--memory", action="store_true", help="print the memory that the pair needs, and load nothing")
    add("--compare", action="store_true", help="decode plainly too; print both speeds and whether the tokens are equal")
    add("--json", action="store_true", help="print one JSON object: text, tokens, finish_reason, stats")
    add("--prompt", "-p", default=DEFAULT_PROMPT, help="the message; '-' reads it from stdin")
    add("--system-prompt", default=None, help="system message for the chat template")
    add("--prefill-response", default=None, help="beginning of the answer, for the chat template")
    add("--chat-template-config", default=None, metavar="JSON", help="extra arguments for the chat template")
    add("--ignore-chat-template", action="store_true", help="use the prompt as it is")
    add("--use-default-chat-template", action="store_true", help="accepted as in mlx-lm; the template is always used")
    add("--extra-eos-token", nargs="+", default=(), help="more tokens that end the text")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be given again")
    add("--max-tokens", "-m", type=int, default=256, help="most tokens to generate (-1: no limit; default 256)")
    add_sampling_flags(add)
    add("--prefill-step-size", type=int, default=2048, help="prompt tokens forwarded at a time")
    add("--quantized-kv-start", type=int, default=0, help=argparse.SUPPRESS)
    add("--profile", action="store_true", help="time drafting and verifying apart (slower)")
    for name in REFUSED:
        short = ["-qa"] if name == "quantize-activations" else []
        add(f"--{name}", *short, nargs="*", default=None, help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    log_to_stderr(args.verbose)
    try:
        code = run(args)
    except DFlashError as e:
        Parser.fail(str(e))
    except BrokenPipeError:  # the reader of our stdout has gone, e.g. `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except KeyboardInterrupt:
        note("interrupted")
        code = 130
    raise SystemExit(code)


def run(args: argparse.Namespace) -> int:
    for name, reason in REFUSED.items():
        if getattr(args, name.replace("-", "_")) is not None:
            raise UnsupportedError(f"--{name}: {reason}")
    for name in ("model", "draft_model"):
        if getattr(args, name) == "":
            raise RequestError(f"--{name.replace('_', '-')} is empty; give a folder or a Hugging Face name")
    block_size = wanted_rows(args)
    sampling = wanted_sampling(args)
    check_kv_quantization(args.kv_bits, args.kv_group_size)
    if args.quantized_kv_start != 0:
        raise UnsupportedError("--quantized-kv-start must be 0: with --kv-bits, quantization is from token 0")
    extra = template_config(args.chat_template_config)
    prompt = read_prompt(args.prompt)

    if args.memory:
        return show_memory(args)
    model, tokenizer = load(args.model or "demo", args.revision)
    drafter, pair = choose_drafter(args, model)
    for token in args.extra_eos_token:
        add_eos_token(tokenizer, token)
    asked = extra.get("enable_thinking")
    thinking, decider = decide_thinking(asked, tokenizer, getattr(drafter, "name", None))
    if args.ignore_chat_template or not (asked is None or has_thinking_switch(tokenizer)):
        thinking = None
    options: dict[str, Any] = {
        **sampling,
        "max_tokens": args.max_tokens,
        "thinking": thinking,
        "logprobs": args.logprobs,
        "top_logprobs": args.top_logprobs,
        "stop": args.stop,
        "kv_bits": args.kv_bits,
        "kv_group_size": args.kv_group_size,
        "profile": args.profile,
        "prefill_step_size": args.prefill_step_size,
    }
    if thinking is not None:
        extra |= thinking_option(tokenizer, thinking)
    ids = template(tokenizer, prompt, args, extra)
    with Interrupt() as interrupt:

        def progress(done: int, total: int) -> None:
            interrupt.check()
            prompt_bar(done, total)

        options |= {"interrupted": interrupt.asked, "prompt_progress_callback": progress}
        drafting = {
            "lookup": False if args.no_lookup else None,
            "draft_window": args.draft_window,
            "draft_sink": args.draft_sink,
        }
        stream = stream_generate(
            model, tokenizer, ids, draft_model=drafter, block_size=block_size, **options, **drafting
        )
        result = show(stream, quiet=args.json)
        if thinking is not None:
            result.stats.sampling["from"]["thinking"] = decider
        report = as_json(result)
        if args.verbose:
            said = remarks(model, drafter, result.stats, asked)
            note("\n".join([pair, *said, sampling_line(result.stats), summary(result)]))
        if args.compare and not interrupt.pressed:
            seed = result.stats.sampling.get("seed")
            options["seed"] = args.seed if seed is None else seed
            options |= {"proposals": None, "draft_temp": None}
            stream = stream_generate(model, tokenizer, ids, **options)
            plain = show(stream, quiet=True)
            if not interrupt.pressed:
                report["compare"] = compare(model, ids, result, plain, args.kv_bits, args.kv_group_size)
                note(comparison(report["compare"]))
    if args.json:
        print(json.dumps(report, ensure_ascii=False), flush=True)
    return 130 if interrupt.pressed else 0


def as_json(result: GenerationResult) -> dict[str, Any]:
    """The object that --json prints; log-probabilities where they were asked for."""
    report: dict[str, Any] = {
        "text": result.text,
        "tokens": result.tokens,
        "finish_reason": result.finish_reason,
        "stats": result.stats.to_dict(),
    }
    if result.logprobs is not None:
        report |= {"logprobs": result.logprobs, "top_logprobs": result.top_logprobs}
    return report


def read_prompt(value: str) -> str:
    """The text of --prompt, or stdin's for '-'; backslash-n and -t are a newline and a tab, as in mlx-lm."""
    try:
        prompt = sys.stdin.read() if value == "-" else value.replace("\\n", "\n").replace("\\t", "\t")
        prompt.encode()
    except UnicodeError as e:
        raise RequestError("the prompt is not valid UTF-8; convert it first") from e
    if not prompt.strip():
        raise RequestError("the prompt is empty; give some text with --prompt, or pipe it in with --prompt -")
    return prompt


def template_config(value: str | None) -> dict[str, Any]:
    try:
        extra = json.loads(value or "{}")
    except ValueError as e:
        raise RequestError(f"--chat-template-config is not valid JSON: {e}") from e
    if not isinstance(extra, dict):
        raise RequestError(f"--chat-template-config must be a JSON object, not {value}")
    return extra


def add_eos_token(tokenizer: Any, token: str) -> None:
    try:
        tokenizer.add_eos_token(token)
    except ValueError as e:
        raise RequestError(f"--extra-eos-token: {e}") from e


def template(tokenizer: Any, prompt: str, args: argparse.Namespace, extra: dict[str, Any]) -> list[int]:
    """Prompt ids as mlx_lm.generate makes them: through the chat template, if there is one and it is wanted."""
    if args.ignore_chat_template or not tokenizer.has_chat_template:
        for name in ("system_prompt", "prefill_response"):
            if getattr(args, name) is not None:
                raise RequestError(f"--{name.replace('_', '-')} needs a chat template, and none is used here; drop it")
        return encode_prompt(tokenizer, prompt)
    messages = [{"role": "system", "content": args.system_prompt}] if args.system_prompt is not None else []
    messages.append({"role": "user", "content": prompt})
    answer = args.prefill_response is not None
    if answer:
        messages.append({"role": "assistant", "content": args.prefill_response})
    text = apply_template(
        tokenizer, messages, tokenize=False, continue_final_message=answer, add_generation_prompt=not answer, **extra
    )
    return list(tokenizer.encode(text, add_special_tokens=False))


def show(stream: Iterator[GenerationResponse], quiet: bool) -> GenerationResult:
    """Print the text as it comes and collect it."""

    def printed() -> Iterator[GenerationResponse]:
        for response in stream:
            if not quiet and response.text:
                print(response.text, end="", flush=True)
            yield response

    result = collect(printed())
    if not quiet:
        print(flush=True)
    return result


def note(text: str) -> None:
    """A remark on stderr, dimmed on a terminal unless NO_COLOR is set."""
    colour = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    print(f"\x1b[2m{text}\x1b[0m" if colour else text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
