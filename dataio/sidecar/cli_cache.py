"""The cache and its prefetching as lines of text.

Invariant: what was foreseen stands beside what was needed: how many announced reads were there in time, and how far their
need was from its forecast. Failure behaviour: what an older daemon does not say is left out.
"""

from __future__ import annotations

from typing import Any

from rich.text import Text

from headrace.dataio.core.limits import format_bytes

State = dict[str, Any]


def lines(state: State) -> list[Text]:
    """Of tiers, where there are several; of prefetching, once something was announced; of jobs that wait for the store."""
    return [*_tiers(state["cache"]), *_prefetch(state.get("prefetch", {})), *_fetching(state.get("fetching", {}))]


def _tiers(cache: State) -> list[Text]:
    tiers = cache.get("tiers", [])
    return [Text(_tier(number, tier, cache)) for number, tier in enumerate(tiers) if len(tiers) > 1]


def _tier(number: int, tier: State, cache: State) -> str:
    text = f"  tier {number}  {format_bytes(tier['used_bytes'])} of {format_bytes(tier['budget_bytes'])} "
    text += f"in {_clean(tier['directory'])}" + (f" ({_clean(tier['medium'])})" if "medium" in tier else "")
    if "hit_bytes" in tier:
        asked = cache.get("asked_bytes", 0)
        share = f" ({100 * tier['hit_bytes'] / asked:.1f} % of what was asked for)" if asked else ""
        text += f", {format_bytes(tier['hit_bytes'])} hits{share}"
    return text + (", PAUSED: it cannot be written" if tier["paused"] else "")


def _prefetch(found: State) -> list[Text]:
    ready, late = found.get("reads_ready", 0), found.get("reads_late", 0)
    if not ready + late:
        return []
    text = (
        f"ahead   {ready} of {ready + late} reads were there in time ({100 * ready / (ready + late):.1f} %); "
        f"{format_bytes(found['window_bytes'])} may be in flight, {found['hedged']} asked for twice"
    )
    if found.get("forecasts"):
        error, worst = found["forecast_error_median_s"], found["forecast_error_p95_s"]
        when = "later" if error > 0 else "sooner"
        text += f"; needed {abs(error):.2g} s {when} than foreseen, 95 % within {worst:.2g} s"
    return [Text(text)]


def _fetching(jobs: State) -> list[Text]:
    shown = sorted(jobs.items(), key=lambda entry: -entry[1]["waiting"])[:6]
    text = ", ".join(
        f"{_clean(name)} {turn['connections']} ({format_bytes(turn['bytes_in_flight'])}), {turn['waiting']} waiting"
        for name, turn in shown
    )
    return [Text(f"stores  {text}")] if text else []


def _clean(text: object) -> str:
    return "".join(c for c in str(text) if c.isprintable())
