"""Models by name or import path, as pure functions of their parameters, and where their layers are."""

from gradveil.models import convnet, lenet, mlp, resnet, vgg, vit  # noqa: F401  (each registers its family)
from gradveil.models.building import build, canonical
from gradveil.models.fronts import FRONTS, Fronted, Imprint, fronted, joined, split_front
from gradveil.models.functional import AddsToLoss, Functional, Mirror, set_buffers
from gradveil.models.imported import is_import_path
from gradveil.models.inputs import Normalize
from gradveil.models.registry import MODELS
from gradveil.models.statistics import batch_norm_statistics
from gradveil.models.structure import Representation, classifier, first_layer, representation

__all__ = [
    "FRONTS",
    "MODELS",
    "AddsToLoss",
    "Fronted",
    "Functional",
    "Imprint",
    "Mirror",
    "Normalize",
    "Representation",
    "batch_norm_statistics",
    "build",
    "canonical",
    "classifier",
    "first_layer",
    "fronted",
    "is_import_path",
    "joined",
    "representation",
    "set_buffers",
    "split_front",
]
