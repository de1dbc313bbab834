"""The command line `python -m mlx_dflash.convert {target,drafter,pair,inspect}`, with mlx_lm.convert's flags.

Exit 0 when the folder is written, 2 with one line for anything the user can mend, 130 after Ctrl-C; results go to
stdout, progress and errors to stderr.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlx_dflash import command
from mlx_dflash.errors import DFlashError, RequestError

from .decode import FLOATS
from .plan import Options
from .recipe import MODES, RECIPES, Recipe, make_recipe

DRAFTER_BITS = 8


class Parser(command.Parser):
    command = "mlx_dflash.convert"


def build_parser() -> Parser:
    parser = Parser(prog="python -m mlx_dflash.convert", description="Port targets and drafters to MLX.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{target,drafter,pair,inspect}")
    target = commands.add_parser("target", help="a target, for mlx_dflash and mlx_lm")
    common(target, "target")
    target.add_argument("--verify", action="store_true", help="measure the result against its source")
    target.add_argument("--draft-model", default=None, help="with --verify: measure acceptance with this drafter")
    drafter = commands.add_parser("drafter", help="a drafter, in the format that it has")
    common(drafter, "drafter")
    drafter.add_argument("--target", default=None, help="the target that it must fit")
    pair = commands.add_parser("pair", help="a target and its drafter, in one folder that --model takes")
    common(pair, "target")
    pair.add_argument("--draft-model", required=True, help="the drafter: folder, .gguf file or hub name")
    pair.add_argument("--draft-revision", default=None, help="its branch, tag or commit on the hub")
    pair.add_argument("--draft-q-bits", type=int, default=None, help="bits of the draft layers (with -q; default 8)")
    pair.add_argument("--draft-dtype", default=None, choices=list(FLOATS), help="dtype of what is not quantized")
    pair.add_argument("--verify", action="store_true", help="measure the result against its sources")
    look = commands.add_parser("inspect", help="what a folder or file is, and which drafters fit")
    look.add_argument("path", help="folder, .gguf file or hub name")
    look.add_argument("--draft-model", action="append", default=[], help="a drafter to check against it")
    look.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def common(parser: argparse.ArgumentParser, what: str) -> None:
    add = parser.add_argument
    names = ["--hf-path", "--model"]
    add(*names, required=True, help=f"the {what}: folder, .gguf file or hub name")
    add("--mlx-path", default="mlx_model", help="the folder to write (default mlx_model)")
    add("-q", "--quantize", action="store_true", help="quantize what the source has not quantized")
    bits = f" (default {DRAFTER_BITS})" if what == "drafter" else " (default by mode: 4, mxfp8 8)"
    add("--q-bits", type=int, default=None, help=f"bits a weight{bits}")
    add("--q-group-size", type=int, default=None, help="weights that share a scale (default by mode)")
    add("--q-mode", default="affine", choices=list(MODES), help="default affine")
    add("--quant-predicate", default=None, choices=RECIPES, help="a mixed recipe")
    add("--skip-unfit", action="store_true", help="leave layers unquantized whose width the group does not divide")
    add("--dtype", default=None, choices=list(FLOATS), help="dtype of what is not quantized (default: the source's)")
    add("-d", "--dequantize", action="store_true", help="unpack what the source has quantized")
    add("--revision", default=None, help="branch, tag or commit on the hub")
    add("--force", action="store_true", help="replace the result if it exists")
    add("--trust-remote-code", action="store_true", help="copy the source's *.py files along; none is run here")
    add("--upload-repo", default=None, help=argparse.SUPPRESS)


def options(args: argparse.Namespace, default_bits: int | None = None) -> Options:
    given = (args.q_bits, args.q_group_size, args.quant_predicate, args.skip_unfit or None)
    if not args.quantize and (args.q_mode != "affine" or any(v is not None for v in given)):
        raise RequestError("--q-bits, --q-group-size, --q-mode, --quant-predicate and --skip-unfit need --quantize")
    recipe = None
    if args.quantize:
        bits = args.q_bits or (default_bits if args.q_mode == "affine" else None)
        recipe = make_recipe(args.q_mode, bits, args.q_group_size, args.quant_predicate, args.skip_unfit)
    return Options(recipe, args.dtype, args.dequantize)


def draft_options(args: argparse.Namespace) -> Options:
    """Of a pair's drafter: affine, 8 bits unless told otherwise, whatever the target's mode."""
    recipe: Recipe | None = None
    if args.quantize:
        group = args.q_group_size if args.q_mode == "affine" else None
        recipe = make_recipe("affine", args.draft_q_bits or DRAFTER_BITS, group, None, args.skip_unfit)
    elif args.draft_q_bits:
        raise RequestError("--draft-q-bits needs --quantize")
    return Options(recipe, args.draft_dtype, args.dequantize)


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    try:
        run(args)
    except DFlashError as e:
        Parser.fail(str(e))
    except BrokenPipeError:
        raise SystemExit(0) from None
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        raise SystemExit(130) from None
    raise SystemExit(0)


def run(args: argparse.Namespace) -> None:
    from . import run as work

    if args.command == "inspect":
        from .inspect import report

        report(args.path, args.draft_model, args.json)
        return
    if args.upload_repo is not None:
        raise RequestError("--upload-repo: nothing is uploaded here; use `hf upload` on the folder")
    folder = Path(args.mlx_path)
    work.refuse_same(args.hf_path, folder)
    request: dict[str, Any] = {"revision": args.revision, "force": args.force, "copy_code": args.trust_remote_code}
    if args.command == "drafter":
        work.convert_drafter(work.Request(args.hf_path, folder, options(args, DRAFTER_BITS), **request), args.target)
        return
    target = work.Request(args.hf_path, folder, options(args), **request)
    if args.command == "pair":
        drafter = work.Request(args.draft_model, folder, draft_options(args), args.draft_revision, args.force)
        work.convert_pair(target, drafter, args.verify)
        return
    if args.draft_model is not None and not args.verify:
        raise RequestError("--draft-model is what --verify measures with; give --verify too, or convert a pair")
    work.convert_target(target, args.verify, args.draft_model)
