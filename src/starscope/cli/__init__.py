"""The command line. stdout is data and everything else goes to stderr; exit statuses are those of the errors.

A command's module is imported when it is called, and heavy packages when they are needed, so `starscope --help`
imports neither NumPy nor torch. `main` is the process's entry point; `app` the command itself:

    from click.testing import CliRunner
    from starscope.cli.app import app
    CliRunner().invoke(app, ["show", "model.gguf", "--json"])
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command that `sys.argv` names, and end the process with its status."""
    from starscope.cli.signals import Signals

    signals = Signals()
    try:
        signals.listen()
        from starscope.cli.app import app
        from starscope.cli.common import Session

        app.main(sys.argv[1:], obj=Session(signals=signals))
    except BaseException as error:  # of the command itself only SystemExit
        if signals.status is not None:
            sys.exit(signals.status)
        if isinstance(error, KeyboardInterrupt):  # before anybody listened
            sys.exit(130)
        raise
    finally:
        signals.ignore()
