"""Flower sends nothing home from a test, and the environment says nothing to its nodes."""

from __future__ import annotations

import os

os.environ.pop("GRADVEIL_NODE_CONFIG", None)
os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
