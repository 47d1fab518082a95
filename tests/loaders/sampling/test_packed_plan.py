"""Several recordings in a row: each in its place, on any world size, resumed, and silent where one is damaged."""

from __future__ import annotations

import json
import shutil
import wave
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.dataio import pack
from headrace.dataio.core.errors import UsageError
from headrace.dataio.shards.dataset import Dataset
from headrace.loaders import AudioLoader, AudioSpec, Durations, LogMel, Mixture, Packing, Window
from headrace.loaders.audio.mel import log_mel
from headrace.loaders.processors.audio import lengths as lengths_at
from headrace.loaders.sampling.packing import pack as packed_by
from headrace.loaders.sampling.permutation import key_of
from headrace.loaders.sampling.plan import _PACK

pytestmark = pytest.mark.slow

RATE = 8_000
LENGTHS = [0.1, 0.45, 0.3, 0.8, 0.2, 1.7, 0.5, 0.25, 0.6, 0.35, 0.15, 0.9]
PACKING = Packing(RATE, lookahead=5)
MEL = LogMel(20, n_fft=64, hop_length=25, f_max=3_900)
Make = Callable[..., AudioLoader]


def tone(number: int) -> np.ndarray:
    """The sound of recording `number`: int16, no two alike at any moment."""
    samples = round(LENGTHS[number] * RATE)
    return (np.random.default_rng(number).integers(-20_000, 20_000, samples)).astype(np.int16)


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dataset]:
    folder = tmp_path_factory.mktemp("wav")
    for number in range(len(LENGTHS)):
        with wave.open(str(folder / f"{number:02}.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(RATE)
            file.writeframes(tone(number).tobytes())
    with pack([folder], tmp_path_factory.mktemp("wavs") / "ds", shard_bytes=1 << 15, workers=1) as packed:
        yield packed


@pytest.fixture
def make(recordings: Dataset) -> Iterator[Make]:
    made = []

    def loader(source: Any = recordings, batch_size: int | None = 2, **options: Any) -> AudioLoader:
        settings: dict[str, Any] = {
            "packing": PACKING,
            "sample_rate": RATE,
            "sidecar": None,
            "num_threads": 2,
            "drop_last": False,
        }
        made.append(AudioLoader(source, batch_size, **(settings | options)))
        return made[-1]

    yield loader
    for one in made:
        one.close()


def rows(batch: dict[str, Any]) -> list[tuple[torch.Tensor, Any, list[str], list[float]]]:
    if batch["audio"] is None:
        return []
    return list(zip(batch["audio"], batch["pieces"].copy(), batch["key"], batch["start"], strict=True))


def take(loader: AudioLoader, count: int) -> list[dict[str, Any]]:
    return [batch for _, batch in zip(range(count), loader, strict=False)]


def test_every_sample_of_every_recording_comes_once_an_epoch_and_all_else_is_silence(make: Make) -> None:
    loader = make()
    for _ in range(2):
        heard = {f"{number:02}": np.zeros(len(tone(number)), np.int64) for number in range(len(LENGTHS))}
        for batch in loader:
            for sound, pieces, keys, starts in rows(batch):
                assert sound.shape == (1, RATE)
                rest = torch.ones(RATE, dtype=torch.bool)
                for (begin, end), key, start in zip(pieces.tolist(), keys, starts, strict=True):
                    first = round(start * RATE)
                    expected = tone(int(key))[first : first + end - begin] / 32768
                    assert np.abs(sound[0, begin:end].numpy() - expected).max() < 1e-6
                    heard[key][first : first + end - begin] += 1
                    rest[begin:end] = False
                assert not sound[0, rest].any()
        assert all((counts == 1).all() for counts in heard.values())


def heard(batches: list[dict[str, Any]]) -> list[tuple[tuple[str, ...], ...]]:
    """Which recordings share each row."""
    return [tuple(tuple(keys) for keys in batch["key"]) for batch in batches]


ANEW = Packing(RATE, lookahead=3, repack_each_epoch=True)


def test_packed_anew_other_recordings_share_a_row_in_each_epoch_and_all_come_once(make: Make) -> None:
    loader = make(packing=ANEW)
    partners = []
    for epoch in range(6):
        assert loader.epoch == epoch
        (packed,) = loader.packed
        batches = list(loader)
        assert sum(len(batch["key"]) for batch in batches) == len(packed)
        assert len(batches) == -(-len(packed) // 2)
        lasting = dict.fromkeys(map("{:02}".format, range(len(LENGTHS))), 0)
        for batch in batches:
            for pieces, keys in zip(batch["pieces"], batch["key"], strict=True):
                for (begin, end), key in zip(pieces.tolist(), keys, strict=True):
                    lasting[key] += end - begin
        assert lasting == {f"{number:02}": len(tone(number)) for number in range(len(LENGTHS))}
        partners.append({frozenset(keys) for batch in batches for keys in batch["key"]})
    assert len({frozenset(rows) for rows in partners}) > 3


def test_a_mixture_packed_anew_plays_every_recording_once_in_each_epoch_of_its_source(
    make: Make, recordings: Dataset
) -> None:
    halves = {"a": recordings, "b": recordings.where("key >= '06'")}
    packing = Packing(2 * RATE, lookahead=4, repack_each_epoch=True)

    def mixed(**options: Any) -> AudioLoader:
        return make(Mixture(halves, weights={"a": 1, "b": 2}, epoch_batches=9), packing=packing, **options)

    loader = mixed(batch_size=6)
    rows_of: dict[str, list[tuple[str, ...]]] = {"a": [], "b": []}
    whole = []
    for _ in range(6):
        for batch in loader:
            whole.append([tuple(keys) for keys in batch["key"]])
            for source, keys in zip(batch["source"], batch["key"], strict=True):
                rows_of[source[0]].append(tuple(sorted(keys)))
    for stream, (name, mine) in zip(loader._plan.streams, sorted(rows_of.items()), strict=True):
        count = len(stream.sequences)  # type: ignore[attr-defined]
        epochs = [mine[first : first + count] for first in range(0, len(mine) - count + 1, count)]
        assert len(epochs) >= 3
        assert len({frozenset(epoch) for epoch in epochs}) > 1  # other recordings share a row
        expected = Counter(key for sequence in range(count) for key in _keys_of(stream, 0, sequence))
        for number in range(4):
            assert Counter(key for at in range(count) for key in _keys_of(stream, number, at)) == expected
        assert set(expected) == {f"{n:02}" for n in (range(12) if name == "a" else range(6, 12))}
    ranks = [mixed(batch_size=3, rank=rank, world_size=2) for rank in range(2)]
    parts = [[[tuple(keys) for keys in batch["key"]] for batch in rank] for rank in ranks]
    assert [a + b for a, b in zip(*parts, strict=True)] == whole[:9]
    last = mixed(batch_size=2, rank=2, world_size=3)
    last.load_state_dict(json.loads(json.dumps(ranks[0].state_dict())) | {"epoch": 3, "batch": 4})
    assert [[tuple(keys) for keys in batch["key"]] for batch in last] == [row[4:] for row in whole[31:36]]


def _keys_of(stream: Any, epoch: int, sequence: int) -> list[str]:
    pieces = stream.at(epoch).sequence(sequence)
    return [stream.dataset.sample(int(stream.ids[piece.sample])).key for piece in pieces]


def test_packed_anew_any_world_size_and_any_resume_see_the_same_rows(make: Make) -> None:
    alone = make(batch_size=6, packing=ANEW)
    whole = [row for _ in range(3) for row in heard(list(alone))]
    ranks = [make(batch_size=3, packing=ANEW, rank=rank, world_size=2) for rank in range(2)]
    found = []
    for _ in range(2):
        found += [sum(parts, ()) for parts in zip(*(heard(list(rank)) for rank in ranks), strict=True)]
    state = json.loads(json.dumps(ranks[0].state_dict()))
    last = make(batch_size=6, packing=ANEW)
    last.load_state_dict(state)
    found += heard(list(last))
    assert found == whole
    middle = make(batch_size=2, packing=ANEW, rank=2, world_size=3)
    middle.load_state_dict(state | {"epoch": 2, "batch": 1})
    assert heard(list(middle)) == [row[2 * len(row) // 3 :] for row in heard(list(_third(make)))[1:]]
    loss = make(batch_size=6, packing=PACKING).load_state_dict(state, force=True)
    assert loss is not None


def _third(make: Make) -> AudioLoader:
    loader = make(batch_size=6, packing=ANEW)
    loader.load_state_dict(loader.state_dict() | {"epoch": 2})
    return loader


def test_packed_anew_an_epoch_that_would_fill_no_batch_is_packed_as_the_first(make: Make) -> None:
    loader = make(packing=Packing(RATE, lookahead=2, repack_each_epoch=True), batch_size=11, drop_last=True)
    stream = loader._plan.streams[0]
    lengths = lengths_at(stream, AudioSpec(RATE))
    alone = [len(packed_by(lengths, loader.packed[0].packing, key_of(_PACK, 0, epoch))) for epoch in range(6)]
    assert alone == [11, 9, 10, 9, 8, 11]  # no batch can be made of the four between
    expected_rows, states = [], []
    for epoch in range(6):
        assert (loader.epoch, len(loader), len(loader.packed[0])) == (epoch, 1, 11)
        states.append(json.loads(json.dumps(loader.state_dict())))
        (batch,) = loader
        expected_rows.append(heard([batch]))
    rows_of = [{frozenset(keys) for keys in one[0]} for one in expected_rows]
    assert rows_of[0] == rows_of[1] == rows_of[4] != rows_of[5]
    assert expected_rows[0] != expected_rows[1]  # its rows in another order
    for epoch in (5, 2):
        loader.load_state_dict(states[epoch])
        assert heard(list(loader)) == expected_rows[epoch]


def test_the_loader_says_how_much_is_padding(make: Make) -> None:
    (packed,) = make().packed
    total = sum(len(tone(number)) for number in range(len(LENGTHS)))
    assert packed.waste == pytest.approx(1 - total / (len(packed) * RATE))
    assert packed.waste < packed.waste_alone / 2
    assert packed.dropped == 0
    (shorter,) = make(packing=Packing(RATE, long="drop")).packed
    assert shorter.dropped == 1


def test_any_world_size_sees_the_same_rows_and_resumes(make: Make) -> None:
    whole = [row for batch in make(batch_size=6, seed=4) for row in rows(batch)]
    ranks = [make(batch_size=3, seed=4, rank=rank, world_size=2) for rank in range(2)]
    first = [take(rank, 1)[0] for rank in ranks]
    state = json.loads(json.dumps(ranks[0].state_dict()))
    assert state == ranks[1].state_dict()
    later = [make(batch_size=2, seed=4, rank=rank, world_size=3) for rank in range(3)]
    for rank in later:
        rank.load_state_dict(state)
    found = [row for batch in first for row in rows(batch)]
    parts = [list(rank) for rank in later]
    for step in range(len(parts[0])):
        found += [row for part in parts for row in rows(part[step])]
    assert len(found) == len(whole)
    for (a, b, c, d), (e, f, g, h) in zip(whole, found, strict=True):
        assert torch.equal(a, e)
        assert torch.equal(b, f)
        assert (c, d) == (g, h)


def test_a_damaged_recording_is_silent_and_unlisted_and_nothing_else_moves(
    make: Make, recordings: Dataset, tmp_path: Path
) -> None:
    copy = tmp_path / "damaged"
    shutil.copytree(recordings.url.removeprefix("file://"), copy)
    sample = recordings.find("06")
    with (copy / sample.shard).open("r+b") as shard:
        shard.seek(sample.members[0].offset + 200)
        shard.write(b"\x00" * 50)
    silent = 0
    bad = make(str(copy))
    for right, found in zip(make(), bad, strict=True):
        for (sound, pieces, keys, _), (other, left, names, _) in zip(rows(right), rows(found), strict=True):
            assert names == [key for key in keys if key != "06"]
            for (begin, end), key in zip(pieces.tolist(), keys, strict=True):
                if key == "06":
                    silent += 1
                    assert not other[:, begin:end].any()
                    assert [begin, end] not in left.tolist()
                else:
                    assert torch.equal(sound[:, begin:end], other[:, begin:end])
    assert silent == 1
    assert [refusal.key for refusal in bad.quarantine] == ["06"]


@pytest.mark.parametrize(("features", "shape"), [("waveform", (1, PACKING.capacity)), (MEL, (1, 20, 400))])
def test_rows_of_which_every_recording_is_damaged_are_silent(
    make: Make, recordings: Dataset, tmp_path: Path, features: Any, shape: tuple[int, ...]
) -> None:
    copy = tmp_path / "damaged"
    shutil.copytree(recordings.url.removeprefix("file://"), copy)
    for sample in recordings:
        with (copy / sample.shard).open("r+b") as shard:
            shard.seek(sample.members[0].offset + 200)
            shard.write(b"\x00" * 50)
    packing = PACKING if features == "waveform" else Packing(400)
    options = {"features": features, "packing": packing}
    whole, bad = make(**options), make(str(copy), max_bad_samples=100, **options)
    name = "audio" if features == "waveform" else "mel"
    silence = 0.0 if features == "waveform" else MEL.silence
    for right, found in zip(whole, bad, strict=True):
        assert found[name].shape == right[name].shape == (len(right["key"]), *shape)
        assert found[name].dtype == right[name].dtype
        assert (found[name] == silence).all()
        assert found["key"] == [[] for _ in right["key"]]
        assert [len(one) for one in found["pieces"]] == [0] * len(right["key"])
    assert len(bad.quarantine) == len(recordings)


def test_sources_of_a_mixture_are_packed_each_by_itself(make: Make, recordings: Dataset) -> None:
    views = {"short": recordings.where("duration < 0.4"), "long": recordings.where("duration >= 0.4")}
    loader = make(Mixture(views, weights={"short": 1, "long": 1}), batch_size=2)
    assert len(loader.packed) == 2
    for batch in take(loader, 4):
        assert all(len(set(names)) == 1 for names in batch["source"])
        for (_, _, keys, _), names in zip(rows(batch), batch["source"], strict=True):
            assert all((LENGTHS[int(key)] < 0.4) == (name == "short") for key, name in zip(keys, names, strict=True))


def test_rates_are_those_that_are_asked_for(make: Make, recordings: Dataset) -> None:
    loader = make(sample_rate=2 * RATE, packing=Packing(2 * RATE, lookahead=5))
    (batch,) = take(loader, 1)
    assert batch["audio"].shape == (2, 1, 2 * RATE)
    lengths = [end - begin for pieces in batch["pieces"] for begin, end in pieces.tolist()]
    assert set(lengths) <= {min(2 * len(tone(n)), 2 * RATE) for n in range(12)} | {2 * len(tone(5)) - 2 * RATE}
    stream = loader._plan.streams[0]
    assert len(packed_by(lengths_at(stream, AudioSpec(RATE)), PACKING)) == len(make().packed[0])


def test_buckets_of_durations_give_batches_of_one_length(make: Make) -> None:
    lengths = Durations((0.3, 1.0, 2.0), budget=2.4)
    loader = make(batch_size=None, packing=None, buckets=lengths, window=Window(start="center"))
    seen = []
    for batch in loader:
        seconds = lengths.seconds[batch["bucket"]]
        count, _, samples = batch["audio"].shape
        assert samples == round(seconds * RATE)
        assert count * seconds <= lengths.budget
        for key, real in zip(batch["key"], batch["audio_samples"].tolist(), strict=True):
            assert real == min(samples, len(tone(int(key))))
            assert min(s for s in lengths.seconds if s >= LENGTHS[int(key)]) == seconds
            seen.append(key)
    assert sorted(seen) == [f"{number:02}" for number in range(12)]


def test_what_does_not_go_with_packing_is_refused(make: Make, recordings: Dataset) -> None:
    for match, options in (
        ("leave window and buckets out", {"window": 1.0}),
        ("leave window and buckets out", {"buckets": Durations((1,), 5), "batch_size": None}),
        ("start='every'", {"buckets": Durations((1,), 5), "packing": None, "window": Window(start="every")}),
        ("nothing above 4000", {"features": LogMel(f_max=8_000)}),
    ):
        with pytest.raises(UsageError, match=match):
            make(**options)


@pytest.mark.parametrize(("log", "hop"), [("natural", 25), ("decadic", 25), ("natural", 1)])
def test_a_piece_of_a_spectrogram_is_that_of_its_sound_alone(make: Make, log: Any, hop: int) -> None:
    what = LogMel(20, n_fft=64, hop_length=hop, f_max=3_900, floor=1e-5, log=log)
    columns = RATE // hop  # a second
    seen = {f"{number:02}": list[int]() for number in range(len(LENGTHS))}
    for batch in make(features=what, packing=Packing(columns, lookahead=5)):
        for mel, pieces, keys, starts in zip(batch["mel"], batch["pieces"], batch["key"], batch["start"], strict=True):
            assert mel.shape == (1, 20, columns)
            rest = torch.ones(columns, dtype=torch.bool)
            for (begin, end), key, start in zip(pieces.tolist(), keys, starts, strict=True):
                sound = torch.from_numpy(tone(int(key))[round(start * RATE) :].astype(np.float32) / 32_768)
                alone = log_mel(sound[None, : max((end - begin) * hop, 33)], RATE, what)[..., : end - begin]
                assert torch.equal(mel[..., begin:end], alone)
                first = round(start * RATE) // hop
                seen[key] += range(first, first + end - begin)
                rest[begin:end] = False
            assert torch.equal(mel[..., rest], torch.full_like(mel[..., rest], what.silence))
    assert {key: sorted(found) for key, found in seen.items()} == {
        key: list(range(1 + len(tone(int(key))) // hop)) for key in seen
    }


def test_the_step_of_spectrograms_is_part_of_the_state(make: Make) -> None:
    what = LogMel(20, n_fft=64, hop_length=25, f_max=3_900)
    one, other = (
        make(features=w, packing=Packing(400)) for w in (what, LogMel(20, n_fft=64, hop_length=50, f_max=3_900))
    )
    with pytest.raises(UsageError, match="clip was"):
        other.load_state_dict(one.state_dict())


def test_a_state_does_not_fit_another_packing(make: Make) -> None:
    with pytest.raises(UsageError, match="clip was"):
        make(packing=Packing(RATE, lookahead=6)).load_state_dict(make().state_dict())
