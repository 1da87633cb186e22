"""Small random checkpoints in layouts that others published, listed by hand, and what they draw by plain means."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

Tensors = dict[str, Tensor]
BIGGAN_BLOCKS = [(16, 16), (16, 16), (16, 16), (16, 8), (8, 8), (8, 4), (4, 4), (4, 2), (2, 2), (2, 1)]
"""Features in and out of each block for 128x128, in multiples of the width; every second block doubles the side."""


def biggan(*, width: int = 4, latent: int = 3, classes: int = 5) -> Tensors:
    """BigGAN-deep for 128x128: names and shapes of ``pytorch-pretrained-biggan``."""
    rng, found = torch.Generator().manual_seed(1), dict[str, Tensor]()

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng)

    def spectral(name: str, *shape: int, bias: bool = False) -> None:
        weight = normal(*shape)
        left, _, right = torch.linalg.svd(weight.flatten(1), full_matrices=False)
        found.update(
            {
                f"{name}.weight_orig": weight,
                f"{name}.weight_u": left[:, 0].clone(),
                f"{name}.weight_v": right[0].clone(),
            }
        )
        if bias:
            found[f"{name}.bias"] = normal(shape[0]) * 0.1

    def statistics(name: str, features: int) -> None:
        found[f"{name}.running_means"] = normal(51, features) * 0.1
        found[f"{name}.running_vars"] = normal(51, features).square() + 0.5

    found["embeddings.weight"] = normal(latent, classes)
    spectral("generator.gen_z", 16 * 16 * width, 2 * latent, bias=True)
    for k, (entry, out) in enumerate(BIGGAN_BLOCKS):
        name, middle = f"generator.layers.{k + (k >= 8)}", entry * width // 4
        sizes = [entry * width, middle, middle, middle, out * width]
        for i, kernel in enumerate((1, 3, 3, 1)):
            statistics(f"{name}.bn_{i}", sizes[i])
            spectral(f"{name}.bn_{i}.scale", sizes[i], 2 * latent)
            spectral(f"{name}.bn_{i}.offset", sizes[i], 2 * latent)
            spectral(f"{name}.conv_{i}", sizes[i + 1], sizes[i], kernel, kernel, bias=True)
    attended = 2 * width
    for name, into, out in (("theta", 8, 1), ("phi", 8, 1), ("g", 8, 4), ("o_conv", 4, 8)):
        spectral(f"generator.layers.8.snconv1x1_{name}", attended * out // 8, attended * into // 8, 1, 1)
    found["generator.layers.8.gamma"] = torch.tensor([0.7])
    statistics("generator.bn", width)
    found.update({"generator.bn.weight": normal(width) * 0.3, "generator.bn.bias": normal(width) * 0.3})
    spectral("generator.conv_to_rgb", width, width, 3, 3, bias=True)
    return found


def draw_biggan(tensors: Tensors, z: Tensor, labels: Tensor, row: int = 50) -> Tensor:
    """What the network draws, with spectral norms taken from the weights themselves and torch's own batch norm."""
    condition = torch.cat([z, tensors["embeddings.weight"].T[labels]], dim=1)

    def weight(name: str) -> Tensor:
        found = tensors[f"{name}.weight_orig"]
        return found / torch.linalg.matrix_norm(found.flatten(1), 2)

    def conv(name: str, x: Tensor) -> Tensor:
        kernel = weight(name)
        return F.conv2d(x, kernel, tensors.get(f"{name}.bias"), padding=kernel.shape[-1] // 2)

    def norm(name: str, x: Tensor) -> Tensor:
        mean, var = tensors[f"{name}.running_means"][row], tensors[f"{name}.running_vars"][row]
        standard = F.batch_norm(x, mean, var, eps=1e-4)
        scale, shift = condition @ weight(f"{name}.scale").T, condition @ weight(f"{name}.offset").T
        return F.relu(standard + standard * scale[:, :, None, None] + shift[:, :, None, None])

    def doubled(x: Tensor) -> Tensor:
        return x.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)

    def attended(x: Tensor) -> Tensor:
        asks, keys, values = (conv(f"generator.layers.8.snconv1x1_{n}", x) for n in ("theta", "phi", "g"))
        keys, values = F.max_pool2d(keys, 2).flatten(2), F.max_pool2d(values, 2).flatten(2)
        shares = torch.softmax(torch.einsum("ncp,ncq->npq", asks.flatten(2), keys), dim=2)
        mixed = torch.einsum("npq,ncq->ncp", shares, values).view(len(x), -1, *x.shape[2:])
        return x + tensors["generator.layers.8.gamma"] * conv("generator.layers.8.snconv1x1_o_conv", mixed)

    x = condition @ weight("generator.gen_z").T + tensors["generator.gen_z.bias"]
    x = x.view(len(z), 4, 4, -1).permute(0, 3, 1, 2)
    for k in range(len(BIGGAN_BLOCKS)):
        x = attended(x) if k == 8 else x
        name, grow = f"generator.layers.{k + (k >= 8)}", doubled if k % 2 else (lambda y: y)
        new = conv(f"{name}.conv_0", norm(f"{name}.bn_0", x))
        new = conv(f"{name}.conv_1", grow(norm(f"{name}.bn_1", new)))
        new = conv(f"{name}.conv_2", norm(f"{name}.bn_2", new))
        new = conv(f"{name}.conv_3", norm(f"{name}.bn_3", new))
        x = new + grow(x[:, : new.shape[1]])
    own = [tensors[f"generator.bn.{n}"] for n in ("weight", "bias")]
    mean, var = tensors["generator.bn.running_means"][row], tensors["generator.bn.running_vars"][row]
    x = conv("generator.conv_to_rgb", F.relu(F.batch_norm(x, mean, var, own[0], own[1], eps=1e-4)))
    return (torch.tanh(x[:, :3]) + 1) / 2


