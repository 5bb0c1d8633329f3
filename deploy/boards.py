"""Writer of a board for Grafana, and of a scrape and alerts for Prometheus: ``python deploy/boards.py``.

Panels take their descriptions from the table of metrics in ``docs/serving.md``; unknown metrics are an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).parents[1]
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
HEADER = "# Written by deploy/boards.py.\n"


class Panel(NamedTuple):
    """A panel: its queries by legend, the unit of their values, its width of 24, and its kind."""

    title: str
    queries: dict[str, str]
    unit: str = "short"
    width: int = 12
    kind: str = "timeseries"


class Alert(NamedTuple):
    """An alert: when it fires, after how long, what it says, and what to do."""

    name: str
    query: str
    wait: str
    severity: str
    summary: str
    fix: str


def _per(sums: str, counts: str) -> str:
    """Return the query of a mean by model."""
    return f"sum by (model) (rate({sums}{{M}}[W])) / sum by (model) (rate({counts}{{M}}[W]))"


# In queries, {S} and {M} are the services and models that were chosen above the board, and [W] is Grafana's window.
STEPS = {"queue": "queue", "inputs": "compute_input", "compute": "compute_infer", "outputs": "compute_output"}
BOARD = {
    "Is it well?": [
        Panel("Ready", {"": "min(shoal_ready{S})"}, width=4, kind="stat"),
        Panel("Ready models", {"{{model}}": "min by (model) (shoal_model_ready{M})"}, width=8, kind="state-timeline"),
        Panel("Restarts", {"{{kind}}": "sum by (kind) (increase(shoal_restarts_total{S}[W]))"}),
        Panel("Requests without an answer", {
            "{{outcome}}": 'sum by (outcome) (rate(shoal_requests_total{M,outcome!="answered"}[W]))'
            " / ignoring (outcome) group_left sum(rate(shoal_requests_total{M}[W]))"
        }, "percentunit"),
        Panel("Canaries", {"{{model}}": "max by (model) (shoal_canary_seconds{M})"}, "s"),
    ],
    "Who asks?": [
        Panel("Requests by model", {"{{model}}": "sum by (model) (rate(shoal_requests_total{M}[W]))"}, "reqps"),
        Panel("Requests by key", {"{{key}}": "sum by (key) (rate(shoal_key_requests_total{S}[W]))"}, "reqps"),
        Panel("Requests in flight", {"{{model}}": "sum by (model) (shoal_in_flight{M})"}),
        Panel("Client errors", {"{{kind}}": "sum by (kind) (rate(shoal_refusals_total{S}[W]))"}, "reqps"),
    ],
    "How long do they wait, and for what?": [
        Panel("Queue of the service", {"{{model}}": _per("shoal_queue_seconds_sum", "shoal_queue_seconds_count")}, "s"),
        Panel("Steps in Triton", {
            f"{{{{model}}}}: {step}": _per(f"nv_inference_{name}_duration_us", "nv_inference_request_success")
            for step, name in STEPS.items()
        }, "µs"),
    ],
    "Language models": [
        Panel("First answer", {
            "{{model}}": _per("shoal_first_answer_seconds_sum", "shoal_first_answer_seconds_count")
        }, "s", 8),
        Panel("Tokens per second", {
            "{{model}} {{kind}}": "sum by (model, kind) (rate(shoal_tokens_total{M}[W]))"
        }, width=8),
        Panel("Streams in flight", {"{{model}}": "sum by (model) (shoal_streams{M})"}, width=8),
    ],
    "The machine": [
        Panel("Memory in use", {
            "{{instance}}": "nv_cpu_memory_used_bytes{S} / nv_cpu_memory_total_bytes{S}",
            "{{instance}} {{gpu_uuid}}": "nv_gpu_memory_used_bytes{S} / nv_gpu_memory_total_bytes{S}",
        }, "percentunit"),
        Panel("Processors in use", {"{{instance}}": "nv_cpu_utilization{S}"}, "percentunit"),
    ],
}  # fmt: skip

BY = "sum by (instance, model)"
SHARE = f"{BY} (rate(shoal_requests_total{{outcome=~'%s'}}[5m])) / {BY} (rate(shoal_requests_total[5m])) > 0.05"
QUEUE = f"{BY} (rate(shoal_queue_seconds_sum[5m])) / {BY} (rate(shoal_queue_seconds_count[5m])) > 1"
PLACE, MODEL = "{{ $labels.instance }}", "{{ $labels.model }} at {{ $labels.instance }}"
PART, NUMBER = "{{ $value | humanizePercentage }}", '{{ printf "%.0f" $value }}'
ALERTS = [
    Alert("ShoalDown", 'up{job="shoal"} == 0', "1m", "critical", f"{PLACE} gives no metrics.",
          "Read the end of its log, then start it: shoal serve REPOSITORY"),
    Alert("ShoalNotReady", "shoal_model_ready == 0", "1m", "critical", f"{MODEL} is not ready.",
          f"For the reason: shoal status {PLACE}"),
    Alert("ShoalRestarts", "sum by (instance) (increase(shoal_restarts_total[10m])) >= 3", "0s", "warning",
          f"{PLACE} was restarted {NUMBER} times in 10 minutes.", "Its log has the model and cause of each restart."),
    Alert("ShoalModelMemory", "sum by (instance) (increase(shoal_restarts_total{kind='memory'}[10m])) > 0", "0s",
          "warning", f"A model at {PLACE} took more memory than --model-memory-mib, and was restarted.",
          "Its log names the model. If it needs that much: shoal serve REPOSITORY --model-memory-mib MORE"),
    Alert("ShoalMachineMemory", "nv_cpu_memory_used_bytes / nv_cpu_memory_total_bytes > 0.9", "5m", "warning",
          f"{PART} of the memory at {PLACE} is in use.",
          "Serve fewer instances, or limit the models' processes: shoal serve REPOSITORY --model-memory-mib MIB"),
    Alert("ShoalRefusals", SHARE % "refused", "5m", "warning", f"{MODEL} refuses {PART} of its requests.",
          "Where shoal_refusals_total counts them as limit, a key is at its limit: shoal keys list --file"
          " KEYS. Else the model is too slow for so many: shoal bench REPOSITORY --report"),
    Alert("ShoalErrors", SHARE % "failed|lost", "5m", "warning", f"{PART} of the requests to {MODEL} fail.",
          "The service's log has the error of each request."),
    Alert("ShoalQueue", QUEUE, "5m", "warning", f"Requests to {MODEL} wait {{{{ $value | humanizeDuration }}}}.",
          "For what limits the model: shoal bench REPOSITORY --report"),
    Alert("ShoalUnknownKeys", "sum by (instance) (increase(shoal_refusals_total{kind='key'}[10m])) > 20", "0s",
          "warning", f"{PLACE} refused {NUMBER} requests without a valid key in 10 minutes.",
          "The file of shoal serve --audit has the reason for each. For keys that expire: shoal keys list --file KEYS"),
    Alert("ShoalKeysDamaged", "shoal_keys_damaged == 1", "1m", "warning",
          f"The file of keys of {PLACE} is damaged or missing. The keys stay as they were.",
          "For what is wrong: shoal keys list --file KEYS. Then correct the file, or restore a copy."),
]  # fmt: skip
SCRAPE = """\
global: { scrape_interval: 15s, evaluation_interval: 15s }
rule_files: [alerts.yaml]
scrape_configs:
  - job_name: shoal
    static_configs:
      - targets: ["127.0.0.1:8002"]  # the metrics port of each service
    # With --keys, what `shoal keys new prometheus --may metrics` printed:
    # authorization: { credentials_file: /etc/prometheus/shoal.key }
    # With --tls-cert:
    # scheme: https
    # tls_config: { ca_file: /etc/prometheus/ca.pem }
