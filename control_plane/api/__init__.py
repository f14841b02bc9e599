"""The operator's API. Knows no Ray: whatever gives it snapshots is passed in."""

from control_plane.api.factory import create_app
from control_plane.api.source import EstimatorSource

__all__ = ["EstimatorSource", "create_app"]
