"""`make bench-network`: what the way to the verifier costs, and which way of writing pays on it.

Two hosts (deploy/netlab: network namespaces, or a relay without the privilege) are joined by a link that is
measured before it is used. The verifier runs on one, the edge on the other; both stay up over the arms of a
target, and the arms take turns, one answer each for every seed, in an order of its own. Answers have exactly
the same length. They are greedy unless `--temperature` says otherwise: every arm then writes the same text
and is rejected at the same places, so that arms differ by time alone. In sampled answers a few rejections
more or less, which are luck, make a bigger difference than most choices do; `sampled` arms show their cost.

A seed has its own prompt, which the verifier has read before any arm is measured; its own losses and jitter;
and its own place in the trace and between outages.

Targets: `real` is the built-in small model as it is; `7b` and `70b` are it with the time of a bigger one
(cloud_verifier/emulation.py). An emulated pass takes at least that long; `emulation_overrun` says how much
longer it took, where this machine is too slow for it.

Each side gets half of the cores, as two machines would not slow each other down: a pass on all of them takes
three times as long while the edge drafts ahead on the same ones.

All of it (11 links, 2 targets, 16 arms, 5 seeds, 64 tokens) takes about two hours; `--profiles`, `--targets`,
`--arms`, `--tokens` and `--seeds` measure a part, `--precision int4` another draft. The report is written
anew after every target of every link, so an interrupted run keeps what it has.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import Progress

from cloud_verifier.benchmarks.network_edge import AUTO, AUTO_FIRST, Arm, Sample
from cloud_verifier.benchmarks.network_report import REAL, report, tables
from cloud_verifier.benchmarks.report import write_report
from edge_client.controller import Plan

ROOT = Path(__file__).resolve().parents[2]
TRACES = ROOT.parent / "shared" / "data" / "traces"
SAMPLED = 0.7  # temperature
CLOUD = Plan(cloud_tokens=1 << 20)
ARMS = (
    Arm("cloud_only", CLOUD),
    *(Arm(f"wait_k{k}", Plan(k)) for k in (1, 2, 4, 8)),
    *(Arm(f"ahead_k{k}x{ahead}", Plan(k, ahead)) for k, ahead in ((4, 3), (8, 2), (8, 6), (12, 4))),
    # 98 KB a token: a few of them tell all there is to tell.
    Arm("dense_f16_k4", Plan(4), codec="dense_f16", max_tokens=24),
    Arm("sampled_wait_k8", Plan(8), temperature=SAMPLED),
    Arm("sampled_auto", None, temperature=SAMPLED),
    Arm("beside_k4", Plan(4), beside=True),
    Arm("beside_k8", Plan(8), beside=True),
    Arm(AUTO, None),
    Arm(AUTO_FIRST, None),
)
_WARM = Arm("warm", Plan(4), max_tokens=8)
_APART_S = 14.2  # from seed to seed on the link's clock: a handover of `leo` comes early in an answer
_AUTO_BEFORE = 2  # unmeasured answers of `auto`: it is measured in a conversation, `auto_first` at its start
_STOP_TIMEOUT_S = 15.0


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    names = [arm.name for arm in ARMS]
    chosen = [arm for arm in ARMS if not options.arms or arm.name in options.arms]
    if unknown := set(options.arms) - set(names):
        raise SystemExit(f"No arm {', '.join(sorted(unknown))}; there are {', '.join(names)}.")
    run(options, chosen)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--profiles", nargs="+", default=[], help="links; default: all of the file")
    parser.add_argument("--profile-file", type=Path, help="default: deploy/netlab/profiles.toml")
    parser.add_argument("--traces", type=Path, default=TRACES, help="folder of mahimahi traces")
    parser.add_argument(
        "--targets", nargs="+", default=[REAL, "70b"], help="real, 7b, 70b or BASE_MS,PER_TOKEN_MS"
    )
    parser.add_argument("--arms", nargs="+", default=[], help="default: all")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--seeds", type=int, default=5, help="answers of each arm, each with another prompt")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--prompts", type=Path, help="Spec-Bench questions; default: a built-in set")
    parser.add_argument("--dtype", default="", help="default: what the target's kind asks for")
    parser.add_argument("--precision", default="", help="of the built-in draft; default: the fastest")
    half = max(1, (os.cpu_count() or 2) // 2)
    parser.add_argument("--verifier-threads", type=int, default=half, help="default: half of the cores")
    parser.add_argument("--edge-threads", type=int, default=half, help="default: half of the cores")
    parser.add_argument("--backend", default="auto", help="of the link: auto, netem, tun or relay")
    parser.add_argument("--uncalibrated", action="store_true", help="do not measure the link (says so)")
    parser.add_argument("--out", type=Path, default=Path("bench-results/network.json"))
    return parser


def run(options: argparse.Namespace, arms: Sequence[Arm]) -> dict[str, Any]:
    """Measures; returns the report, which is also written to `options.out`."""
    sys.path.insert(0, str(ROOT / "deploy"))
    netlab: Any = importlib.import_module("netlab")  # no installed package: it runs on bare hosts too

    from cloud_verifier.drafts.builtin import builtin_draft, builtin_target
    from edge_client.experiments.workloads import load_prompts

    profiles = netlab.load_profiles(*([options.profile_file] if options.profile_file else []))
    if unknown := set(options.profiles) - set(profiles):
        raise SystemExit(f"No profile {', '.join(sorted(unknown))}; there are {', '.join(profiles)}.")
    target = builtin_target()
    draft = builtin_draft(options.precision) if options.precision else builtin_draft()
    prompts = [prompt.text for prompt in load_prompts(options.prompts, 1)]
    console = Console()
    links: dict[str, dict[str, Any]] = {}
    names = options.profiles or list(profiles)
    num_answers = len(arms) * options.seeds + (_AUTO_BEFORE if any(arm.name == AUTO for arm in arms) else 0)
    with Progress(console=console) as progress:
        task = progress.add_task("network", total=len(names) * len(options.targets) * num_answers)
        for name in names:
            entry: dict[str, Any] = {"asked": asdict(profiles[name]), "targets": {}}
            links[name] = entry
            progress.update(task, description=f"{name}: measuring the link")
            try:
                with netlab.Link(
                    profiles[name],
                    backend=options.backend,
                    traces=options.traces if options.traces.is_dir() else None,
                    calibrated=not options.uncalibrated,
                ) as link:
                    entry |= {"calibration": link.calibration, "cannot": list(link.cannot)}
                    for kind in options.targets:
                        with _Sides(link, options, target, draft, kind, arms) as sides:
                            # The dictionary fills while it is measured, so what there is gets written.
                            entry["targets"][kind] = measured = sides.facts | {
                                "samples": defaultdict(list),
                                "failed": [],
                            }
                            for arm, sample in _answers(sides, link, options, arms, prompts):
                                progress.update(task, advance=1, description=f"{name}, {kind}: {arm}")
                                if isinstance(sample, Sample):
                                    measured["samples"][arm].append(sample)
                                elif sample:
                                    measured["failed"].append(f"{arm}: {sample}")
                                    progress.console.print(f"{name}, {kind}, {arm}: {sample}")
                        entry["link"] = link.stats()
                        write_report(options.out, report(vars(options), links, draft.name))
            except netlab.LinkError as error:
                entry["left_out"] = str(error)
                progress.console.print(f"{name} is left out: {error}")
            finally:
                write_report(options.out, report(vars(options), links, draft.name))
    done = report(vars(options), links, draft.name)
    for table in tables(done):
        console.print(table)
    console.print(f"Written to {options.out}")
    return done


def _answers(
    sides: _Sides, link: Any, options: argparse.Namespace, arms: Sequence[Arm], prompts: Sequence[str]
) -> Iterator[tuple[str, Sample | str | None]]:
    """One answer after the other, or what went wrong; None for those that only warm up."""
    for auto in (arm for arm in arms if arm.name == AUTO):
        for number in range(_AUTO_BEFORE):
            link.reset()
            sides.try_to_answer(auto, prompts[-1 - number % len(prompts)], seed=1000 + number)
            yield AUTO, None
    for seed in range(options.seeds):
        prompt = prompts[seed % len(prompts)]
        link.reset()
        sides.try_to_answer(_WARM, prompt, seed)
        for arm in random.Random(seed).sample(arms, len(arms)):
            link.reset(seed=seed, begun_s=_APART_S * seed)
            try:
                yield arm.name, sides.answer(arm, prompt, seed=seed)
            except AnswerError as error:
                yield arm.name, str(error)


class AnswerError(Exception):
    """One answer failed; the next may not."""


class _Sides:
    """A verifier on the server's host, an edge on the client's and, where an arm asks for it, one beside the
    verifier. A context manager; everything that it starts ends with it."""

    def __init__(
        self,
        link: Any,
        options: argparse.Namespace,
        target: Path,
        draft: Path,
        kind: str,
        arms: Sequence[Arm],
    ) -> None:
        self._link = link
        self._options = options
        self._target, self._draft, self._kind = target, draft, kind
        self._needs_beside = any(arm.beside for arm in arms)
        self._needs_edge = any(not arm.beside for arm in arms)
        self._stack = contextlib.ExitStack()
        self._edges: dict[bool, subprocess.Popen[str]] = {}
        self.facts: dict[str, Any] = {}

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._log = stack.enter_context(tempfile.TemporaryFile("w+", errors="replace"))
            emulate = [] if self._kind == REAL else ["--emulate-step", self._kind]
            verifier = self._start(
                stack,
                self._link.popen_server,
                "from cloud_verifier.cli import main; main()",
                "serve",
                "--insecure",
                "--insecure",
                f"--listen={self._link.listen_address}",
                f"--target={self._target}",
                f"--dtype={self._options.dtype or _dtype(self._kind)}",
                f"--threads={self._options.verifier_threads}",
                "--log-level=warning",
                *emulate,
            )
            self._link.wait_until_listening(verifier, 300.0)
            edge = "from cloud_verifier.benchmarks.network_edge import main; main()"
            for beside in (False, True):
                if not (self._needs_beside if beside else self._needs_edge):
                    continue
                popen = self._link.popen_server if beside else self._link.popen_client
                address = self._link.listen_address if beside else self._link.server_address
                self._edges[beside] = self._start(
                    stack,
                    popen,
                    edge,
                    f"--draft={self._draft}",
                    f"--address={address}",
                    f"--threads={self._options.edge_threads}",
                )
                self._read(beside)
                self.facts = self._ask(beside, {"do": "describe"})
                self._ask(beside, self._job(_WARM, "Hello", 0))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def answer(self, arm: Arm, prompt: str, seed: int) -> Sample:
        """Raises AnswerError with what the edge said, RuntimeError when it has ended."""
        beside = arm.beside if self._needs_edge else self._needs_beside
        return Sample(**self._ask(beside, self._job(arm, prompt, seed)))

    def try_to_answer(self, arm: Arm, prompt: str, seed: int) -> None:
        """One that nobody measures; where the link stalls it may fail."""
        with contextlib.suppress(AnswerError):
            self.answer(arm, prompt, seed)

    def _job(self, arm: Arm, prompt: str, seed: int) -> dict[str, Any]:
        tokens = self._options.tokens
        return {
            "do": "answer",
            "arm": arm.name,
            "plan": None if arm.plan is None else asdict(arm.plan),
            "codec": arm.codec,
            "prompt": prompt,
            "seed": seed,
            "max_tokens": min(tokens, arm.max_tokens or tokens),
            "temperature": self._options.temperature if arm.temperature is None else arm.temperature,
        }

    def _ask(self, beside: bool, job: dict[str, Any]) -> dict[str, Any]:
        pipe = self._edges[beside].stdin
        if pipe is None:
            raise RuntimeError("the edge has no input")
        pipe.write(json.dumps(job) + "\n")
        pipe.flush()
        return self._read(beside)

    def _read(self, beside: bool) -> dict[str, Any]:
        output = self._edges[beside].stdout
        line = output.readline() if output is not None else ""
        if not line:
            self._log.seek(0)
            raise RuntimeError("\n".join(["The edge ended.", *self._log.read().splitlines()[-8:]]))
        reply = dict(json.loads(line))
        if "error" in reply:
            raise AnswerError(reply["error"])
        return reply

    def _start(
        self, stack: contextlib.ExitStack, popen: Any, code: str, *words: str
    ) -> subprocess.Popen[str]:
        process: subprocess.Popen[str] = popen(
            [sys.executable, "-c", code, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=ROOT,
        )
        stack.callback(_stop, process)
        return process


def _dtype(kind: str) -> str:
    """An emulated target's numbers do not matter, but its passes must be done in time."""
    return "auto" if kind == REAL else "bfloat16"


def _stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.communicate(timeout=_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


if __name__ == "__main__":
    main()
