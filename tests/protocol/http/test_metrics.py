"""The metrics port."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from prometheus_client import Metric

from npuserve.options import ServerOptions
from npuserve.protocol.http.metrics import MetricsServer
from npuserve.protocol.prometheus import exposition
from npuserve.server.core import InferenceServer
from tests.protocol.http.fakes import Client, get


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    """A connection to the metrics of a server without models."""
    options = ServerOptions(model_control_mode="explicit", http_address="127.0.0.1", metrics_port=0)
    server = InferenceServer(options)
    metrics = MetricsServer(server, options)
    await metrics.start()
    client = await Client.connect(metrics.port)
    yield client
    await client.close()
    await metrics.stop(1)


async def test_metrics_are_text(client: Client) -> None:
    """In Prometheus' format."""
    reply = await client.ask(get("/metrics"))
    assert reply.status == 200
    assert reply.headers["content-type"].startswith("text/plain; charset=utf-8")
    assert b"# TYPE nv_inference_request_success counter" in reply.body


async def test_other_paths_are_empty(client: Client) -> None:
    """As with Triton, 200."""
    reply = await client.ask(get("/v2/health/live"))
    assert (reply.status, reply.body) == (200, b"")


async def test_other_methods_are_refused(client: Client) -> None:
    """Scraping is reading."""
    assert (await client.ask(get("/metrics", method="PUT"))).status == 405


def test_label_that_is_no_unicode_is_replaced() -> None:
    """One odd label of a model's own metric does not take all metrics away."""
    family = Metric("own", "help", "counter")
    family.add_sample("own", {"label": "a\ud800"}, 1)
    assert b'own{label="a?"} 1' in exposition([family])
