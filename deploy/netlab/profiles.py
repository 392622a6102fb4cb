"""What a link should be: profiles out of a TOML file, checked, as plain values.

Units: milliseconds, megabits a second of whole IP packets (headers count), packets, bytes, seconds.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROFILES_FILE = Path(__file__).parent / "profiles.toml"


@dataclass(frozen=True, slots=True)
class BurstLoss:
    """Gilbert-Elliott loss: two states, a step of the chain before each packet (netem's `gemodel`)."""

    enter: float  # P(good -> bad)
    leave: float  # P(bad -> good); 1 / leave is the mean burst in packets
    loss_bad: float = 1.0
    loss_good: float = 0.0

    def __post_init__(self) -> None:
        for name in ("enter", "leave", "loss_bad", "loss_good"):
            _check(name, getattr(self, name), 0.0, 1.0)

    @property
    def mean(self) -> float:
        """Long-run share of packets lost."""
        moves = self.enter + self.leave
        bad = self.enter / moves if moves else 0.0
        return bad * self.loss_bad + (1 - bad) * self.loss_good


@dataclass(frozen=True, slots=True)
class Outages:
    """Scheduled times without service, such as the handover of a low-orbit satellite.

    `hold`: the sender keeps its packets until service returns (its queue may overflow); otherwise what
    arrives in an outage is lost.
    """

    every_s: float
    length_s: float
    hold: bool = False

    def __post_init__(self) -> None:
        _check("every_s", self.every_s, 1e-3, 1e6)
        _check("length_s", self.length_s, 0.0, self.every_s * 0.9)


@dataclass(frozen=True, slots=True)
class Direction:
    """One direction of a link. `rate_mbit` and `trace` are exclusive; neither means unlimited."""

    delay_ms: float
    jitter_ms: float = 0.0  # uniform in +-jitter_ms around delay_ms
    reorder: bool = False  # False: jitter never lets a packet overtake another
    rate_mbit: float | None = None
    trace: str | None = None  # file name inside the traces folder
    queue_packets: int | None = None
    queue_bytes: int | None = None
    loss: float = 0.0
    burst: BurstLoss | None = None

    def __post_init__(self) -> None:
        _check("delay_ms", self.delay_ms, 0.0, 60_000.0)
        _check("jitter_ms", self.jitter_ms, 0.0, self.delay_ms)
        _check("loss", self.loss, 0.0, 1.0)
        if self.rate_mbit is not None:
            _check("rate_mbit", self.rate_mbit, 1e-3, 1e5)
            if self.trace is not None:
                raise ValueError("rate_mbit and trace: give one of them")
        for name in ("queue_packets", "queue_bytes"):
            if getattr(self, name) is not None:
                _check(name, getattr(self, name), 1, 1 << 40)
        if self.trace is not None and Path(self.trace).name != self.trace:
            raise ValueError(f"trace: {self.trace!r} must be a file name inside the traces folder")


@dataclass(frozen=True, slots=True)
class Profile:
    """A link and how closely it must be met; `up` is from the client to the server."""

    name: str
    rtt_ms: float
    up: Direction
    down: Direction
    outages: Outages | None = None
    mtu: int = 1500  # bytes
    rtt_tolerance_ms: float | None = None  # tighter than the default of max(10 %, 2 ms)
    about: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        _check("mtu", self.mtu, 576, 65_535)
        if abs(self.up.delay_ms + self.down.delay_ms - self.rtt_ms) > 1e-6:
            raise ValueError("delay_ms: the delays of both directions must add up to rtt_ms")

    def to_table(self) -> dict[str, Any]:
        """The table that `parse_profile` turns back into this profile."""
        table: dict[str, Any] = _without_none(dataclasses.asdict(self))
        del table["name"]
        return table


def parse_profile(name: str, table: Mapping[str, Any]) -> Profile:
    """One `[NAME]` table of the file. A direction without `delay_ms` gets half of `rtt_ms`.

    Raises:
        ValueError: an unknown key, a missing one or a bad value; the text names profile and key.
    """
    try:
        values = dict(table)
        rtt_ms = float(values.pop("rtt_ms"))
        directions = {}
        for side in ("up", "down"):
            direction = {"delay_ms": rtt_ms / 2, **values.pop(side, {})}
            if "burst" in direction:
                direction["burst"] = _build(BurstLoss, direction["burst"], f"{side}.burst")
            directions[side] = _build(Direction, direction, side)
        if "outages" in values:
            values["outages"] = _build(Outages, values["outages"], "outages")
        return Profile(**_known(Profile, {"name": name, "rtt_ms": rtt_ms, **directions, **values}, ""))
    except KeyError as error:
        raise ValueError(f"profile {name!r}: key {error.args[0]!r} is missing") from error
    except (TypeError, ValueError) as error:
        raise ValueError(f"profile {name!r}: {error}") from error


def load_profiles(path: Path = PROFILES_FILE) -> dict[str, Profile]:
    """All profiles of a TOML file, by name.

    Raises:
        ValueError: the file is not TOML, or a profile is bad.
    """
    with path.open("rb") as file:
        return {name: parse_profile(name, table) for name, table in tomllib.load(file).items()}


def _build(kind: Any, table: Mapping[str, Any], where: str) -> Any:
    return kind(**_known(kind, table, where))


def _known(kind: Any, table: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    names = {field.name for field in dataclasses.fields(kind)}
    unknown = sorted(set(table) - names)
    if unknown:
        raise ValueError(
            f"unknown key {unknown[0]!r}{f' in {where}' if where else ''}; known: {sorted(names)}"
        )
    return table


def _check(name: str, value: float, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ValueError(f"{name} = {value!r} is not between {low:g} and {high:g}")


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return value
