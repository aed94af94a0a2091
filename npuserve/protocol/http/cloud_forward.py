"""Requests of a cloud platform's endpoint, answered by the ordinary application or refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.responses import Response

from npuserve.protocol.http.reply import error_body

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from npuserve.protocol.http.cloud_mime import BinaryMime


class Forward:
    """An ASGI response that lets the application answer another path.

    Args:
        application: what `routes.create_application` made.
        path: where the request really goes.
        mime: how the platform marks binary bodies.
    """

    def __init__(self, application: ASGIApp, path: str, mime: BinaryMime) -> None:
        self._application = application
        self._path = path
        self._mime = mime

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application with the path and headers that it knows."""
        inner = {
            **scope,
            "path": self._path,
            "raw_path": self._path.encode(),
            "headers": self._mime.to_protocol(scope["headers"]),
        }

        async def translated(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = self._mime.to_platform(message.get("headers", ()))
                message = {**message, "headers": headers}
            await send(message)

        await self._application(inner, receive, translated)


def error_response(status: int, text: str) -> Response:
    """An error that the endpoint itself finds."""
    return Response(error_body(text), status, media_type="application/json")
