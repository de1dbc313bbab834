"""What command lines share: argparse with errors of one line, exit code 2."""

import argparse
import sys
from typing import ClassVar, NoReturn


class Parser(argparse.ArgumentParser):
    """argparse, with errors of one line under the command's own name."""

    command: ClassVar[str] = "mlx-dflash"

    def error(self, message: str) -> NoReturn:
        self.fail(message)

    @classmethod
    def fail(cls, message: str) -> NoReturn:
        print(f"{cls.command}: error: {' '.join(message.split())}", file=sys.stderr)
        raise SystemExit(2)
