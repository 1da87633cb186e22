"""Federated training in this process: who holds what, rounds of FedSGD and FedAvg, their cost, and a tap on them."""

from gradveil.federated.case import Training, make_training
from gradveil.federated.evaluate import Quality, evaluate
from gradveil.federated.local import Answer, local_training, running_statistics
from gradveil.federated.partition import PARTITIONS, partition
from gradveil.federated.rounds import Federation, Round
from gradveil.federated.run import data_of, read_training, run_training
from gradveil.federated.server import State, as_difference, average, complaint, participants, stepped
from gradveil.federated.tap import Exchange, Tap
from gradveil.federated.together import Runner

__all__ = [
    "PARTITIONS",
    "Answer",
    "Exchange",
    "Federation",
    "Quality",
    "Round",
    "Runner",
    "State",
    "Tap",
    "Training",
    "as_difference",
    "average",
    "complaint",
    "data_of",
    "evaluate",
    "local_training",
    "make_training",
    "participants",
    "partition",
    "read_training",
    "run_training",
    "running_statistics",
    "stepped",
]
