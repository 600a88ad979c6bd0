"""build_datasets(): which sample comes when, on one process and on two."""

import json
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from nvfp4.data.config import DataConfig, Source
from nvfp4.data.indexed import PrefixWriter
from nvfp4.data.prepare import prepare
from nvfp4.errors import UserError

warnings.filterwarnings("ignore", module="megatron")
from nvfp4.data.blend import build_datasets  # noqa: E402

ROOT = Path(__file__).parent.parent
SEQ = 16


def write_pair(prefix: Path, documents: int, offset: int) -> Source:
    """Documents of 5 to 44 tokens, every token of the pair another one, and EOD = 0 at each end."""
    lengths = np.random.default_rng(offset).integers(5, 45, documents)
    ids = iter(range(offset, offset + int(lengths.sum())))
    with PrefixWriter(prefix, "<i4") as writer:
        for length in lengths:
            writer.add(np.array([next(ids) for _ in range(length - 1)] + [0]))
        writer.finish({"eod": 0})
    return Source(str(prefix))


def prepared(tmp_path, *train, **keys):
    keys.setdefault("valid_fraction", 0.25)
    settings = DataConfig(train=train, cache_dir=str(tmp_path / "cache"), **keys)
    return prepare(settings, vocab_size=100_000, echo=None)


def build(data, train_samples=40, valid_samples=8, seed=1, seq_length=SEQ, **keys):
    return build_datasets(
        data, seq_length=seq_length, train_samples=train_samples, valid_samples=valid_samples,
        seed=seed, **keys,
    )  # fmt: skip


def numbers(samples, count=None) -> list[list[int]]:
    return [samples[i]["tokens"].tolist() for i in range(count or len(samples))]


@pytest.fixture
def data(tmp_path):
    return prepared(tmp_path, write_pair(tmp_path / "a", 60, 1))


def test_items(data):
    train, valid = build(data)
    assert (len(train), len(valid)) == (40, 8)
    ends = 0
    for samples in (train, valid):
        for i in range(len(samples)):
            item = samples[i]
            shapes = {key: (tuple(value.shape), str(value.dtype)) for key, value in item.items()}
            assert shapes == {
                "tokens": ((SEQ,), "torch.int64"), "labels": ((SEQ,), "torch.int64"),
                "position_ids": ((SEQ,), "torch.int64"), "loss_mask": ((SEQ,), "torch.float32"),
            }  # fmt: skip
            assert item["labels"][:-1].tolist() == item["tokens"][1:].tolist()
            assert item["position_ids"].tolist() == list(range(SEQ))
            ends += int((item["labels"] == 0).sum())
            assert item["loss_mask"].tolist() == [1.0] * SEQ  # ends of documents count, too
    assert ends > 10
    for wrong in (-1, 40):
        with pytest.raises(IndexError):
            train[wrong]


def test_sides_share_no_token(data):
    train, valid = build(data, train_samples=200, valid_samples=50)
    seen = [{t for sample in numbers(s) for t in sample} - {0} for s in (train, valid)]
    assert seen[0] and seen[1] and not seen[0] & seen[1]


