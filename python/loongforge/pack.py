# SPDX-License-Identifier: Apache-2.0
"""`python -m loongforge.pack --from DIR OUT --tokenizer PATH`: tokenise a folder's texts and let the C library pack it.

`loongforge pack --tokenizer` becomes this program. It needs the package `tokenizers`.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import sys
import tempfile
import time

from . import _C

LISTS = ("instruct.jsonl", "captions.jsonl")
CLIP_FILE = "bpe_simple_vocab_16e6.txt.gz"
CLIP_MERGES = 49152 - 256 - 2
IMAGE = "<image>"
REQUEST = IMAGE + "\nDescribe this image."  # as the C packer asks for a caption


class UsageError(Exception):
    pass


class PackError(Exception):
    pass


# ---- vocabularies --------------------------------------------------------------------------------------------------


class Vocabulary:
    """A tokenizer with the name and the number of ids that the set's metadata say."""

    def __init__(self, tokenizer, name: str, files):
        self.tokenizer = tokenizer
        self.n_ids = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        digest = hashlib.sha256()
        for path in files:
            with open(path, "rb") as file:
                digest.update(file.read())
        self.name = f"{name[:90]} sha256:{digest.hexdigest()[:16]}"

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [one.ids for one in self.tokenizer.encode_batch(texts, add_special_tokens=False)]


def load_vocabulary(path: str) -> Vocabulary:
    """From tokenizer.json, vocab.json and merges.txt, or CLIP's merges: a folder, or one of these files."""
    try:
        import tokenizers
    except ImportError as error:
        raise PackError(f"--tokenizer needs the Python package 'tokenizers': {error}; hint: pip install tokenizers") from None
    folder = path if os.path.isdir(path) else os.path.dirname(path) or "."
    name = os.path.basename(os.path.abspath(folder))
    given = None if os.path.isdir(path) else os.path.basename(path)

    def find(*names):
        files = [os.path.join(folder, n) for n in names]
        return files if given in (None, *names) and all(os.path.isfile(f) for f in files) else None

    try:
        if given and os.path.isfile(path) and path.endswith(".json") and given != "vocab.json":
            return Vocabulary(tokenizers.Tokenizer.from_file(path), name, [path])
        if files := find("tokenizer.json"):
            return Vocabulary(tokenizers.Tokenizer.from_file(files[0]), name, files)
        if files := find("vocab.json", "merges.txt"):
            return Vocabulary(byte_level_bpe(tokenizers, *files), name, files)
        if files := find(CLIP_FILE):
            return Vocabulary(clip_bpe(tokenizers, files[0]), name, files)
    except Exception as error:  # tokenizers raises plain Exception
        raise PackError(f"--tokenizer {path}: {error}") from None
    expected = f"tokenizer.json, vocab.json with merges.txt, or {CLIP_FILE}"
    raise PackError(f"--tokenizer {path}: expected a folder with {expected}, or one of these files")


def byte_level_bpe(tokenizers, vocab_path: str, merges_path: str):
    """GPT-2's form."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(vocab_path, merges_path))
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    return bpe


def clip_bpe(tokenizers, path: str):
    """CLIP's form, a list of merges. Ids in order: bytes, bytes at a word's end, merges, two markers."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        lines = file.read().split("\n")[1 : CLIP_MERGES + 1]
    merges = [tuple(line.split()) for line in lines]
    # GPT-2's printable stand-ins for bytes, in the order of its paper's code: printable bytes first.
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in plain]
    letters = [chr(b) for b in plain] + [chr(256 + i) for i in range(len(rest))]
    words = [
        *letters,
        *(c + "</w>" for c in letters),
        *("".join(m) for m in merges),
        "<|startoftext|>",
        "<|endoftext|>",
    ]
    model = tokenizers.models.BPE(
        vocab={word: i for i, word in enumerate(words)}, merges=merges, end_of_word_suffix="</w>", fuse_unk=False
    )
    bpe = tokenizers.Tokenizer(model)
    norm, pre, regex = tokenizers.normalizers, tokenizers.pre_tokenizers, tokenizers.Regex
    bpe.normalizer = norm.Sequence([norm.NFC(), norm.Replace(regex(r"\s+"), " "), norm.Lowercase()])
    pattern = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
    split = pre.Split(regex(pattern), behavior="removed", invert=True)
    bpe.pre_tokenizer = pre.Sequence([split, pre.ByteLevel(add_prefix_space=False)])
    bpe.decoder = tokenizers.decoders.ByteLevel()
    return bpe


# ---- texts ---------------------------------------------------------------------------------------------------------


def no_twins(pairs):
    """Keys of an object; the C side refuses a key that stands twice, and so must this."""
    if len({k for k, _ in pairs}) != len(pairs):
        raise ValueError("duplicate key")
    return dict(pairs)


def turns_of(record: dict) -> list[dict]:
    """The record's turns; a caption becomes the answer to a request for one."""
    turns = record.get("turns", record.get("conversations"))
    if turns is None and isinstance(record.get("text"), str):
        has_image = isinstance(record.get("image", record.get("file")), str)
        ask = REQUEST if has_image else REQUEST[len(IMAGE) + 1 :]
        return [{"from": "human", "value": ask}, {"from": "gpt", "value": record["text"]}]
    return turns


