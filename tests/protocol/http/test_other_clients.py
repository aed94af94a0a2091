"""Clients of other kinds: curl and Node's fetch."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from tests.protocol.http.conftest import Start
from tests.protocol.http.fakes import infer_binary, infer_json

NODE = """
const url = process.argv[1];
const values = [1.5, 2.5];
const body = JSON.stringify(
  {inputs: [{name: "INPUT0", datatype: "FP32", shape: [2], data: values}]});
const stream = () => new ReadableStream({start(controller) {
  for (const part of [body.slice(0, 20), body.slice(20)])
    controller.enqueue(new TextEncoder().encode(part));
  controller.close();
}});
for (const init of [{body}, {body: stream(), duplex: "half"}, {body}]) {
  const reply = await fetch(url, {method: "POST", ...init});
  console.log(reply.status, (await reply.json()).outputs[0].data.join());
}
"""


async def run(*command: str) -> str:
    """Standard output of a command that must succeed."""
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    assert process.returncode == 0
    return output.decode()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize(
    "options",
    [
        ("--http1.1",),
        ("--http1.0",),
        ("--http2",),
        ("--compressed",),
        ("-H", "Transfer-Encoding: chunked"),
        ("-H", "Expect: 100-continue"),
    ],
    ids=" ".join,
)
async def test_curl(start: Start, tmp_path: Path, options: tuple[str, ...]) -> None:
    """Every way curl has to send a large body."""
    running = await start()
    head, blob = infer_binary(bytes(range(256)) * 4096)
    source, target = tmp_path / "request", tmp_path / "reply"
    await asyncio.to_thread(source.write_bytes, head + blob)
    status = await run(
        "curl", "-sS", *options, "--data-binary", f"@{source}", "-o", str(target),
        "-w", "%{http_code}", "-H", f"Inference-Header-Content-Length: {len(head)}",
        f"http://127.0.0.1:{running.http.port}/v2/models/echo/infer",
    )  # fmt: skip
    assert status == "200"
    assert (await asyncio.to_thread(target.read_bytes)).endswith(blob)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
async def test_curl_with_json(start: Start) -> None:
    """With the content type curl sends by itself."""
    running = await start()
    output = await run(
        "curl", "-sS", "-d", infer_json([1.5]).decode(),
        f"http://127.0.0.1:{running.http.port}/v2/models/echo/infer",
    )  # fmt: skip
    assert json.loads(output)["outputs"][0]["data"] == [1.5]


@pytest.mark.skipif(shutil.which("node") is None, reason="Node is not installed")
async def test_fetch_of_node(start: Start) -> None:
    """Bodies with a length and streamed ones, on one connection."""
    running = await start()
    url = f"http://127.0.0.1:{running.http.port}/v2/models/echo/infer"
    output = await run("node", "--input-type=module", "-e", NODE, url)
    assert output.splitlines() == ["200 1.5,2.5"] * 3
