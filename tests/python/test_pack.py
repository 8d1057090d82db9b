# SPDX-License-Identifier: Apache-2.0
"""Packing through Python: vocabularies, broken records, the extension's loader functions, pixels against Pillow."""

import ctypes
import io
import json

import pytest

from loongforge import _C, pack

TEXTS = [
    ("Describe this image.", "Two horses stand on a green hill by the lake."),
    ("What colour is the hill?", "It is green – very green."),
    ("Say it in another way.", "Horses, é, 馬."),
]


def jpeg(width=60, height=40, **save):
    Image = pytest.importorskip("PIL.Image")
    picture = Image.new("RGB", (width, height))
    picture.putdata([(x * 255 // width, y * 255 // height, (x + y) % 256) for y in range(height) for x in range(width)])
    file = io.BytesIO()
    picture.convert(save.pop("mode", "RGB")).save(file, "JPEG", quality=95, subsampling=0, **save)
    return file.getvalue()


@pytest.fixture
def folder(tmp_path):
    """Three good records and four broken ones."""
    (tmp_path / "images").mkdir()
    records = []
    for i, (ask, answer) in enumerate(TEXTS):
        (tmp_path / "images" / f"{i}.jpg").write_bytes(jpeg())
        turns = [{"from": "human", "value": "<image>\n" + ask}, {"from": "gpt", "value": answer}]
        records.append({"id": f"s{i}", "image": f"images/{i}.jpg", "conversations": turns})
    lines = [json.dumps(r) for r in records]
    lines += [
        "no json",
        '{"id":"twice","id":"twice","text":"a"}',
        '{"id":"half","text":"\\ud800"}',
        '{"id":"nobody","conversations":[{"value":"a"}]}',
    ]
    (tmp_path / "instruct.jsonl").write_text("\n".join(lines) + "\n")
    captions = [json.dumps({"file": f"images/{i}.jpg", "text": answer}) for i, (_, answer) in enumerate(TEXTS)]
    (tmp_path / "captions.jsonl").write_text("\n".join(captions))
    return tmp_path


@pytest.fixture(scope="session")
def vocabulary_file(tmp_path_factory):
    tokenizers = pytest.importorskip("tokenizers")
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator([t for pair in TEXTS for t in pair], trainer)
    path = tmp_path_factory.mktemp("vocabulary") / "tokenizer.json"
    bpe.save(str(path))
    return path


def array(address, kind, n):
    return list((kind * n).from_address(address))


def rows(path, **options):
    """{sample: (tokens, labels)} of one epoch, without padding."""
    data = _C.dataset_open(str(path))
    n = _C.dataset_info(data)["n_samples"]
    loader = _C.loader_open(data, _C.device_open("cpu"), {"batch_size": n, "image_size": 8, **options})
    batch = _C.loader_next(loader, 0)
    t, found = batch["seq"], {}
    tokens, labels = (array(batch[k], ctypes.c_int64, n * t) for k in ("tokens", "labels"))
    mask, index = array(batch["mask"], ctypes.c_uint8, n * t), array(batch["index"], ctypes.c_int64, n)
    for row, sample in enumerate(index):
        used = sum(mask[row * t : (row + 1) * t])
        found[sample] = (tokens[row * t : row * t + used], labels[row * t : row * t + used])
    _C.loader_release(loader, batch, 0)
    return found


def test_tokens_are_those_of_the_vocabulary(folder, vocabulary_file, tmp_path):
    out = tmp_path / "set"
    done = pack.pack_folder(str(out), str(folder), str(vocabulary_file))
    assert (done["samples"], done["images"], done["skipped"]) == (3, 3, 4)
    info = _C.dataset_info(_C.dataset_open(str(out)))
    vocabulary = pack.load_vocabulary(str(vocabulary_file))
    v = vocabulary.n_ids
    assert info["tokenizer"] == vocabulary.name and info["pad_id"] == v and info["vocab_size"] == (v + 6 + 7) // 8 * 8
    assert v > 256
    for sample, (tokens, labels) in rows(out).items():
        ask, answer = vocabulary.encode(list(TEXTS[sample]))
        assert len(answer) < len(TEXTS[sample][1].encode())  # words, not bytes
        head = [info["bos_id"], info["human_id"], info["image_id"], *ask, info["gpt_id"]]
        assert tokens == [*head, *answer, info["eos_id"]]
        assert labels == [-100] * len(head) + [*answer, info["eos_id"]]


def test_captions_become_answers(folder, vocabulary_file, tmp_path):
    by_ids, by_bytes = tmp_path / "ids", tmp_path / "bytes"
    pack.pack_folder(str(by_ids), str(folder), str(vocabulary_file), "captions.jsonl")
    _C.pack_folder(str(by_bytes), str(folder), "captions.jsonl", None, 0)
    one, other = (_C.dataset_open(str(p)) for p in (by_ids, by_bytes))
    for i in range(3):
        a, b = _C.dataset_get(one, i), _C.dataset_get(other, i)
        assert (a["id"], a["image"]) == (b["id"], b["image"])
        assert json.loads(a["text"])["turns"] == json.loads(b["text"])["turns"]
        assert json.loads(a["text"])["turns"][1]["value"] == TEXTS[i][1]


def test_broken_records_are_named(folder, vocabulary_file, tmp_path, capfd):
    assert pack.main(["--from", str(folder), str(tmp_path / "set"), f"--tokenizer={vocabulary_file}"]) == 0
    out, err = capfd.readouterr()
    assert "3 samples, 3 images" in out and "4 skipped" in out
    assert "skipped line 4" in err and "skipped line 5" in err and "skipped nobody" in err


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (["--from", "nowhere", "out", "--tokenizer", "{v}"], 1, "no folder nowhere"),
        (["--from", "{f}", "out", "--tokenizer", "{f}"], 1, "expected a folder with"),
        (["--from", "{f}", "--tokenizer", "{v}"], 2, "expected --from DIR OUT"),
        (["--from", "{f}", "out", "--tokenizer", "{v}", "--qualty", "3"], 2, "unknown argument '--qualty'"),
        (["--from", "{f}", "out", "--tokenizer", "{v}", "--quality", "300"], 1, "quality is"),
        (["--from", "{f}", "{f}", "--tokenizer", "{v}"], 1, "exists already"),
        (["--from", "{f}", "{f}", "--overwrite", "--tokenizer", "{v}"], 1, "no set made by pack"),
    ],
)
def test_bad_calls_are_told_in_one_line(folder, vocabulary_file, capfd, args, code, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"{f}": str(folder), "{v}": str(vocabulary_file)}
    before = sorted(p.name for p in folder.iterdir())
    assert pack.main([names.get(a, a) for a in args]) == code
    err = [line for line in capfd.readouterr().err.splitlines() if "skipped" not in line]
    assert len(err) == 1 and err[0].startswith("loongforge: ") and text in err[0]
    assert sorted(p.name for p in folder.iterdir()) == before


def test_real_vocabularies(test_data):
    pytest.importorskip("tokenizers")
    gpt2 = pack.load_vocabulary(str(test_data / "tokenizer/gpt2"))
    assert gpt2.n_ids == 50257 and gpt2.encode(["Hello world"]) == [[15496, 995]]
    clip = pack.load_vocabulary(str(test_data / "tokenizer/clip"))
    assert clip.n_ids == 49408 and clip.encode(["hello world!"]) == [[3306, 1002, 256]]


def test_real_folders_with_gpt2(test_data, tmp_path):
    pytest.importorskip("tokenizers")
    for name, n in (("coco-mini-ccby", 22), ("openstax-microbiology", 45)):
        out = tmp_path / name
        source = test_data / "image_text" / name
        done = pack.pack_folder(str(out), str(source), str(test_data / "tokenizer/gpt2"))
        assert (done["samples"], done["skipped"]) == (n, 0)
        found = rows(out, seq_len=2048, bad_samples="error")
        assert len(found) == n and all(max(tokens) < 50264 for tokens, _ in found.values())


# ---- the extension's functions -------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def scenes(tmp_path_factory):
    path = tmp_path_factory.mktemp("scenes") / "set"
    _C.pack_scenes(str(path), {"scenes": 24, "seed": 5})
    return path


def digest(batch):
    n = batch["n"] * 3 * batch["image_size"] ** 2
    return batch["epoch"], array(batch["index"], ctypes.c_int64, batch["n"]), ctypes.string_at(batch["images"], n * 4)


def follow(scenes, batches, state=None, **options):
    options = {"batch_size": 4, "image_size": 16, "augment": True, **options}
    loader = _C.loader_open(_C.dataset_open(str(scenes)), _C.device_open("cpu"), options)
    if state:
        _C.loader_set_state(loader, state)
    seen, states = [], [_C.loader_get_state(loader)]
    for _ in range(batches):
        batch = _C.loader_next(loader, 0)
        seen.append(digest(batch))
        _C.loader_release(loader, batch, 0)
        states.append(_C.loader_get_state(loader))
    stats = _C.loader_stats(loader)
    assert stats["batches"] == batches and stats["samples"] == 4 * batches and stats["bad_samples"] == 0
    assert _C.loader_bad_samples(loader) == "" and _C.loader_batches_per_epoch(loader) == 6
    loader.close()
    return seen, states


def test_resume_through_the_extension(scenes):
    whole, states = follow(scenes, 12)
    assert sorted(i for _, index, _ in whole[:6] for i in index) == list(range(24))
    for at in (0, 1, 5, 6, 11):
        rest, _ = follow(scenes, 12 - at, states[at], depth=2, threads=1)
        assert rest == whole[at:]


def test_handles_outlive_each_other(scenes):
    data = _C.dataset_open(str(scenes))
    loader = _C.loader_open(data, _C.device_open("cpu"), {"batch_size": 2, "image_size": 8, "depth": 2})
    data.close()
    first, second = _C.loader_next(loader, 0), _C.loader_next(loader, 0)
    with pytest.raises(_C.Error, match="held"):
        _C.loader_next(loader, 0)
    _C.loader_release(loader, first, 0)
    with pytest.raises(_C.Error, match="released before"):
        _C.loader_release(loader, first, 0)
    with pytest.raises(KeyError):
        _C.loader_release(loader, {}, 0)
    assert digest(second) != digest(_C.loader_next(loader, 0))
    with pytest.raises(ValueError):
        _C.dataset_info(data)
    with pytest.raises(TypeError):
        _C.loader_next(_C.device_open("cpu"), 0)
    with pytest.raises(_C.Error, match="did you mean 'batch_size'"):
        _C.loader_open(_C.dataset_open(str(scenes)), _C.device_open("cpu"), {"batch_sise": 2})


def test_progress_is_told_and_may_cancel(tmp_path):
    calls = []
    _C.pack_scenes(str(tmp_path / "a"), {"scenes": 300}, lambda done, total: calls.append((done, total)))
    assert calls == [(256, 300), (300, 300)]
    with pytest.raises(_C.Error, match="cancelled after 256 of 300"):
        _C.pack_scenes(str(tmp_path / "b"), {"scenes": 300}, lambda done, total: True)

    def fail(done, total):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        _C.pack_scenes(str(tmp_path / "b"), {"scenes": 300}, fail)
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("size", [16, 24, 60, 100])
@pytest.mark.parametrize("kind", ["plain", "grey", "ink", "turned"])
def test_pixels_are_those_of_pillow(kind, size):
    Image = pytest.importorskip("PIL.Image")
    from PIL import ImageOps

    save = {"grey": {"mode": "L"}, "ink": {"mode": "CMYK"}}.get(kind, {})
    if kind == "turned":
        exif = Image.Exif()
        exif[0x0112] = 6
        save = {"exif": exif}
    data = jpeg(**save)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    want = upright.resize((size, size), Image.Resampling.BILINEAR)
    got = _C.decode_image(data, size)
    differences = sorted(abs(a - b) for a, b in zip(got, want.tobytes()))
    # Rounding between the two passes; where libjpeg decodes at a smaller scale, its average instead of a triangle.
    assert differences[len(differences) // 2] <= 1 and differences[-1] <= (1 if size >= 24 else 24)


def test_bad_images_raise(tmp_path):
    data = jpeg()
    with pytest.raises(_C.Error, match="premature end|ends"):
        _C.decode_image(data[: len(data) // 2], 16)
    with pytest.raises(_C.Error, match="PNG"):
        _C.decode_image(b"\x89PNG\r\n\x1a\n" + bytes(100), 16)
    with pytest.raises(_C.Error, match="max_pixels"):
        _C.decode_image(data, 16, 100)
    with pytest.raises(ValueError):
        _C.decode_image(data, 0)
