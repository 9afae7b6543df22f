"""Tests for the metrics page of several replicas, which need no cluster."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from service.telemetry.metrics import Metrics
from service.telemetry.pages import merged


def page(number: int) -> str:
    metrics = Metrics("tiny")
    for _ in range(number):
        metrics.count_http("/infer {a b}", "POST", 200)
    return metrics.text().decode()


def test_each_sample_has_the_name_of_its_replica():
    families = [*text_string_to_metric_families(merged({"a": page(1), "b": page(2)}, "replica"))]
    assert len({family.name for family in families}) == len(families)
    (requests,) = [family for family in families if family.name == "mindie_mm:http_requests"]
    counts = {one.labels["replica"]: one.value for one in requests.samples if one.name.endswith("_total")}
    assert counts == {"a": 1, "b": 2}
    assert all("replica" in one.labels for family in families for one in family.samples)
    assert all(family.documentation for family in families)
