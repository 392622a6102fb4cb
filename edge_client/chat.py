"""A conversation at the terminal: turns, commands, Ctrl-C."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rich.text import Text

from edge_client.generate import Conversation
from edge_client.prompts import chat_prompt, next_turn
from edge_client.results import Result
from edge_client.startup import Client
from edge_client.terminal import Terminal
from shared.faults import SpecwireError

HELP = """/reset      forget the conversation
/seed N     draw with another seed
/stats      figures of the last answer
/help       this list
/quit       leave (so does Ctrl-D)
A line that ends with \\ goes on in the next one. Ctrl-C stops an answer."""


class Chat:
    """A conversation at the terminal. `run` executes a coroutine and lets Ctrl-C cancel just that."""

    def __init__(
        self, client: Client, terminal: Terminal, run: Callable[[Any], Any], system: str, *, stats: bool
    ) -> None:
        self._client = client
        self._terminal = terminal
        self._run = run
        self._system = system
        self._always_stats = stats
        self._sampling = client.options.sampling()
        self._controller = client.options.controller(client.reached, client.estimates)
        self._conversation: Conversation = client.conversation()
        self._messages: list[dict[str, str]] = self._start()
        self._last: Result | None = None
        self._why_no_stats = "There is no answer yet."

    def loop(self) -> None:
        """Until /quit or the end of input."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - gives `input` editing and a history
        interactive = sys.stdin.isatty()
        if interactive:
            self._terminal.err.print(Text(f"{self._speaker()}. /help lists the commands.", "dim"))
        try:
            while True:
                try:
                    text = _read_message("> " if interactive else "")
                except EOFError:
                    return
                except KeyboardInterrupt:
                    self._terminal.err.print(Text("\n/quit or Ctrl-D leaves.", "dim"))
                    continue
                if text.startswith("/"):
                    if self._command(text):
                        return
                elif text.strip():
                    self._turn(text)
        finally:
            self._run(self._conversation.__aexit__(None, None, None))

    def _command(self, text: str) -> bool:
        """Whether to leave."""
        name, _, argument = text.strip().partition(" ")
        match name:
            case "/quit" | "/exit":
                return True
            case "/help":
                self._terminal.err.print(HELP, markup=False)
            case "/reset":
                self._run(self._conversation.reset())
                self._messages = self._start()
                self._terminal.notice("The conversation is forgotten.")
            case "/seed" if argument.strip().isdecimal():
                self._sampling = replace(self._sampling, seed=int(argument))
                self._terminal.notice(f"The seed is {argument.strip()}.")
            case "/stats" if self._last is not None:
                self._terminal.stats(self._last)
            case "/stats":
                self._terminal.notice(self._why_no_stats)
            case _:
                self._terminal.notice(f"There is no command {text.strip()!r}; /help lists them.")
        return False

    def _turn(self, text: str) -> None:
        self._messages.append({"role": "user", "content": text})
        self._last = None
        self._why_no_stats = "The last answer did not come to its end, so it has no figures."
        try:
            answer, self._last = self._run(self._answer())
        except KeyboardInterrupt:
            self._terminal.notice("Stopped.")
            answer = self._terminal.take()
        except SpecwireError as error:
            self._terminal.error(error)
            self._terminal.take()
            answer = ""
        if not answer:  # nothing that the next question could refer to
            self._messages.pop()
            return
        self._messages.append({"role": "assistant", "content": answer})
        if self._always_stats and self._last is not None:
            self._terminal.stats(self._last)

    async def _answer(self) -> tuple[str, Result]:
        client, conversation = self._client, self._conversation
        if not conversation.has_met and (description := await client.ask_again()) is not None:
            conversation.meet(description)
        if conversation.history and len(self._messages) > 2:
            tokens = next_turn(client.manifest, client.tokenizer, conversation.history, self._messages)
        else:
            tokens = chat_prompt(client.manifest, client.tokenizer, self._messages)
        events = conversation.answer(
            tokens,
            sampling=self._sampling,
            max_new_tokens=client.options.max_tokens,
            controller=self._controller,
        )
        return await self._terminal.stream(client, events)

    def _speaker(self) -> str:
        if self._client.reached is not None:
            return self._client.reached.model
        return f"{self._client.manifest.name} alone, because no verifier can be reached"

    def _start(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": self._system}] if self._system else []


def _read_message(prompt: str) -> str:
    lines = [input(prompt)]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input("  " if prompt else ""))
    return "\n".join(lines)
