"""Traces: what every depth of a model would have said, recorded once for each text."""

from sde_gym.traces.schema import SCHEMA_VERSION, TraceSettings
from sde_gym.traces.store import TraceSet, TraceWriter, load_traces

__all__ = ["SCHEMA_VERSION", "TraceSet", "TraceSettings", "TraceWriter", "load_traces"]
