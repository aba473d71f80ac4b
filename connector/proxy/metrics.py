"""What the proxy counts, in Prometheus' text format."""

from __future__ import annotations

from collections import Counter, defaultdict

from kvstore.connector.proxy.instances import Instances

_HELP = {
    "requests": "Requests by what became of them: answered, refused (their own fault), failed (nobody answered),"
    " broken (lost behind the first token), left (the client hung up), turned_away (too many)",
    "prefills": "Requests by their prefill: ticket, no_ticket (answered without), failed, several_prompts (not asked)",
    "retries": "Attempts that failed and were made again elsewhere, by stage and reason",
    "connections_turned_away": "Connections of clients that were closed at once, since there were too many",
    "answered_plainly": "Requests that a prefill instance answered, since no decode instance could",
}


class ProxyMetrics:
    """Counters since the start."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, tuple[tuple[str, str], ...]]] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._observed: Counter[str] = Counter()

    def count(self, name: str, **labels: str) -> None:
        """One more of these."""
        self._counts[name, tuple(sorted(labels.items()))] += 1

    def observe(self, name: str, seconds: float) -> None:
        """One more duration."""
        self._seconds[name] += seconds
        self._observed[name] += 1

    def text(self, instances: Instances) -> str:
        """Everything."""
        lines = []
        for name, words in _HELP.items():
            lines += [f"# HELP kvstore_proxy_{name}_total {words}", f"# TYPE kvstore_proxy_{name}_total counter"]
            lines += [
                f"kvstore_proxy_{name}_total{_labels(labels)} {count}"
                for (counted, labels), count in sorted(self._counts.items())
                if counted == name
            ]
        for name in sorted(self._observed):
            lines.append(f"# TYPE kvstore_proxy_{name}_seconds summary")
            lines.append(f"kvstore_proxy_{name}_seconds_sum {self._seconds[name]:.6f}")
            lines.append(f"kvstore_proxy_{name}_seconds_count {self._observed[name]}")
        for name, words in (("in_service", "Whether it answers checks"), ("in_flight", "Requests that it works on")):
            lines += [f"# HELP kvstore_proxy_{name} {words}", f"# TYPE kvstore_proxy_{name} gauge"]
            for instance in instances.all:
                labels = _labels((("role", instance.role.value), ("url", instance.url)))
                lines.append(f"kvstore_proxy_{name}{labels} {int(getattr(instance, name))}")
        return "\n".join(lines) + "\n"


def _labels(labels: tuple[tuple[str, str], ...]) -> str:
    if not labels:
        return ""
    quoted = ((name, value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")) for name, value in labels)
    return "{" + ",".join(f'{name}="{value}"' for name, value in quoted) + "}"
