"""Once an arena is given back, or reported full, no thread writes into it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.checkpoint import Checkpointer
from headrace.checkpoint.format.chunking import CHUNK_BYTES, Piece, TensorSpec, lay_out, whole
from headrace.checkpoint.gds.saving import DeviceSlices
from headrace.checkpoint.saving import commit_worker, copying
from headrace.checkpoint.saving.arena import Arena, Staging
from headrace.checkpoint.saving.copy_threads import CopyPool
from headrace.checkpoint.saving.copying import Copying
from headrace.checkpoint.saving.plan import PutPlan
from headrace.checkpoint.saving.slices import SlicedState
from headrace.checkpoint.saving.upload import Stored
from headrace.dataio.core.errors import DeadlineError, TransientError
from headrace.dataio.core.limits import MIB
from tests.support.gds_host import Counts
from tests.support.waiting import wait_for


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(64 * MIB)
    yield made
    made.close()


@pytest.fixture
def pool() -> Iterator[CopyPool]:
    with CopyPool(1) as made:
        yield made


def laid_out(*tensors: torch.Tensor) -> dict[str, Any]:
    specs = [TensorSpec(f"t{i}", "uint8", whole((t.numel(),))) for i, t in enumerate(tensors)]
    return {"specs": specs, "layout": lay_out(specs)}


def test_a_failed_save_in_slices_gives_the_arena_back_once_no_thread_fills_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    feeding: list[list[threading.Thread]] = []
    fired: list[int] = []
    give_back, gather = Staging.give_back, SlicedState._gather

    def seen(staging: Staging) -> None:
        feeding.append([thread for thread in threading.enumerate() if thread.name == "headrace-slices"])
        give_back(staging)

    def slowly(*given: Any) -> None:
        time.sleep(0.02)
        gather(*given)

    def away(arena: SlicedState, plan: PutPlan, *_: object) -> Stored:
        fired.append(plan.step)
        assert arena[0:CHUNK_BYTES]
        raise TransientError("the store is away")

    monkeypatch.setattr(Staging, "give_back", seen)
    monkeypatch.setattr(SlicedState, "_gather", slowly)
    state = {"x": torch.zeros(70 * MIB, dtype=torch.uint8)}
    given: dict[str, Any] = {"staging": "lazy", "staging_bytes": 64 * MIB, "on_save_error": "log"}
    with Checkpointer(str(tmp_path), run="exp", sidecar=None, **given) as checkpointer:
        with monkeypatch.context() as patched:
            patched.setattr(commit_worker, "upload", away)
            failed = checkpointer.save(1, state)
            with pytest.raises(TransientError, match="is away"):
                failed.result(60)
        assert checkpointer.save(2, state).result(60).sliced
    assert fired == [1]
    assert feeding == [[], []]


class Paused(SlicedState):
    """Its feeder has published all there is, and has not ended yet."""

    def __init__(self, *given: Any, **named: Any) -> None:
        self.over = threading.Event()
        super().__init__(*given, **named)

    def _publish(self, piece: Piece, *rest: Any) -> None:
        super()._publish(piece, *rest)
        if piece is self._pieces[-1]:
            assert self.over.wait(150)


def test_slices_that_were_all_taken_away_are_a_copy_that_succeeded(arena: Arena) -> None:
    tensor = torch.arange(CHUNK_BYTES + 5) % 251
    tensor = tensor.to(torch.uint8)
    sliced = Paused(arena, [tensor], **laid_out(tensor))
    parts = [bytes(sliced[piece.at : piece.at + piece.length]) for piece in list(sliced._pieces)]
    assert b"".join(parts) == tensor.numpy().tobytes()
    ending = threading.Thread(target=sliced.cancel)
    ending.start()
    ending.join(0.05)
    assert ending.is_alive()  # it waits for the feeder
    sliced.over.set()
    ending.join(150)
    sliced.wait(150)


def test_slices_that_are_never_taken_away_are_given_up_and_say_so(arena: Arena) -> None:
    tensor = torch.zeros(arena.size + 1, dtype=torch.uint8)
    sliced = SlicedState(arena, [tensor], **laid_out(tensor))
    sliced.cancel()
    assert not sliced._feeder.is_alive()
    with pytest.raises(TransientError, match="cancelled"):
        sliced.wait(150)
    with pytest.raises(TransientError, match="cancelled"):
        sliced[arena.size : arena.size + 1]


def test_slices_of_device_memory_end_as_often_as_one_likes(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    direct, released = Counts().direct(), list[int]()
    monkeypatch.setattr(type(direct), "release", lambda _self, buffer: released.append(buffer.data_ptr()))
    tensor = torch.zeros(5, dtype=torch.uint8)
    sliced = DeviceSlices(direct, arena, tensors=[tensor], **laid_out(tensor))
    sliced.cancel()
    sliced.cancel()
    assert len(released) == len(set(released)) == arena.size // CHUNK_BYTES


class FakeEvent:
    """An event of a device whose copies are complete after the first wait."""

    def __init__(self) -> None:
        self.recorded = self.over = False

    def record(self, _stream: object) -> None:
        self.recorded = True

    def wait(self, _stream: object) -> None:
        """The device waits, no thread here."""

    def synchronize(self) -> None:
        self.over = True


def test_a_copy_that_fails_at_once_leaves_no_device_at_work(
    arena: Arena, pool: CopyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[FakeEvent] = []

    def queued(self: Any, _rows: object, *, hold: bool) -> None:
        if hold:
            events.append(FakeEvent())
            self._events.append((torch.device("cuda"), events[-1]))

    def broken(*_: object) -> None:
        raise MemoryError("no memory for a row")

    monkeypatch.setattr(Copying, "_enqueue_devices", queued)
    monkeypatch.setattr(copying, "_copy", broken)
    tensor = torch.zeros(5, dtype=torch.uint8)
    with pytest.raises(MemoryError):
        Copying(pool, arena, tensors=[tensor], **laid_out(tensor))
    assert [event.over for event in events] == [True]


def test_what_a_device_was_given_before_an_error_is_waited_for_too(
    arena: Arena, pool: CopyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []

    def strided(_arena: Arena, _source: object, at: int) -> None:
        given.append(at)
        if len(given) == 2:
            raise torch.OutOfMemoryError("no memory for what is conjugate")

    monkeypatch.setattr(copying, "_copy_strided", strided)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _device: SimpleNamespace(wait_stream=lambda _: None))
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _stream: torch.no_grad())
    there: Any = SimpleNamespace(device=torch.device("cuda", 0), record_stream=lambda _: None)
    made = Copying(pool, arena, tensors=[], **laid_out())
    with pytest.raises(torch.OutOfMemoryError):
        made._enqueue_devices([(there, 0), (there, 8)], hold=True)
    made.cancel()
    assert [(event.recorded, event.over) for _, event in made._events] == [(True, True)]  # type: ignore[attr-defined]


def test_a_copy_is_whole_only_when_the_trainer_that_helps_has_copied_its_piece(
    arena: Arena, pool: CopyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker must not read what an optimizer's step is still copying."""
    inner, at_work, go_on = copying._copy, list[str](), {"pool": threading.Event(), "trainer": threading.Event()}

    def held(*given: Any) -> None:
        actor = "trainer" if threading.current_thread().name == "trainer" else "pool"
        at_work.append(actor)
        assert go_on[actor].wait(150)
        inner(*given)

    monkeypatch.setattr(copying, "_copy", held)
    tensors = [torch.full((9 * MIB,), value, dtype=torch.uint8) for value in (1, 2)]
    planned = laid_out(*tensors)
    made = Copying(pool, arena, tensors=tensors, **planned, late=(0, 1))
    wait_for(lambda: at_work == ["pool"])
    trainer = threading.Thread(target=made.gate, name="trainer")
    trainer.start()
    wait_for(lambda: at_work == ["pool", "trainer"])
    go_on["pool"].set()
    with pytest.raises(DeadlineError):
        made.join(0.2)
    go_on["trainer"].set()
    made.join(150)
    trainer.join(150)
    assert [bytes(arena.bytes[at : at + 9 * MIB]) for at in planned["layout"].offsets] == [
        t.numpy().tobytes() for t in tensors
    ]
