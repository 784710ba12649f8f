"""Energy of the processor packages, where the machine reports it (Linux powercap); a GPU's is not in it."""

from __future__ import annotations

from pathlib import Path

ROOT = Path("/sys/class/powercap")


class Energy:
    """Joules since it was made, or None where nothing is reported. Counters that wrap are taken to do so once."""

    def __init__(self, root: Path = ROOT) -> None:
        # Others (the platform, cores, memory) contain packages or are contained in them.
        zones = [zone for zone in sorted(root.glob("intel-rapl:*")) if self._name(zone).startswith("package")]
        self.zones = [zone for zone in zones if self._read(zone / "energy_uj") is not None]
        self.begun = self._now()

    @staticmethod
    def _name(zone: Path) -> str:
        try:
            return (zone / "name").read_text().strip()
        except OSError:
            return ""

    @staticmethod
    def _read(path: Path) -> int | None:
        try:
            return int(path.read_text())
        except (OSError, ValueError):
            return None

    def _now(self) -> list[int]:
        return [self._read(zone / "energy_uj") or 0 for zone in self.zones]

    def joules(self) -> float | None:
        if not self.zones:
            return None
        total = 0
        for zone, before, now in zip(self.zones, self.begun, self._now(), strict=True):
            total += now - before if now >= before else now - before + (self._read(zone / "max_energy_range_uj") or 0)
        return total / 1e6
