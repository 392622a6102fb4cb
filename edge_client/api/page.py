"""The chat page: three files beside the code, served as they are."""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from edge_client.api.errors import ApiError
from edge_client.api.http import error_response

# path -> file, media type
_FILES = {
    "/": ("index.html", "text/html"),
    "/app.css": ("app.css", "text/css"),
    "/app.js": ("app.js", "text/javascript"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
_HEADERS = {
    # Nothing but this page's own files, and no page may frame it.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_routes(check_host: Callable[[Request], None]) -> list[Route]:
    return [Route(path, _serve(name, kind, check_host)) for path, (name, kind) in _FILES.items()]


def _serve(name: str, kind: str, check_host: Callable[[Request], None]) -> Callable[[Request], Response]:
    def serve(request: Request) -> Response:
        try:
            check_host(request)
        except ApiError as error:
            return error_response(error)
        content = resources.files("edge_client.web").joinpath(name).read_bytes()
        return Response(content, media_type=kind, headers=_HEADERS)

    return serve
