"""Spoils files as a stranger would: with knowledge of their structure, not only of their bytes."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import random
import struct
import tarfile
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gradveil.assets import read_numpy_pickle

LONG, DEEP = "@@long@@", "@@deep@@"
"""Stand for what no JSON writer would write: a number of 5,000 digits, and lists within lists."""
NUMBERS: list[Any] = [
    0, -1, 1, 2, 7, 2**31, 2**63, 2**64, 2**70, -(2**63), 10**400, 0.5, -0.0, 1e-320, 1e38, 3e35, 1e308,
    float("nan"), float("inf"), -float("inf"),
]  # fmt: skip
TEXTS = [
    "", " ", "none", "0", "nan", "../../../etc/passwd", "/etc/passwd", "/dev/zero", "a/../../b", "C:\\x", "a\0b",
    "a\nb\rc", "\x1b[2J\x1b]0;x\a", "\u202e\u2028", "\ud800", "é" * 300, "x" * 100_000, "%s%n{0}{}", "[red]x[/red]",
    "<script>alert(1)</script>", "{{ 7*7 }}", "os:system", "builtins:exec", "mlp:hidden=1000000000", "mlp:depth=-1",
    "mlp:hidden=9,depth=99999999", "resnet18", "vit:depth=0", "lenet:init=wide", "noise:sigma=1e400",
    "noise:sigma=nan", "precode", "none+none+none", "clip:bound=-1", "ig:iterations=0", "analytic", "identify",
    "folder:path=/", "mnist-samples", "cifar10-samples", "C+labels", "H", "2024-99-99", "1_000", "0x10", "~", "!!int",
]  # fmt: skip
OTHERS: list[Any] = [
    None,
    True,
    False,
    [],
    {},
    [[]],
    [None],
    {"": ""},
    {"a": {"b": []}},
    [1, "a", None],
    LONG,
    DEEP,
    [DEEP],
]


PICKLES = [
    b"cos\nsystem\n(S'id'\ntR.", b"(lp0\n" * 5000, b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
    b"]" + b"(h\0h\0e" * 40 + b".", b"\x80\x02\x8a\xff" + b"\x7f" * 255 + b".",
]  # fmt: skip
"""Ask for code, or for much."""
MEMBERS = [
    "../out", "/abs", "a/../../b", "toy/data/../../../x.bin", "C:\\x", "..\\x", "toy/data/a.bin", "é.bin", "",
    "toy/data/" + "d/" * 400 + "a.bin", "toy/data/" + "n" * 300 + ".bin",
]  # fmt: skip


def spoil(folder: Path, rng: random.Random) -> str:
    """Change one to three files below a folder, and say which and how."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    done = []
    for path in rng.choices(files, k=rng.choice([1, 1, 1, 2, 3])):
        if path.is_file() and not path.is_symlink():
            how = rng.random()
            change = _place if how < 0.04 else _bytes if how < 0.3 else _structure_of(path)
            try:
                what = change(path, rng)
            except Exception:  # an earlier change left no structure to spoil
                what = _bytes(path, rng)
            done.append(f"{path.relative_to(folder)}: {what}")
    return "; ".join(done)


def _place(path: Path, rng: random.Random) -> str:
    """Something else in the place of the file."""
    path.unlink()
    kind = rng.choice(["nothing", "folder", "loop", "dangling", "zero", "pipe", "text", "root"])
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind != "nothing":
        target = {"loop": path.name, "dangling": "nowhere", "zero": "/dev/zero", "text": "/etc/passwd", "root": "/"}
        path.symlink_to(target[kind])
    return f"replaced by {kind}"


def _bytes(path: Path, rng: random.Random) -> str:
    data = bytearray(path.read_bytes())
    kind = rng.choice(["flip", "flip", "cut", "cut", "remove", "repeat", "insert", "number", "number", "empty", "more"])
    at = rng.randrange(len(data) + 1) if rng.random() < 0.5 else rng.randrange(min(len(data), 64) + 1)
    size = rng.choice([1, 2, 4, 8, 100, 10_000])
    if kind == "flip":
        for _ in range(rng.choice([1, 1, 2, 8, 64])):
            if data:
                data[min(rng.randrange(at, at + 64), len(data) - 1)] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del data[at:]
    elif kind == "remove":
        del data[at : at + size]
    elif kind == "repeat":
        data[at:at] = data[at : at + size] * rng.choice([1, 3])
    elif kind == "insert":
        data[at:at] = rng.randbytes(size)
    elif kind == "number":
        value = rng.choice([0, 1, 2**7, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1])
        width = rng.choice([2, 4, 8])
        packed = (value % 256**width).to_bytes(width, rng.choice(["little", "big"]))
        data[at : at + width] = packed
    elif kind == "more":
        data += rng.randbytes(size)
    else:
        data.clear()
    path.write_bytes(data)
    return f"{kind} at {at}"


