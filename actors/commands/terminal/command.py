"""`pagebus chat`, `pagebus complete` and `pagebus top`: their options. Names are those of vLLM's commands."""

from __future__ import annotations

import argparse
import os
import sys

from pagebus.actors.commands.terminal.sampling import add_sampling
from pagebus.actors.settings.command_line import Commands

DEFAULT_URL = "http://127.0.0.1:8000/v1"


def add_terminal(commands: Commands) -> None:
    """All of them."""
    chat = commands.add(
        "chat",
        run_terminal,
        help="talk to a server in the terminal",
        description="Talk to a server of OpenAI's API: answers are streamed, Ctrl-C stops one, /help lists commands. "
        "Where standard input is no terminal, each of its lines is a message.",
    )
    _add_server(chat)
    chat.add_argument("--system-prompt", metavar="TEXT", help="system message before the conversation")
    chat.add_argument("-q", "--quick", metavar="MESSAGE", help="send one message, print the answer, and exit")
    add_sampling(chat)
    complete = commands.add(
        "complete",
        run_terminal,
        help="have a server continue a text",
        description="Have a server of OpenAI's API continue a text: the argument, all of standard input, or what is "
        "typed. Only the continuation is written.",
    )
    _add_server(complete)
    complete.add_argument("prompt", nargs="?", metavar="PROMPT", help="the text (default: standard input)")
    complete.add_argument("-q", "--quick", metavar="PROMPT", help="the same, as vLLM's command takes it")
    add_sampling(complete)
    top = commands.add(
        "top",
        run_terminal,
        help="watch a deployment in the terminal",
        description="Requests, tokens per second, latencies, replicas with their cache, actors and streams of a "
        "Pagebus deployment, as its ingress tells them, until Ctrl-C.",
    )
    _add_server(top, model=False)
    top.add_argument("--once", action="store_true", help="print one frame after a second, and exit")


def _add_server(parser: argparse.ArgumentParser, *, model: bool = True) -> None:
    parser.add_argument(
        "--url", "--base-url", dest="url", default=DEFAULT_URL, help=f"where the API is (default: {DEFAULT_URL})"
    )
    parser.add_argument("--api-key", metavar="KEY", help="key for the server (default: OPENAI_API_KEY, if it is set)")
    if model:
        parser.add_argument(
            "--model-name", "--model", dest="model_name", metavar="NAME", help="default: the first served"
        )


def run_terminal(arguments: argparse.Namespace) -> int:
    """Run one of them; returns the exit code."""
    from pagebus.actors.commands.terminal.api import Api, ApiFailure

    api = Api(arguments.url, arguments.api_key or os.environ.get("OPENAI_API_KEY"))
    try:
        if arguments.command == "chat":
            from pagebus.actors.commands.terminal.chat import run_chat

            return run_chat(api, arguments)
        if arguments.command == "top":
            from pagebus.actors.commands.terminal.top import run_top

            return run_top(api, arguments)
        from pagebus.actors.commands.terminal.complete import run_complete

        return run_complete(api, arguments)
    except ApiFailure as error:
        print(f"pagebus: {error}", file=sys.stderr)
        return 1