def test_an_epoch_holds_every_sample_once(data):
    per_epoch = (data.train[0].tokens - 1) // SEQ
    train, _ = build(data, train_samples=4 * per_epoch)
    epochs = [
        [train.locate(i)[1] for i in range(e * per_epoch, (e + 1) * per_epoch)] for e in range(4)
    ]
    assert all(sorted(epoch) == list(range(per_epoch)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    order = [t for sample in numbers(train, per_epoch) for t in sample]
    assert len(set(order) - {0}) == len([t for t in order if t])  # no token twice in an epoch


def test_order_depends_on_data_and_seed_alone(tmp_path, data):
    short, valid = build(data, train_samples=10)
    long, same_valid = build(data, train_samples=500)
    elsewhere, _ = build(data, train_samples=500, cache_dir=str(tmp_path / "other"))
    assert numbers(short) == numbers(long, 10)
    assert numbers(long) == numbers(elsewhere)
    backwards = [long[i]["tokens"].tolist() for i in reversed(range(500))]
    assert backwards[::-1] == numbers(elsewhere)
    other, other_valid = build(data, train_samples=10, seed=2**40 + 7)
    assert numbers(other) != numbers(short)
    assert numbers(valid) == numbers(same_valid) == numbers(other_valid)


def test_more_validation_samples_than_there_are(data):
    there = (data.valid[0].tokens - 1) // SEQ
    _, valid = build(data, valid_samples=2 * there)
    first, second = numbers(valid)[:there], numbers(valid)[there:]
    assert sorted(first) == sorted(second)


def test_blend_follows_the_weights_from_the_start(tmp_path):
    a, b, c = (write_pair(tmp_path / n, 60, o) for n, o in (("a", 1), ("b", 10_000), ("c", 20_000)))
    data = prepared(tmp_path, *(Source(s.path, w) for s, w in ((a, 5.0), (b, 3.0), (c, 2.0))))
    train, valid = build(data, train_samples=1000)
    drawn = [max(sample) // 10_000 for sample in numbers(train)]
    for count in (10, 100, 1000):
        shares = np.bincount(drawn[:count], minlength=3) / count
        assert np.abs(shares - [0.5, 0.3, 0.2]).max() <= 1.5 / count
    assert {max(sample) // 10_000 for sample in numbers(valid)} == {0, 1, 2}
    assert numbers(build(data, train_samples=50)[0]) == numbers(train, 50)


def test_a_new_pair_under_the_old_name_is_noticed(tmp_path, data):
    before = numbers(build(data)[0])
    changed = prepared(tmp_path, write_pair(tmp_path / "a", 60, 5000))
    after = numbers(build(changed)[0])
    assert (
        changed.hash != data.hash and min(t for s in after for t in s if t) >= 5000 > before[0][0]
    )


def test_too_small_for_one_sample(data):
    with pytest.raises(UserError, match=r"/a: \d+ validation tokens, too few .*seq_length=900"):
        build(data, seq_length=900)


RANK = """
import json, os, sys, warnings
warnings.simplefilter("ignore")
rank, folder, path = int(sys.argv[1]), sys.argv[2], sys.argv[3]
import torch.distributed as dist
dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{folder}/rendezvous")
from nvfp4.data.blend import build_datasets, prepare
from nvfp4.data.config import DataConfig, Source
from nvfp4.errors import UserError

def attempt(*paths):
    train = tuple(map(Source, paths))
    config = DataConfig(train=train, valid_fraction=0.25, cache_dir=folder + "/shared")
    try:
        return prepare(config, vocab_size=100_000, echo=print if rank == 0 else None)
    except UserError as error:
        said.append(str(error))

said = []
attempt("absent.txt" if rank == 0 else path)
attempt(path if rank == 0 else path + "b")
data = attempt(path, path + "b")
train, valid = build_datasets(data, seq_length=16, train_samples=60, valid_samples=4, seed=3)
tokens = [s[i]["tokens"].tolist() for s in (train, valid) for i in range(rank, len(s), 2)]
json.dump([said, data.hash, tokens], open(f"{folder}/rank{rank}.json", "w"))
dist.barrier()
dist.destroy_process_group()
"""


def test_two_ranks(tmp_path):
    """Both raise rank 0's error, refuse different data, and draw the samples that one would."""
    source, more = write_pair(tmp_path / "a", 60, 1), write_pair(tmp_path / "ab", 60, 9000)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path), source.path], cwd=ROOT
        )
        for rank in (0, 1)
    ]
    assert [rank.wait(timeout=170) for rank in ranks] == [0, 0]
    first, second = (json.loads((tmp_path / f"rank{r}.json").read_text()) for r in (0, 1))
    data = prepared(tmp_path, source, more)
    train, valid = build(data, train_samples=60, valid_samples=4, seed=3)
    assert first[1] == second[1] == data.hash
    assert [t for pair in zip(first[2], second[2], strict=True) for t in pair] == [
        *numbers(train), *numbers(valid)
    ]  # fmt: skip
    assert first[0] == second[0]
    assert first[0][0].startswith("absent.txt: no such file")
    assert first[0][1].startswith("rank 1 sees other data than rank 0 (data hash ")
