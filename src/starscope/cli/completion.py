"""`completion`: the script with which a shell completes verbs, options and paths."""

from __future__ import annotations

import click

from starscope.cli.common import Session, everywhere


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@everywhere
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print a shell completion script.

    \b
    bash: eval "$(starscope completion bash)"       in ~/.bashrc
    zsh:  eval "$(starscope completion zsh)"        in ~/.zshrc
    fish: starscope completion fish > ~/.config/fish/completions/starscope.fish
    """  # noqa: D301 - a real \b keeps the lines apart
    from click.shell_completion import get_completion_class

    from starscope.cli.app import COMPLETE, PROGRAM

    session: Session = ctx.obj
    kind = get_completion_class(shell)
    assert kind is not None, "click completes these three"
    script = kind(ctx.find_root().command, {}, PROGRAM, COMPLETE)
    session.write(script.source_template % script.source_vars())
