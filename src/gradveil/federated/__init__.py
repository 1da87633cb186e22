"""Federated training in this process: who holds what, rounds of FedSGD and FedAvg, their cost, and a tap on them."""

from gradveil.engine import Runner
from gradveil.federated.case import Training, make_training
from gradveil.federated.partition import PARTITIONS, partition
from gradveil.federated.rounds import (
    Federation,
    Quality,
    Round,
    RoundExchange,
    State,
    as_delta,
    average,
    evaluate,
    participants,
    server_step,
    why_unusable,
)
from gradveil.federated.run import TrainingRecord, data_of, read_training, run_training
from gradveil.federated.tap import Tap

__all__ = [
    "PARTITIONS",
    "Federation",
    "Quality",
    "Round",
    "RoundExchange",
    "Runner",
    "State",
    "Tap",
    "Training",
    "TrainingRecord",
    "as_delta",
    "average",
    "data_of",
    "evaluate",
    "make_training",
    "participants",
    "partition",
    "read_training",
    "run_training",
    "server_step",
    "why_unusable",
]
