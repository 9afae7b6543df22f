"""JSON responses, encoded by msgspec."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response


class JSONResponse(Response):
    """A response with a JSON body. Non-finite numbers become null."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Return `content` as JSON."""
        return msgspec.json.encode(content)
