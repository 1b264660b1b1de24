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
    from starscope.cli.signals import Stopped, ignore_signals, stop_on_signals

    try:
        stop_on_signals()
        from starscope.cli.app import app

        app.main(sys.argv[1:])
    except KeyboardInterrupt:  # before or after the command itself ran, as is the next
        sys.exit(130)
    except Stopped as stopped:
        sys.exit(stopped.status)
    finally:
        ignore_signals()
