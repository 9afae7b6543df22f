"""JSON answers, encoded by msgspec."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response


class JSONResponse(Response):
    """A JSON body; non-finite numbers become null, as JSON has none."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The body's bytes."""
        return msgspec.json.encode(content)