def spoken(turn: dict) -> str:
    """A turn's text without the image's marker, as docs/format/records.md has it."""
    text = turn["value"]
    if turn["from"] == "human" and text.startswith(IMAGE):
        text = text[len(IMAGE) :].removeprefix("\n")
    return text


def with_tokens(line: str, vocabulary: Vocabulary) -> str:
    """A line with the ids of its turns; one that makes no sense stays as it is, for the packer to report."""
    try:
        record = json.loads(line, object_pairs_hook=no_twins)
        turns = turns_of(record)
        tokens = vocabulary.encode([spoken(turn) for turn in turns])
        for key in ("turns", "text"):
            record.pop(key, None)
        record.update(conversations=turns, tokens=tokens)
        result = json.dumps(record, ensure_ascii=False, allow_nan=False)
        result.encode()  # half of a surrogate pair is no text
        return result
    except (ValueError, TypeError, KeyError, AttributeError):
        return line.rstrip("\r\n")


def find_list(folder: str, name: str | None) -> str:
    if name:
        return name if "/" in name else os.path.join(folder, name)
    for candidate in LISTS:
        if os.path.exists(path := os.path.join(folder, candidate)):
            return path
    if not os.path.isdir(folder):
        raise PackError(f"no folder {folder}")
    raise PackError(f"{folder} has neither {LISTS[0]} nor {LISTS[1]}")


def texts_to_list(source: str, to, vocabulary: Vocabulary, progress=None) -> None:
    """Write `source` with token ids to an open binary file, line by line, so that the packer counts the same lines."""
    with open(source, "rb") as file:
        for number, raw in enumerate(file, 1):
            try:
                to.write(with_tokens(raw.decode(), vocabulary).encode() + b"\n")
            except UnicodeDecodeError:
                to.write(raw.rstrip(b"\r\n") + b"\n")
            if progress:
                progress(number, 0)


def pack_folder(out: str, folder: str, tokenizer: str, list_name: str | None = None, options=None, progress=None) -> dict:
    """Pack a folder with the vocabulary at `tokenizer`. Returns the summary: samples, skipped, images, bytes."""
    source = find_list(folder, list_name)
    vocabulary = load_vocabulary(tokenizer)
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as temp:
        try:
            texts_to_list(source, temp, vocabulary)
            temp.flush()
        except OSError as error:
            raise PackError(f"tokenising {source}: {error}") from None
        return _C.pack_folder(out, folder, temp.name, vocabulary.name, vocabulary.n_ids, options or {}, progress)


# ---- command line --------------------------------------------------------------------------------------------------


def parse_arguments(args: list[str]) -> tuple[dict, dict, list[str]]:
    """(own arguments, options of section [pack], words), by the rules of the C command line."""
    rows = {row["name"]: row for row in _C.options_tables()["pack"]}
    own, options, words = {}, {}, []
    at = 0
    while at < len(args):
        arg = args[at]
        at += 1
        if arg == "--":
            words += args[at:]
            break
        if not arg.startswith("--"):
            words.append(arg)
            continue
        key, equals, value = arg[2:].partition("=")
        key = key.replace("-", "_").removeprefix("pack.")
        if not equals and rows.get(key, {}).get("type") == "bool":
            value = "true"
        elif not equals:
            if at == len(args):
                raise UsageError(f"argument '{arg}' needs a value")
            value = args[at]
            at += 1
        if key in ("from", "list", "tokenizer"):
            own[key] = value
        elif key in rows:
            options[key] = value
        else:
            raise UsageError(f"unknown argument '{arg}'")
    return own, options, words


def progress_line(clock=time.monotonic):
    """A line on stderr: redrawn in place on a terminal, elsewhere one every ten seconds."""
    terminal, shown = sys.stderr.isatty(), [clock()]

    def show(done: int, total: int) -> None:
        now = clock()
        if now - shown[0] < (0.1 if terminal else 10) and done != total:
            return
        shown[0] = now
        text = f"packing {done} of {total} records" if total else f"tokenising {done} records"
        if terminal:
            print(f"\r{text}", end="\n" if done == total else "", file=sys.stderr, flush=True)
        elif done != total:
            print(text, file=sys.stderr, flush=True)

    return show


def run(args: list[str]) -> None:
    own, options, words = parse_arguments(args)
    if len(words) != 1 or "from" not in own or "tokenizer" not in own:
        raise UsageError("expected --from DIR OUT --tokenizer PATH")
    started = time.monotonic()
    done = pack_folder(words[0], own["from"], own["tokenizer"], own.get("list"), options, progress_line())
    seconds = time.monotonic() - started
    print(
        f"{words[0]}: {done['samples']} samples, {done['images']} images, {done['bytes'] / 2**20:.2f} MiB, "
        f"{done['skipped']} skipped, {seconds:.1f}s"
    )


def main(args: list[str] | None = None) -> int:
    _C.log_set(lambda level, line: print(f"loongforge: {line}", file=sys.stderr), 1)
    try:
        run(sys.argv[1:] if args is None else args)
        return 0
    except UsageError as error:
        print(f"loongforge: {error}; hint: `loongforge pack --help` lists the arguments", file=sys.stderr)
        return 2
    except (PackError, _C.Error) as error:
        text = error.args[2] if isinstance(error, _C.Error) else error
        print(f"loongforge: {text}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("loongforge: stopped, nothing was written", file=sys.stderr)
        return 1
    finally:
        _C.log_set(None)


if __name__ == "__main__":
    sys.exit(main())
