"""What the commands of `rollbook` share: options, the store they are about, and how an error ends them."""

import functools
import logging
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.console import Console

from data.store import Store
from infra.home import Home

ABOUT = "Run, look at, repeat and stop trainings. Every command says what it did, or one line on what is wrong."
app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False, help=ABOUT)
console = Console()
beside = Console(stderr=True)  # what is said while the answer itself is one JSON object
log = logging.getLogger("rollbook")

Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="a.b=c", help="Change a value of the config; may be repeated.")
]
StoreUrl = Annotated[str | None, typer.Option("--store", help="fsspec URL of the store; by default the home's own.")]
Endpoint = Annotated[str | None, typer.Option("--store-endpoint", help="Of an S3 service; else AWS_ENDPOINT_URL.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
STOPPED = 130
LOOKING_S = 5.0  # how long a store is waited for: whoever asks at a terminal asks again


def command(function: Callable[..., None]) -> Callable[..., None]:
    """At the edge: one line for an error, its traceback in the run's log; exit code 1, or 130 when stopped."""

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> None:
        try:
            function(*args, **kwargs)
        except BrokenPipeError:  # `| head` has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except KeyboardInterrupt:
            console.print("stopped; the same command goes on from what is on record", style="yellow")
            raise typer.Exit(STOPPED) from None
        except typer.Exit:  # it has said what it had to
            raise
        except Exception as error:
            log.debug("failed", exc_info=True)
            Console(stderr=True, soft_wrap=True).print(f"error: {error}", style="red", markup=False, highlight=False)
            raise typer.Exit(1) from None

    return app.command(function.__name__.replace("_", "-").rstrip("-"))(guarded)


def open_store(url: str | None, endpoint: str | None) -> tuple[Home, Store]:
    """The user's home, and the store that a command is about."""
    home = Home.find()
    home.prepare()
    return home, Store(url or home.store_url, endpoint, LOOKING_S)
