"""A small agent on the local endpoint: it searches a folder of text, reads, reasons and answers.

    edge-client serve --verifier HOST:PORT        # in one terminal
    python -m edge_client.examples.rag_agent "How deep is the lake?" --folder notes/

Every round extends the same conversation, so the endpoint continues its session: only what is new is
sent and computed. Two things keep it so: an answer goes back word for word, and its first line is cut
out here. A `stop` string would end the session, because the verifier has written past it. The last
lines say what that and speculation saved. Standard library only: any client that speaks OpenAI's API
does the same.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import urllib.error
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PASSAGE_WORDS = 45
MAX_TOKENS = 64
SYSTEM = (
    "You answer questions from notes. Write exactly one line:\n"
    "SEARCH: words to look for in the notes\n"
    "or, when the notes that were found say it,\n"
    "ANSWER: the answer in one sentence"
)
EXAMPLE = [
    {"role": "user", "content": "Question: When was the bridge built?"},
    {"role": "assistant", "content": "SEARCH: bridge built year"},
    {
        "role": "user",
        "content": "Notes: [old.txt] The bridge was built in 1732.\nQuestion: When was the bridge built?",
    },
    {"role": "assistant", "content": "ANSWER: The bridge was built in 1732."},
]


@dataclass(frozen=True, slots=True)
class Passage:
    """Some consecutive words of one file."""

    file: str
    text: str
    counts: Counter[str]


class Notes:
    """The search tool: BM25 over passages of a folder's text files."""

    def __init__(self, folder: Path) -> None:
        self._passages = [
            Passage(path.name, " ".join(words[start : start + PASSAGE_WORDS]), Counter(_words(words, start)))
            for path in sorted(folder.glob("*.txt"))
            for words in [path.read_text(encoding="utf-8").split()]
            for start in range(0, len(words), PASSAGE_WORDS)
        ]
        if not self._passages:
            raise SystemExit(f"There is no .txt file in {folder}.")
        self._holding = Counter(word for passage in self._passages for word in passage.counts)

    def search(self, query: str, count: int = 2) -> list[Passage]:
        """The best passages, best first; none where no word occurs."""
        words = set(re.findall(r"\w+", query.lower()))
        ranked = sorted(self._passages, key=lambda passage: -self._score(passage, words))
        return [passage for passage in ranked[:count] if self._score(passage, words) > 0]

    def _score(self, passage: Passage, words: set[str]) -> float:
        """BM25 with k1 = 1.2; passages are about as long as each other."""
        return sum(
            math.log(1 + len(self._passages) / self._holding[word])
            * passage.counts[word]
            * 2.2
            / (passage.counts[word] + 1.2)
            for word in words
            if passage.counts[word]
        )


@dataclass(slots=True)
class Savings:
    """What the endpoint reported, summed over the rounds."""

    rounds: list[dict[str, Any]] = field(default_factory=list)

    def add(self, reply: dict[str, Any]) -> None:
        self.rounds.append({**reply["usage"], **reply["specwire"]})

    def lines(self) -> list[str]:
        def total(name: str) -> int:
            return sum(entry[name] for entry in self.rounds)

        tokens = sum(sum(entry["origins"].values()) for entry in self.rounds)
        passes = max(total("rounds"), 1)
        reused = sum(entry["prompt_tokens_details"]["cached_tokens"] for entry in self.rounds)
        prompt = max(total("prompt_tokens"), 1)
        return [
            f"{len(self.rounds)} rounds of the agent wrote {tokens} tokens in {passes} passes of the large "
            f"model: {tokens - passes} passes and round trips saved, {tokens / passes:.1f} tokens a pass.",
            f"{total('accepted')} of {total('drafted')} drafted tokens were kept "
            f"({100 * total('accepted') / max(total('drafted'), 1):.0f} %).",
            f"{reused} of {prompt} prompt tokens were known from the round before "
            f"({100 * reused / prompt:.0f} %).",
            f"{total('up_bytes')} bytes went up and {total('down_bytes')} down; "
            f"{'some of it was not exact' if any(e['lossy'] for e in self.rounds) else 'all of it exact'}.",
        ]


class Agent:
    """Rounds of reasoning and tool calls until there is an answer."""

    def __init__(self, url: str, key: str, notes: Notes, max_rounds: int) -> None:
        self.savings = Savings()
        self._url = url.rstrip("/")
        self._key = key
        self._notes = notes
        self._max_rounds = max_rounds
        self._model = self._call("/models")["data"][0]["id"]

    def ask(self, question: str) -> str:
        messages = [{"role": "system", "content": SYSTEM}, *EXAMPLE]
        messages.append({"role": "user", "content": f"Question: {question}"})
        searched: set[str] = set()
        for number in range(1, self._max_rounds + 1):
            answer = self._think(messages)
            line = answer.strip().partition("\n")[0].strip()
            print(f"[{number}] model: {line}")
            kind, _, rest = (part.strip() for part in line.partition(":"))
            if (kind.upper() == "ANSWER" and searched) or number == self._max_rounds:
                return rest or line
            # A small model may not keep to the form, or search twice for the same.
            query = rest if kind.upper() == "SEARCH" and rest and rest not in searched else question
            hint = "\nWrite the line that begins with ANSWER." if query in searched else ""
            searched.add(query)
            passages = self._notes.search(query)
            print(f"[{number}] search({query!r}) -> {', '.join(p.file for p in passages) or 'nothing'}")
            found = "\n".join(f"[{p.file}] {p.text}" for p in passages) or "nothing was found."
            messages.append({"role": "assistant", "content": answer})
            messages.append({"role": "user", "content": f"Notes: {found}\nQuestion: {question}{hint}"})
        raise SystemExit("--rounds must be at least 1.")

    def _think(self, messages: list[dict[str, str]]) -> str:
        body = {"model": self._model, "messages": messages, "temperature": 0, "max_tokens": MAX_TOKENS}
        reply = self._call("/chat/completions", body)
        self.savings.add(reply)
        return str(reply["choices"][0]["message"]["content"])

    def _call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        request = urllib.request.Request(
            self._url + path,
            data=json.dumps(body).encode() if body is not None else None,
            headers={"Content-Type": "application/json", "Authorization": f"Bearer {self._key}"},
        )
        try:
            with urllib.request.urlopen(request) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            raise SystemExit(json.load(error)["error"]["message"]) from None
        except urllib.error.URLError as error:
            raise SystemExit(
                f"Nothing answers at {self._url} ({error.reason}). Start `edge-client serve` first."
            ) from None


def _words(words: list[str], start: int) -> list[str]:
    return re.findall(r"\w+", " ".join(words[start : start + PASSAGE_WORDS]).lower())


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("question")
    parser.add_argument("--folder", type=Path, default=Path(__file__).with_name("notes"))
    parser.add_argument("--url", default="http://127.0.0.1:8080/v1")
    parser.add_argument("--key", default="none", help="the endpoint's API key, if it has one")
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args(arguments)
    agent = Agent(options.url, options.key, Notes(options.folder), options.rounds)
    answer = agent.ask(options.question)
    print(f"\n{answer}\n", *agent.savings.lines(), sep="\n")


if __name__ == "__main__":
    main()
