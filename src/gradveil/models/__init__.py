"""Models by name or import path, as pure functions of their parameters, and where their layers are."""

from gradveil.models import convnet, lenet, mlp, resnet, vgg, vit  # noqa: F401  (each registers its family)
from gradveil.models.building import MODELS, Normalize, build, canonical, is_import_path
from gradveil.models.calls import (
    SeveralInputs,
    arguments_of,
    as_pictures,
    joined_inputs,
    logits_of,
    returned_tensors,
    tensors_of,
    trained_parameters,
    twice_differentiable,
    with_logits,
    zeros_like_one,
)
from gradveil.models.features import FeatureHead, PublicFeatures, encoded
from gradveil.models.fronts import Fronted, Imprint, fronted, fronted_spec, split_front
from gradveil.models.functional import AddsToLoss, Functional, Mirror, set_buffers
from gradveil.models.subspace import Subspace
from gradveil.models.watch import (
    Representation,
    batch_norm_statistics,
    classifier,
    first_layer,
    layers_in_order,
    representation,
    watched,
)

__all__ = [
    "MODELS",
    "AddsToLoss",
    "FeatureHead",
    "Fronted",
    "Functional",
    "Imprint",
    "Mirror",
    "Normalize",
    "PublicFeatures",
    "Representation",
    "SeveralInputs",
    "Subspace",
    "arguments_of",
    "as_pictures",
    "batch_norm_statistics",
    "build",
    "canonical",
    "classifier",
    "encoded",
    "first_layer",
    "fronted",
    "fronted_spec",
    "is_import_path",
    "joined_inputs",
    "layers_in_order",
    "logits_of",
    "representation",
    "returned_tensors",
    "set_buffers",
    "split_front",
    "tensors_of",
    "trained_parameters",
    "twice_differentiable",
    "watched",
    "with_logits",
    "zeros_like_one",
]
