"""The adversary: what it knows and may do, what it sees, and that on disk."""

from gradveil.threat.model import THREATS, Knowledge, ThreatModel, threat_model
from gradveil.threat.observation import Observation, observe
from gradveil.threat.storage import broadcasts, load_observations, save_observations

__all__ = [
    "THREATS",
    "Knowledge",
    "Observation",
    "ThreatModel",
    "broadcasts",
    "load_observations",
    "observe",
    "save_observations",
    "threat_model",
]