def stylegan2(*, style: int = 6, mapping: int = 2, widths: tuple[int, ...] = (5, 4, 3)) -> Tensors:
    """StyleGAN2 for images of 4 * 2 ** (len(widths) - 1): names and shapes of ``rosinality/stylegan2-pytorch``."""
    rng, found = torch.Generator().manual_seed(2), dict[str, Tensor]()
    bump = torch.tensor([1.0, 3.0, 3.0, 1.0])
    kernel = bump[:, None] * bump / 16

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng)

    def modulated(name: str, into: int, out: int, side: int) -> None:
        found[f"{name}.weight"] = normal(1, out, into, side, side)
        found.update(
            {f"{name}.modulation.weight": normal(into, style), f"{name}.modulation.bias": normal(into) * 0.1 + 1}
        )

    def styled(name: str, into: int, out: int, *, grows: bool) -> None:
        modulated(f"{name}.conv", into, out, 3)
        if grows:
            found[f"{name}.conv.blur.kernel"] = kernel.clone()
        found.update({f"{name}.noise.weight": normal(1), f"{name}.activate.bias": normal(out) * 0.1})

    def to_rgb(name: str, into: int, *, grows: bool) -> None:
        modulated(f"{name}.conv", into, 3, 1)
        found[f"{name}.bias"] = normal(1, 3, 1, 1) * 0.1
        if grows:
            found[f"{name}.upsample.kernel"] = kernel.clone()

    for k in range(1, mapping + 1):
        found.update({f"style.{k}.weight": normal(style, style) * 100, f"style.{k}.bias": normal(style)})
    found["input.input"] = normal(1, widths[0], 4, 4)
    styled("conv1", widths[0], widths[0], grows=False)
    to_rgb("to_rgb1", widths[0], grows=False)
    for k in range(1, len(widths)):
        styled(f"convs.{2 * k - 2}", widths[k - 1], widths[k], grows=True)
        styled(f"convs.{2 * k - 1}", widths[k], widths[k], grows=False)
        to_rgb(f"to_rgbs.{k - 1}", widths[k], grows=True)
    for k in range(2 * len(widths) - 1):
        side = 2 ** ((k + 5) // 2)
        found[f"noises.noise_{k}"] = normal(1, 1, side, side)
    return found


def draw_stylegan2(tensors: Tensors, z: Tensor, truncation: tuple[float, Tensor | None] = (1.0, None)) -> Tensor:
    """What the network draws, one example at a time with weights of its own, and filters on rows of zeros."""
    images = []
    for code in z:
        w = map_style(tensors, code)
        w = w if truncation[1] is None else truncation[1] + truncation[0] * (w - truncation[1])
        images.append(_draw_one(tensors, w))
    return torch.stack(images)


def map_style(tensors: Tensors, code: Tensor) -> Tensor:
    w = code / (code.square().mean() + 1e-8).sqrt()
    for k in range(1, 1 + sum(name.startswith("style.") and name.endswith("weight") for name in tensors)):
        full = tensors[f"style.{k}.weight"] * 0.01 / math.sqrt(len(w))
        w = math.sqrt(2) * F.leaky_relu(full @ w + 0.01 * tensors[f"style.{k}.bias"], 0.2)
    return w


def _draw_one(tensors: Tensors, w: Tensor) -> Tensor:
    def modulated(name: str, x: Tensor, *, demodulated: bool, grows: bool) -> Tensor:
        weight = tensors[f"{name}.weight"][0]
        weight = weight / math.sqrt(weight[0].numel())
        bias = tensors[f"{name}.modulation.bias"]
        scale = tensors[f"{name}.modulation.weight"] @ w / math.sqrt(len(w)) + bias
        weight = weight * scale[None, :, None, None]
        if demodulated:
            weight = weight / (weight.square().sum(dim=(1, 2, 3), keepdim=True) + 1e-8).sqrt()
        if not grows:
            return F.conv2d(x[None], weight, padding=weight.shape[-1] // 2)[0]
        grown = F.conv_transpose2d(x[None], weight.transpose(0, 1), stride=2)[0]
        return filtered(grown, tensors[f"{name}.blur.kernel"], before=1, after=1)

    def styled(name: str, x: Tensor, noise: int, *, grows: bool) -> Tensor:
        x = modulated(f"{name}.conv", x, demodulated=True, grows=grows)
        x = x + tensors[f"{name}.noise.weight"] * tensors[f"noises.noise_{noise}"][0]
        return math.sqrt(2) * F.leaky_relu(x + tensors[f"{name}.activate.bias"][:, None, None], 0.2)

    def to_rgb(name: str, x: Tensor) -> Tensor:
        return modulated(f"{name}.conv", x, demodulated=False, grows=False) + tensors[f"{name}.bias"][0]

    x = styled("conv1", tensors["input.input"][0], 0, grows=False)
    image, k = to_rgb("to_rgb1", x), 0
    while f"to_rgbs.{k}.bias" in tensors:
        x = styled(f"convs.{2 * k}", x, 2 * k + 1, grows=True)
        x = styled(f"convs.{2 * k + 1}", x, 2 * k + 2, grows=False)
        apart = torch.zeros(3, 2 * image.shape[1], 2 * image.shape[2])
        apart[:, ::2, ::2] = image
        enlarged = filtered(apart, tensors[f"to_rgbs.{k}.upsample.kernel"], before=2, after=1)
        image, k = enlarged + to_rgb(f"to_rgbs.{k}", x), k + 1
    return ((image + 1) / 2).clamp(0, 1)


def filtered(x: Tensor, kernel: Tensor, *, before: int, after: int) -> Tensor:
    """Every channel of [C, H, W], with zeros around it, under the filter, by hand."""
    wide = F.pad(x, (before, after, before, after))
    high = wide.shape[1] - 3
    out = torch.zeros(len(x), high, high)
    for i in range(4):
        for j in range(4):
            out += kernel[3 - i, 3 - j] * wide[:, i : i + high, j : j + high]
    return out


def progan(folder: Path, *, latent: int = 6, widths: tuple[int, ...] = (5, 4, 3), shards: int = 3) -> Tensors:
    """A ProGAN for TensorFlow.js, its numbers cut into shards wherever they fall."""
    rng = np.random.default_rng(3)
    entries: list[tuple[str, np.ndarray]] = [("module_apply_default/Reshape/shape", np.array([-1, 1, 1, 6], "<i4"))]
    number = 0
    for k, (into, out) in enumerate(zip((latent, *widths), widths, strict=False)):
        for which in range(2):
            side, source = 4 if number == 0 else 3, into if which == 0 else out
            name = f"module_apply_default/Conv2D{f'_{number}' if number else ''}/merged_input"
            entries.append((name, rng.normal(0, 0.3, (side, side, source, out)).astype("<f4")))
            entries.append((f"module/g_model/res_{k}/conv{which}/bias", rng.normal(0, 0.3, out).astype("<f4")))
            number += 1
    last = rng.normal(0, 0.3, (1, 1, widths[-1], 3)).astype("<f4")
    entries.append((f"module_apply_default/Conv2D_{number}/merged_input", last))
    entries.append((f"module_apply_default/add_{2 * number + 2}", np.full(3, 0.5, "<f4")))
    blob = b"".join(array.tobytes() for _, array in entries)
    cut = -(-len(blob) // shards)
    names = [f"group1-shard{i + 1}of{shards}.bin" for i in range(shards)]
    for i, name in enumerate(names):
        (folder / name).write_bytes(blob[i * cut : (i + 1) * cut])
    weights = [
        {"name": n, "shape": list(a.shape), "dtype": "int32" if a.dtype == "<i4" else "float32"} for n, a in entries
    ]
    (folder / "model.json").write_text(json.dumps({"weightsManifest": [{"paths": names, "weights": weights}]}))
    return {name: torch.from_numpy(array.copy()) for name, array in entries}


def draw_progan(tensors: Tensors, z: Tensor) -> Tensor:
    """What that ProGAN draws, with channels last and every convolution as a sum over its taps."""

    def unit(x: Tensor) -> Tensor:
        return x / (x.square().mean(dim=-1, keepdim=True) + 1e-8).sqrt()

    def conv(x: Tensor, kernel: Tensor, edge: int) -> Tensor:
        side = kernel.shape[0]
        wide = F.pad(x, (0, 0, edge, edge, edge, edge))
        size = wide.shape[1] - side + 1
        products = (wide[:, i : i + size, j : j + size] @ kernel[i, j] for i in range(side) for j in range(side))
        return sum(products, start=torch.zeros(()))

    x = unit(z)[:, None, None]
    kernels = [tensor for name, tensor in tensors.items() if "merged_input" in name]
    biases = [tensor for name, tensor in tensors.items() if name.endswith("bias")]
    for i, (kernel, bias) in enumerate(zip(kernels, biases, strict=False)):
        if i and i % 2 == 0:
            x = x.repeat_interleave(2, dim=1).repeat_interleave(2, dim=2)
        x = conv(x, kernel, 1 if i else 3) + bias
        x = unit(torch.maximum(x, 0.2 * x))
    return (conv(x, kernels[-1], 0) + 0.5).clamp(0, 1).permute(0, 3, 1, 2)
