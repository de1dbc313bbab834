"""`python -m mlx_dflash.benchmarks COMMAND`: how many times faster, on this machine, with this pair, on your text.

Other modules of this package are benchmarks of one question each; `python -m mlx_dflash.benchmarks.NAME --help`.
"""

import importlib
import sys
from collections.abc import Sequence

from mlx_dflash.command import Parser
from mlx_dflash.errors import DFlashError

COMMANDS = {
    "run": "a pair on prompts of many task classes, against plain decoding and stock mlx-lm",
    "sweep": "block sizes and temperatures: speed-up, accepted length and acceptance together",
    "context": "speed, first token, memory and acceptance from an empty to a full cache",
    "endpoint": "an OpenAI-compatible server at several levels of concurrency",
    "calibrate": "what rounds cost on this machine, with a pair or with random weights of a shape",
    "compare": "two results, with intervals; refuses what can't be compared",
    "report": "results as Markdown or one HTML page, with a verdict",
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(prog="python -m mlx_dflash.benchmarks", description="Benchmarks of speculative decoding.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    wanted = next((word for word in (sys.argv[1:] if argv is None else argv) if word in COMMANDS), None)
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if name == wanted:  # the others need not be imported
            importlib.import_module(f"mlx_dflash.benchmarks.{name}").add_arguments(command)
    args = parser.parse_args(argv)
    try:
        code = importlib.import_module(f"mlx_dflash.benchmarks.{args.command}").run(args)
    except DFlashError as error:
        Parser.fail(str(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    raise SystemExit(code)


if __name__ == "__main__":
    main()
