"""`python -m service`: serves with the settings of the environment (MINDIE_MM_<FIELD>)."""

from __future__ import annotations

import logging
import sys

from mindie_mm.config import EngineConfig, ServiceConfig, WorkerConfig, environment
from mindie_mm.errors import MindieMMError
from service.server import serve

logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
try:
    serve(
        WorkerConfig(**environment(WorkerConfig) | {"engine": EngineConfig(**environment(EngineConfig))}),
        ServiceConfig(**environment(ServiceConfig)),
    )
except MindieMMError as error:
    sys.exit(str(error))