"""


def read_metrics(page: str) -> dict[str, str]:
    """Return the meaning of each metric in the tables of a page, without marks."""
    rows = re.findall(r"^\| (`(?:shoal|nv)_.*?) \| (.*) \|$", page, re.MULTILINE)
    plain = {cell: re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", meaning).replace("`", "") for cell, meaning in rows}
    return {name: meaning for cell, meaning in plain.items() for name in re.findall(r"`(\w+)", cell)}


def find_metrics(query: str) -> list[str]:
    """Return the names of the metrics in a query; of summaries, without the endings of their samples."""
    return [re.sub("(seconds)_(sum|count)$", r"\1", name) for name in re.findall(r"\b(?:shoal|nv)_\w+", query)]


def write_panel(panel: Panel, metrics: dict[str, str]) -> dict[str, Any]:
    """Return a panel as Grafana has it, without its place."""
    targets = []
    for letter, (legend, query) in zip("ABCD", panel.queries.items(), strict=False):
        chosen = query.replace("{S}", '{instance=~"$instance"}').replace("[W]", "[$__rate_interval]")
        chosen = chosen.replace("{M", '{instance=~"$instance",model=~"$model"')
        targets.append({"refId": letter, "datasource": SOURCE, "expr": chosen, "legendFormat": legend})
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.kind != "timeseries":
        states = {"0": {"text": "not ready", "color": "red"}, "1": {"text": "ready", "color": "green"}}
        defaults["mappings"] = [{"type": "value", "options": states}]
    meanings = dict.fromkeys(metrics[name] for query in panel.queries.values() for name in find_metrics(query))
    return {
        "type": panel.kind, "title": panel.title, "description": "\n\n".join(meanings), "datasource": SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []}, "targets": targets,
    }  # fmt: skip


def write_panels(metrics: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Yield the panels, under a row for each question."""
    y = 0
    for question, panels in BOARD.items():
        yield {"type": "row", "title": question, "panels": [], "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}}
        x, y = 0, y + 1
        for panel in panels:
            if x == 24:
                x, y = 0, y + 8
            yield write_panel(panel, metrics) | {"gridPos": {"x": x, "y": y, "w": panel.width, "h": 8}}
            x += panel.width
        y += 8


def write_board(metrics: dict[str, str]) -> str:
    """Return the board, in JSON that Grafana imports."""
    labels = {"instance": "shoal_ready", "model": 'shoal_model_ready{instance=~"$instance"}'}
    variables: list[dict[str, Any]] = [{"name": "datasource", "type": "datasource", "query": "prometheus"}]
    variables += [
        {
            "name": name, "type": "query", "datasource": SOURCE, "query": f"label_values({metric}, {name})",
            "refresh": 2, "sort": 1, "multi": True, "includeAll": True, "allValue": ".+",
            "current": {"text": ["All"], "value": ["$__all"]},
        } for name, metric in labels.items()
    ]  # fmt: skip
    panels = [panel | {"id": number} for number, panel in enumerate(write_panels(metrics), 1)]
    board = {
        "uid": "shoal", "title": "shoal", "schemaVersion": 39, "refresh": "30s", "panels": panels,
        "time": {"from": "now-1h", "to": "now"}, "templating": {"list": variables},
    }  # fmt: skip
    return json.dumps(board, indent=1, ensure_ascii=False) + "\n"


def write_files() -> dict[Path, str]:
    """Return the text of each file."""
    metrics, here = read_metrics((ROOT / "docs" / "serving.md").read_text(encoding="utf-8")), Path(__file__).parent
    rules = [
        {
            "alert": each.name, "expr": each.query, "for": each.wait, "labels": {"severity": each.severity},
            "annotations": {"summary": each.summary, "description": each.fix},
        } for each in ALERTS
    ]  # fmt: skip
    alerts = yaml.safe_dump({"groups": [{"name": "shoal", "rules": rules}]}, sort_keys=False, width=90)
    return {
        here / "grafana" / "shoal.json": write_board(metrics),
        here / "prometheus" / "alerts.yaml": HEADER + alerts,
        here / "prometheus" / "scrape.yaml": HEADER + SCRAPE,
    }


if __name__ == "__main__":
    for path, text in write_files().items():
        path.write_text(text, encoding="utf-8")
