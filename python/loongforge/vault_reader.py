# SPDX-License-Identifier: Apache-2.0
"""A second reader of CheckpointVault's files, written from docs/format/vault.md alone: numpy, no C of ours.

    state = VaultReader("ckpt").read()            # newest checkpoint: {parameter: {role: array}}, blobs, step
    python -m loongforge.vault_reader ckpt        # step, parameters and a hash of each, as JSON lines

It exists so that a checkpoint can be read without this library, and so that tests can hold the C code against it.
zstd comes from Python's own `compression.zstd`, the package `zstandard`, or the system's libzstd through ctypes.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import json
import os
import re
import struct
import sys

import numpy as np

MASK64, MASK128 = (1 << 64) - 1, (1 << 128) - 1
DTYPES = {"f32": "<f4", "bf16": "<u2", "f16": "<f2", "f64": "<f8", "i64": "<i8", "i32": "<i4", "u8": "u1", "bool": "?"}


class Damaged(ValueError):
    """A file is not what the format says; the text names file and record."""


# ---- XXH3-128 (the long form by numpy, a block of 1024 bytes at a time) ------------------------------------------

SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
P32 = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
P64 = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)


def _u32(data, at):
    return int.from_bytes(data[at : at + 4], "little")


def _u64(data, at):
    return int.from_bytes(data[at : at + 8], "little")


def _swap32(x):
    return int.from_bytes(x.to_bytes(4, "little"), "big")


def _swap64(x):
    return int.from_bytes(x.to_bytes(8, "little"), "big")


def _rotl32(x, n):
    return ((x << n) | (x >> (32 - n))) & 0xFFFFFFFF


def _fold(a, b):
    product = a * b
    return (product & MASK64) ^ (product >> 64)


def _avalanche64(h):  # of XXH64
    h = ((h ^ (h >> 33)) * P64[1]) & MASK64
    h = ((h ^ (h >> 29)) * P64[2]) & MASK64
    return h ^ (h >> 32)


def _avalanche(h):  # of XXH3
    h = ((h ^ (h >> 37)) * 0x165667919E3779F9) & MASK64
    return h ^ (h >> 32)


def _short(data, seed):
    n = len(data)
    if n == 0:
        low = _avalanche64(seed ^ _u64(SECRET, 64) ^ _u64(SECRET, 72))
        return low | _avalanche64(seed ^ _u64(SECRET, 80) ^ _u64(SECRET, 88)) << 64
    if n <= 3:
        combined = data[0] << 16 | data[n >> 1] << 24 | data[n - 1] | n << 8
        low = combined ^ ((_u32(SECRET, 0) ^ _u32(SECRET, 4)) + seed) & MASK64
        high = _rotl32(_swap32(combined), 13) ^ ((_u32(SECRET, 8) ^ _u32(SECRET, 12)) - seed) & MASK64
        return _avalanche64(low) | _avalanche64(high) << 64
    if n <= 8:
        seed ^= _swap32(seed & 0xFFFFFFFF) << 32
        both = _u32(data, 0) | _u32(data, n - 4) << 32
        keyed = both ^ ((_u64(SECRET, 16) ^ _u64(SECRET, 24)) + seed) & MASK64
        product = keyed * (P64[0] + (n << 2)) & MASK128
        low, high = product & MASK64, product >> 64
        high = (high + (low << 1)) & MASK64
        low ^= high >> 3
        low = ((low ^ (low >> 35)) * 0x9FB21C651E98DF25) & MASK64
        low ^= low >> 28
        return low | _avalanche(high) << 64
    return _nine_to_sixteen(data, seed)


def _nine_to_sixteen(data, seed):
    n = len(data)
    flip_low = ((_u64(SECRET, 32) ^ _u64(SECRET, 40)) - seed) & MASK64
    flip_high = ((_u64(SECRET, 48) ^ _u64(SECRET, 56)) + seed) & MASK64
    first, last = _u64(data, 0), _u64(data, n - 8)
    product = (first ^ last ^ flip_low) * P64[0]
    low, high = product & MASK64, product >> 64
    low = (low + ((n - 1) << 54)) & MASK64
    last ^= flip_high
    high = (high + last + (last & 0xFFFFFFFF) * (P32[1] - 1)) & MASK64
    low ^= _swap64(high)
    product = low * P64[1]
    low, top = product & MASK64, product >> 64
    return _avalanche(low) | _avalanche((top + high * P64[1]) & MASK64) << 64


def _mix16(data, at, secret_at, seed):
    return _fold(
        _u64(data, at) ^ (_u64(SECRET, secret_at) + seed) & MASK64,
        _u64(data, at + 8) ^ (_u64(SECRET, secret_at + 8) - seed) & MASK64,
    )


def _mix32(acc, data, a, b, secret_at, seed):
    low, high = acc
    low = (low + _mix16(data, a, secret_at, seed)) & MASK64 ^ (_u64(data, b) + _u64(data, b + 8)) & MASK64
    high = (high + _mix16(data, b, secret_at + 16, seed)) & MASK64 ^ (_u64(data, a) + _u64(data, a + 8)) & MASK64
    return low, high


def _finish_middle(acc, n, seed):
    low, high = acc
    total = (low + high) & MASK64
    other = (low * P64[0] + high * P64[3] + ((n - seed) & MASK64) * P64[1]) & MASK64
    return _avalanche(total) | (-_avalanche(other) & MASK64) << 64


def _middle(data, seed):
    n = len(data)
    acc = (n * P64[0] & MASK64, 0)
    if n <= 128:
        for i in range((n - 1) // 32, -1, -1):
            acc = _mix32(acc, data, 16 * i, n - 16 * (i + 1), 32 * i, seed)
        return _finish_middle(acc, n, seed)
    for i in range(32, 160, 32):
        acc = _mix32(acc, data, i - 32, i - 16, i - 32, seed)
    acc = _avalanche(acc[0]), _avalanche(acc[1])
    for i in range(160, n + 1, 32):
        acc = _mix32(acc, data, i - 32, i - 16, 3 + i - 160, seed)
    acc = _mix32(acc, data, n - 16, n - 32, 136 - 17 - 16, -seed & MASK64)
    return _finish_middle(acc, n, seed)


@functools.lru_cache(maxsize=8)
def _seeded_secret(seed):
    words = struct.unpack("<24Q", SECRET)
    return struct.pack("<24Q", *((w + (seed if i % 2 == 0 else -seed)) & MASK64 for i, w in enumerate(words)))


def _accumulate(acc, stripes, secret):
    """stripes: (n, 8) u64; secret: (n, 8) u64. Sums over n commute, so one block is one numpy expression."""
    keyed = stripes ^ secret
    added = stripes[:, [1, 0, 3, 2, 5, 4, 7, 6]] + (keyed & np.uint64(0xFFFFFFFF)) * (keyed >> np.uint64(32))
    return acc + added.sum(axis=0, dtype=np.uint64)


def _long(data, seed):
    n = len(data)
    secret = _seeded_secret(seed)
    words = [np.frombuffer(secret, "<u8", 8, 8 * i) for i in range(17)]
    block_secret = np.stack(words[:16])
    acc = np.array([P32[2], P64[0], P64[1], P64[2], P64[3], P32[1], P64[4], P32[0]], np.uint64)
    n_blocks = (n - 1) // 1024
    for b in range(n_blocks):
        acc = _accumulate(acc, np.frombuffer(data, "<u8", 128, 1024 * b).reshape(16, 8), block_secret)
        acc = ((acc ^ (acc >> np.uint64(47))) ^ np.frombuffer(secret, "<u8", 8, 128)) * np.uint64(P32[0])
    n_stripes = (n - 1 - 1024 * n_blocks) // 64
    if n_stripes:
        acc = _accumulate(
            acc, np.frombuffer(data, "<u8", 8 * n_stripes, 1024 * n_blocks).reshape(-1, 8), block_secret[:n_stripes]
        )
    acc = _accumulate(
        acc, np.frombuffer(data[n - 64 :], "<u8").reshape(1, 8), np.frombuffer(secret[121:185], "<u8").reshape(1, 8)
    )
    lanes = [int(a) for a in acc]
    return _merge(lanes, secret, 11, n * P64[0] & MASK64) | _merge(lanes, secret, 192 - 64 - 11, ~(n * P64[1]) & MASK64) << 64


def _merge(acc, secret, at, start):
    return _avalanche(
        (
            start
            + sum(_fold(acc[2 * i] ^ _u64(secret, at + 16 * i), acc[2 * i + 1] ^ _u64(secret, at + 16 * i + 8)) for i in range(4))
        )
        & MASK64
    )


def xxh3_128(data, seed=0):
    """-> int; its low 64 bits are the checksum of the format."""
    data = bytes(data)
    with np.errstate(over="ignore"):
        return _short(data, seed) if len(data) <= 16 else _middle(data, seed) if len(data) <= 240 else _long(data, seed)


# ---- zstd --------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def _zstd():
    """-> function(stored, size) -> bytes"""
    try:
        from compression import zstd  # Python 3.14

        return lambda stored, size: zstd.decompress(stored)
    except ImportError:
        pass
    try:
        import zstandard

        return lambda stored, size: zstandard.ZstdDecompressor().decompress(stored, max_output_size=size)
    except ImportError:
        pass
    library = ctypes.CDLL(ctypes.util.find_library("zstd") or "libzstd.so.1")
    library.ZSTD_decompress.restype = ctypes.c_size_t
    library.ZSTD_isError.argtypes = [ctypes.c_size_t]
    library.ZSTD_decompress.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t]

    def decompress(stored, size):
        out = ctypes.create_string_buffer(max(size, 1))
        n = library.ZSTD_decompress(out, size, stored, len(stored))
        if library.ZSTD_isError(n):
            raise Damaged("zstd cannot unpack the record")
        return out.raw[:n]

    return decompress


# ---- files -------------------------------------------------------------------------------------------------------


def _check_first_line(text, name):
    line, _, rest = text.partition(b"\n")
    match = re.fullmatch(rb'\{"format":"loongforge-vault","version":(\d+),"digest":"([0-9a-f]{32})",', line)
    if not match:
        raise Damaged(f"{name}: the first line is damaged")
    if int(match[1]) != 1:
        raise Damaged(f"{name}: format version {int(match[1])}, this reader knows 1")
    if xxh3_128(rest) != int(match[2], 16):
        raise Damaged(f"{name}: wrong digest")
    return json.loads(text)


class VaultReader:
    """One vault folder. `steps()` lists checkpoints, `read(step)` loads one."""

    def __init__(self, folder):
        self.folder = os.fspath(folder)
        self._heads = set()

    def _bytes(self, name, offset=0, size=-1):
        with open(os.path.join(self.folder, name), "rb") as f:
            f.seek(offset, os.SEEK_END if offset < 0 else os.SEEK_SET)
            return f.read(size)

    def _base_manifest(self, name):
        tail = self._bytes(name, -48)
        if tail[:8] != b"LFVTAIL1" or xxh3_128(tail[:40]) & MASK64 != _u64(tail, 40):
            raise Damaged(f"{name}: file tail")
        offset, size, low, high = struct.unpack_from("<4Q", tail, 8)
        text = self._bytes(name, offset, size)
        if xxh3_128(text) != low | high << 64:
            raise Damaged(f"{name}: the manifest is damaged")
        manifest = _check_first_line(text, name)
        manifest["files"][0]["name"] = name
        return manifest

    def _manifests(self):
        """{step: function that reads its manifest}; a folder comes before the base it belongs to"""
        found = {}
        for name in os.listdir(self.folder):
            if re.fullmatch(r"base_(model|0|[1-9]\d*)\.bin", name):
                step = int(name[5:-4]) if name != "base_model.bin" else self._base_manifest(name)["step"]
                found.setdefault(step, functools.partial(self._base_manifest, name))
        for name in os.listdir(self.folder):
            if re.fullmatch(r"checkpoint_(0|[1-9]\d*)", name):
                meta = f"{name}/meta.json"
                found[int(name[11:])] = lambda meta=meta: _check_first_line(self._bytes(meta), meta)
        return found

    def steps(self):
        return sorted(self._manifests())

    def _check_file_head(self, name, manifest):
        if name in self._heads:
            return
        head = self._bytes(name, 0, 64)
        if head[:8] != b"LFVAULT1" or xxh3_128(head[:56]) & MASK64 != _u64(head, 56) or _u32(head, 8) != 1:
            raise Damaged(f"{name}: file head")
        if head[32:48].hex() != manifest["map_digest"] or _u64(head, 24) != int(manifest["seed"], 16):
            raise Damaged(f"{name}: a file of another vault")
        self._heads.add(name)

    def _record(self, manifest, file, offset, stored, key, raw_bytes, digest, elem, base):
        name = manifest["files"][file]["name"]
        what = f"{name}, record at {offset}"
        self._check_file_head(name, manifest)
        data = self._bytes(name, offset, 64 + stored)
        head, body = data[:64], data[64:]
        if head[:4] != b"LFSR" or xxh3_128(head[:56]) & MASK64 != _u64(head, 56):
            raise Damaged(f"{what}: record head")
        klass, role, codec, number, raw, length, low, high, checksum = struct.unpack_from("<HBBQQQQQQ", head, 4)
        if (klass, role, number, raw, length, low | high << 64) != (*key, raw_bytes, stored, int(digest, 16)):
            raise Damaged(f"{what}: the record is not the one that the manifest means")
        if xxh3_128(body) & MASK64 != checksum:
            raise Damaged(f"{what}: stored bytes")
        content = self._decode(codec, body, raw, elem, base)
        if len(content) != raw or xxh3_128(content, int(manifest["seed"], 16)) != int(digest, 16):
            raise Damaged(f"{what}: the content does not have its hash")
        return content

    def _decode(self, codec, body, raw, elem, base):
        if codec == 0:
            return body
        if codec == 1:
            return _zstd()(body, raw)
        if codec not in (2, 3):
            raise Damaged(f"codec {codec}")
        n, at, planes = raw // elem, 0, []
        for _ in range(elem):
            size = _u32(body, at) & 0x7FFFFFFF
            piece = body[at + 4 : at + 4 + size]
            planes.append(np.frombuffer(_zstd()(piece, n) if _u32(body, at) >> 31 else piece, np.uint8))
            at += 4 + size
        if at != len(body) or any(len(p) != n for p in planes):
            raise Damaged("byte planes")
        content = np.stack(planes, axis=1).reshape(-1)
        return (content ^ np.frombuffer(base(), np.uint8)).tobytes() if codec == 3 else content.tobytes()

    def _slice(self, manifest, plane, number, base_manifest):
        klass = manifest["classes"][plane["class"]]
        elem = np.dtype(DTYPES[plane["dtype"]]).itemsize
        count = min(klass["slice_elements"], klass["count"] - number * klass["slice_elements"])
        role = ("weight", "grad", "master", "exp_avg", "exp_avg_sq").index(plane["role"])

        def base():
            twin = next(p for p in base_manifest["planes"] if (p["class"], p["role"]) == (plane["class"], plane["role"]))
            return self._slice(base_manifest, twin, number, None)

        key = (plane["class"], role, number)
        place = plane["file"][number], plane["offset"][number], plane["stored"][number]
        digest = plane["hash"][number]
        return self._record(manifest, *place, key, count * elem, digest, elem, base if base_manifest else None)

    def _check_digest(self, manifest, what):
        """Blocks of 256 slice hashes, each behind the digest so far."""
        hashes = [int(h, 16) for plane in manifest["planes"] for h in plane["hash"]]
        seed, total = int(manifest["seed"], 16), 0
        for i in range(0, len(hashes), 256):
            total = xxh3_128(b"".join(h.to_bytes(16, "little") for h in [total, *hashes[i : i + 256]]), seed)
        if total != int(manifest["state_digest"], 16):
            raise Damaged(f"{what}: state digest")

    def read(self, step=None):
        """-> {"step", "params": {name: {role: array}}, "blobs": {name: bytes}, "planes": {(class, role): array}}.

        bf16 comes as the upper halves of f32, in uint16. Weights that have masters are rounded from them.
        Raises Damaged.
        """
        found = self._manifests()
        if not found:
            raise FileNotFoundError(f"no checkpoint in {self.folder}")
        step = max(found) if step is None else step
        manifest = found[step]()
        base = self._base_manifest(manifest["files"][0]["name"])
        if base["state_digest"] != manifest["base_digest"] or base["step"] != manifest["base_step"]:
            raise Damaged(f"checkpoint {step}: {manifest['files'][0]['name']} is not its base")
        self._check_digest(manifest, f"checkpoint {step}")
        planes = {}
        for plane in manifest["planes"]:
            content = b"".join(self._slice(manifest, plane, i, base) for i in range(len(plane["hash"])))
            planes[plane["class"], plane["role"]] = np.frombuffer(content, DTYPES[plane["dtype"]])
        for i, klass in enumerate(manifest["classes"]):
            if (i, "weight") not in planes and (i, "master") in planes:
                planes[i, "weight"] = round_to(planes[i, "master"], klass["dtype"])
        blobs = {
            b["name"]: self._record(
                manifest, b["file"], b["offset"], b["stored"], (65535, 255, i), b["bytes"], b["hash"], 1, None
            )
            for i, b in enumerate(manifest["blobs"])
        }
        return {"step": manifest["step"], "params": _cut(manifest["params"], planes), "blobs": blobs, "planes": planes}


def round_to(f32, dtype):
    """f32 -> f16 or bf16 (in uint16), to nearest even."""
    if dtype != "bf16":
        with np.errstate(over="ignore"):
            return f32.astype(DTYPES[dtype])
    u = f32.view("<u4")
    rounded = ((u.astype(np.uint64) + 0x7FFF + ((u >> 16) & 1)) >> 16).astype("<u2")
    return np.where((u & 0x7FFFFFFF) > 0x7F800000, ((u >> 16) | 0x40).astype("<u2"), rounded)


def _cut(params, planes):
    out = {}
    for p in params:
        n = int(np.prod(p["shape"], dtype=np.int64))
        roles = {role: plane for (klass, role), plane in planes.items() if klass == p["class"]}
        out[p["name"]] = {role: plane[p["offset"] : p["offset"] + n].reshape(p["shape"]) for role, plane in roles.items()}
    return out


def main(folder, step=None):
    state = VaultReader(folder).read(None if step is None else int(step))
    print(json.dumps({"step": state["step"], "blobs": {k: len(v) for k, v in state["blobs"].items()}}))
    for name, roles in state["params"].items():
        print(json.dumps({"name": name, **{role: f"{xxh3_128(array.tobytes()):032x}" for role, array in roles.items()}}))


if __name__ == "__main__":
    if not 2 <= len(sys.argv) <= 3:
        sys.exit("usage: python -m loongforge.vault_reader FOLDER [STEP]")
    main(*sys.argv[1:])