def _structure_of(path: Path) -> Callable[[Path, random.Random], str]:
    name = path.name
    if name.endswith((".json", ".yaml")):
        return _json
    if name.endswith(".safetensors"):
        return _safetensors
    if name.endswith((".whl", ".zip")):
        return _zip
    if name.endswith(".tgz"):
        return _tar
    if name.endswith(".gz"):
        return _gzip
    if "batch" in name or name in ("train", "meta") or name.endswith(".ckpt"):
        return _pickle
    return _bytes


def _json(path: Path, rng: random.Random) -> str:
    text, what = spoilt_json(path.read_text(), rng)
    path.write_text(text, errors="surrogatepass")
    return what


def spoilt_json(text: str, rng: random.Random) -> tuple[str, str]:
    """JSON text with one to four changes of its tree."""
    tree, done = json.loads(text), []
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        tree, what = spoilt_tree(tree, rng)
        done.append(what)
    text = json.dumps(tree, ensure_ascii=rng.random() < 0.5)
    if rng.random() < 0.03:  # the same key twice
        text = text.replace("{", '{"version": 2, "rows": 1, ', 1)
    depth = rng.choice([500, 100_000])
    return text.replace(f'"{LONG}"', "9" * 5000).replace(f'"{DEEP}"', "[" * depth + "]" * depth), ", ".join(done)


def spoilt_tree(tree: Any, rng: random.Random) -> tuple[Any, str]:
    """A tree of dicts and lists with one change."""
    places = list(_places(tree))
    if not places or rng.random() < 0.01:
        return _value(rng), "replaced as a whole"
    holder, key = rng.choice(places)
    kind = rng.choice(["value", "value", "value", "delete", "rename", "swap", "wrap", "again", "text"])
    if kind == "delete":
        del holder[key]
    elif kind == "rename" and isinstance(holder, dict):
        holder[str(rng.choice(TEXTS))] = holder.pop(key)
    elif kind == "swap":
        other, place = rng.choice(places)
        holder[key], other[place] = other[place], holder[key]
    elif kind == "wrap":
        holder[key] = rng.choice([[holder[key]], {"a": holder[key]}, [holder[key]] * 3])
    elif kind == "again" and isinstance(holder, list):
        holder.extend([holder[key]] * rng.choice([1, 2, 1000]))
    elif kind == "text":
        holder[key] = str(holder[key])[:1000]
    else:
        holder[key] = _value(rng)
    return tree, f"{kind} of {str(key)[:40]!r}"


def _places(tree: Any) -> Any:
    """Every (container, key) of a tree, and at most 2,000 of them: long lists are alike."""
    waiting, count = [tree] if isinstance(tree, dict | list) else [], 0
    while waiting and count < 2000:
        holder = waiting.pop()
        for key in list(holder) if isinstance(holder, dict) else range(min(len(holder), 50)):
            count += 1
            yield holder, key
            if isinstance(holder[key], dict | list) and holder[key]:
                waiting.append(holder[key])


def _value(rng: random.Random) -> Any:
    return json.loads(json.dumps(rng.choice(rng.choice([NUMBERS, TEXTS, OTHERS]))))


def _safetensors(path: Path, rng: random.Random) -> str:
    """The header, what Gradveil keeps in it, the numbers, or the length that is said of the header."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header, payload = json.loads(data[8 : 8 + length]), bytearray(data[8 + length :])
    kind = rng.choice(["meta", "meta", "meta", "header", "header", "numbers", "numbers", "length", "type", "offsets"])
    meta, names = header.get("__metadata__", {}), [name for name in header if name != "__metadata__"]
    what = kind
    if kind == "meta" and "gradveil" in meta:
        meta["gradveil"], what = spoilt_json(meta["gradveil"], rng)
    elif kind == "numbers" and payload:
        number = rng.choice([float("nan"), float("inf"), 3e38, -3e38, 3e35, 1e-45, 0.0])
        at = rng.randrange(len(payload)) // 4 * 4
        count = rng.choice([1, 1, 10_000_000])
        packed = struct.pack("<f", number)
        for place in range(at if count == 1 else 0, min(len(payload) - 3, at + 4 * count), 4):
            payload[place : place + 4] = packed
    elif kind == "type" and names:
        header[rng.choice(names)]["dtype"] = rng.choice(["F64", "F16", "BF16", "I64", "U8", "BOOL", "F8_E4M3", "X", 1])
    elif kind == "offsets" and names:
        header[rng.choice(names)]["data_offsets"] = [rng.choice(NUMBERS[:10]), rng.choice(NUMBERS[:10])]
    else:
        header, what = spoilt_tree(header, rng)
    text = json.dumps(header).encode(errors="surrogatepass")
    said = rng.choice([0, 7, 2**20, 2**32, 2**63]) if kind == "length" else len(text)
    path.write_bytes(struct.pack("<Q", said) + text + bytes(payload))
    return what


def _gzip(path: Path, rng: random.Random) -> str:
    data = bytearray(gzip.decompress(path.read_bytes()))
    if rng.random() < 0.1:
        data[4:8], data[8:] = struct.pack(">I", 2**30 - 1), bytes(10_000_000)  # says much, is much when unpacked
    for _ in range(rng.choice([1, 2, 8])):
        data[rng.randrange(min(len(data), 32))] = rng.randrange(256)
    path.write_bytes(gzip.compress(bytes(data)))
    return "changed inside"


def _pickle(path: Path, rng: random.Random) -> str:
    """The same kind of pickle with one entry of another kind; or one that asks for code."""
    if rng.random() < 0.1:
        path.write_bytes(rng.choice(PICKLES))
        return "asks for code or for much"
    content = read_numpy_pickle(path, encoding="latin1")  # it may be spoilt already, and ask for code
    key = rng.choice(list(content))
    value = content[key]
    if isinstance(value, list) and value and rng.random() < 0.6:
        value[rng.randrange(len(value))] = _value(rng)
    else:
        content[key] = _value(rng)
    path.write_bytes(pickle.dumps(content, protocol=rng.choice([0, 2, 4])))
    return f"entry {key!r}"


def _zip(path: Path, rng: random.Random) -> str:
    """One more member, of a hostile name, size or kind."""
    stream = io.BytesIO(path.read_bytes())
    with zipfile.ZipFile(stream, "a") as zipped:
        info = zipfile.ZipInfo(rng.choice(MEMBERS) or "x")
        info.external_attr = rng.choice([0, 0o120777, 0o100644, 0o020644]) << 16
        info.compress_type = zipfile.ZIP_DEFLATED
        with warnings.catch_warnings(action="ignore"):  # a name that is there already
            zipped.writestr(info, rng.choice([b"x", b"/etc/passwd", bytes(20_000_000)]))
    data = bytearray(stream.getvalue())
    if rng.random() < 0.4:  # sizes that lie, in the directory at the end
        at = data.rfind(b"PK\1\2") + rng.choice([16, 20, 24, 28, 30, 42])
        data[at : at + 4] = rng.choice([0, 1, 2**31, 2**32 - 1]).to_bytes(4, "little")
    path.write_bytes(data)
    return f"member {info.filename[:40]!r}"


def _tar(path: Path, rng: random.Random) -> str:
    with tarfile.open(path) as tarred:
        members = [(one, (tarred.extractfile(one) or io.BytesIO()).read()) for one in tarred if one.isreg()]
    stream, name = io.BytesIO(), rng.choice(MEMBERS)
    form = rng.choice([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
    with tarfile.open(fileobj=stream, mode="w:gz", format=form) as tarred:
        for one, content in members:
            tarred.addfile(one, io.BytesIO(content))
        info = tarfile.TarInfo(name)
        info.type = rng.choice(
            [tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, b"z"]
        )
        info.linkname = rng.choice(["", "/etc/passwd", "../x"])
        content = bytes(rng.choice([0, 10, 20_000_000])) if info.type == tarfile.REGTYPE else b""
        info.size = len(content)
        tarred.addfile(info, io.BytesIO(content))
    data = bytearray(gzip.decompress(stream.getvalue()))
    if rng.random() < 0.3:  # a size that lies: its sum is made to fit
        data[124:136] = rng.choice([b"77777777777\0", b"-0000000001\0", b"\x80" + b"\xff" * 11, b"zzzzzzzzzzz\0"])
        data[148:156] = b" " * 8
        data[148:156] = b"%06o\0 " % sum(data[:512])
    path.write_bytes(gzip.compress(bytes(data)))
    return f"member {name[:40]!r}"
