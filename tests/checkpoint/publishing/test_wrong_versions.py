"""Ways to a wrong or mixed version: tied tensors, other tensors, races of publishers, late requests, failed changes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import pytest
import torch

from headrace.checkpoint import Checkpointer, Subscriber
from headrace.checkpoint.format.chunking import ITEM_BYTES, Box
from headrace.checkpoint.format.documents import encode
from headrace.checkpoint.publishing import changes, comparison, records, source, subscriber, targets, weights
from headrace.checkpoint.publishing.comparison import Held
from headrace.checkpoint.publishing.difference import Bytes
from headrace.checkpoint.publishing.publisher import publish
from headrace.checkpoint.publishing.records import Published
from headrace.checkpoint.publishing.source import Choice
from headrace.checkpoint.repository import steps
from headrace.checkpoint.state.tensors import as_bits
from headrace.dataio.core.clock import SYSTEM_CLOCK
from headrace.dataio.core.errors import ConflictError, CorruptionError, TransientError, UsageError
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store

State = dict[str, torch.Tensor]


class Versions:
    """Saves states and publishes them."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.store, self.step = directory, open_store(str(directory)), 0
        self.checkpointer = Checkpointer(directory, run="r", sidecar=None)

    def save(self, state: State) -> int:
        self.step += 1
        self.checkpointer.save(self.step, {"model": state}).result(60)
        return self.step

    def publish(self, state: State | None = None, step: int | None = None, held: Held | None = None) -> Published:
        base = steps.find(self.store, "r", step or self.save(state or {}))
        assert base is not None
        return publish(self.store, "policy", "r", base, Choice(("model/*",)), held=held)

    def rewrite(self, record: Published) -> None:
        """Store a record in place of the one with its number."""
        path = self.directory / records.key_of(record.name, record.number)
        path.write_bytes(encode(record))

    def tags(self) -> list[str]:
        return sorted(path.name for path in self.directory.glob("tags/*"))


@pytest.fixture
def versions(tmp_path: Path) -> Iterable[Versions]:
    versions = Versions(tmp_path / "repository")
    with versions.checkpointer:
        yield versions


def as_part(monkeypatch: pytest.MonkeyPatch, names: Iterable[str], box: Box) -> None:
    """Take these tensors as the part `box` of the published ones."""
    real = targets._local
    monkeypatch.setattr(targets, "_local", lambda tensor, name: (tensor, box) if name in names else real(tensor, name))


@pytest.mark.parametrize("whole", [True, False])
def test_tied_tensors_change_once(versions: Versions, monkeypatch: pytest.MonkeyPatch, whole: bool) -> None:
    first = torch.arange(6000.0).reshape(60, 100)
    second = first.clone()
    second[::7, ::9] += 1
    shared = torch.zeros(60, 100) if whole else torch.zeros(60, 50)
    if not whole:
        as_part(monkeypatch, ("a", "b"), Box((60, 100), (0, 50), (60, 50)))
    held, part = {"a": shared, "b": shared}, slice(0, 100) if whole else slice(50, 100)
    with Subscriber(versions.store, "policy") as following:
        for state in (first, second):
            versions.publish({"a": state, "b": state.clone()})
            following.wait(10).apply(held)
            assert torch.equal(shared, state[:, part])


def test_shared_memory_with_other_published_bytes_is_refused(versions: Versions) -> None:
    versions.publish({"a": torch.zeros(10), "b": torch.ones(10)})
    memory = torch.zeros(15)
    with Subscriber(versions.store, "policy") as following:
        for held in ({"a": memory[:10], "b": memory[:10]}, {"a": memory[:10], "b": memory[5:]}):
            with pytest.raises(UsageError, match="share memory"):
                following.wait(10).apply(held)
        assert not memory.any()
        memory = torch.zeros(20)
        following.wait(10).apply({"a": memory[:10], "b": memory[10:]})
    assert memory.tolist() == [0.0] * 10 + [1.0] * 10


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: torch.empty(10, device="meta"), "no memory"),
        (lambda: torch.zeros(1).expand(10), "not contiguous"),
        (lambda: torch.zeros(20)[::2], "not contiguous"),
        (lambda: [0.0] * 10, "not a tensor"),
        (lambda: torch.zeros(10).to_sparse(), "no memory"),
    ],
)
def test_tensors_that_cannot_be_written_are_refused(
    versions: Versions, make: Callable[[], torch.Tensor], text: str
) -> None:
    versions.publish({"a": torch.ones(10)})
    with Subscriber(versions.store, "policy") as following:
        with pytest.raises(UsageError, match=text):
            following.wait(10).apply({"a": make()})
        assert following.version is None


def test_conjugate_views_are_refused(versions: Versions) -> None:
    versions.publish({"a": torch.ones(10, dtype=torch.complex64)})
    with Subscriber(versions.store, "policy") as following, pytest.raises(UsageError, match="not contiguous"):
        following.wait(10).apply({"a": torch.zeros(10, dtype=torch.complex64).conj()})


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("shape", [(), (30, 7)])
def test_every_dtype_is_published(versions: Versions, shape: tuple[int, ...]) -> None:
    dtypes = {name: getattr(torch, name) for name in ITEM_BYTES if hasattr(torch, name)}
    elements = max(1, int(torch.tensor(shape).prod()))

    def state(seed: int) -> State:
        torch.manual_seed(seed)
        return {
            name: torch.randint(0, 2, (elements * ITEM_BYTES[name],), dtype=torch.uint8).view(dtype).reshape(shape)
            for name, dtype in dtypes.items()
        }

    held = {
        n: torch.zeros(elements * ITEM_BYTES[n], dtype=torch.uint8).view(d).reshape(shape) for n, d in dtypes.items()
    }
    with torch.inference_mode():
        held["float32"] = torch.zeros(shape)
    held["float64"].requires_grad_()
    with Subscriber(versions.store, "policy") as following:
        for seed in range(3):
            versions.publish(state(seed))
            following.wait(10).apply(held)
            for name, value in state(seed).items():
                assert torch.equal(as_bits(held[name].detach()), as_bits(value)), name


@pytest.mark.parametrize("dtype", [torch.complex128, torch.float8_e4m3fn, torch.bool])
@pytest.mark.parametrize(("offset", "local"), [((1, 2), (3, 5)), ((0, 0), (0, 0)), ((4, 0), (2, 7)), ((5, 3), (1, 2))])
def test_parts_of_all_sizes_of_elements(
    versions: Versions,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    offset: tuple[int, int],
    local: tuple[int, int],
) -> None:
    states = [torch.arange(42).reshape(6, 7).to(dtype)]
    for _ in range(3):
        states.append(states[-1].clone())
        bits = (
            as_bits(states[-1]) if dtype is not torch.complex128 else torch.view_as_real(states[-1]).view(torch.int64)
        )
        bits.view(-1)[::5] ^= 1
    held = {"a": torch.zeros(local, dtype=dtype)}
    as_part(monkeypatch, ("a",), Box((6, 7), offset, local))
    wanted = [state[offset[0] : offset[0] + local[0], offset[1] : offset[1] + local[1]] for state in states]
    with Subscriber(versions.store, "policy") as following:
        for number in (0, 1, 3):
            versions.publish({"a": states[number]})
            following.wait(10).apply(held)
            assert torch.equal(held["a"].view(torch.uint8), wanted[number].contiguous().view(torch.uint8))


def test_tensors_come_go_and_change_their_shape(versions: Versions) -> None:
    states: list[State] = [
        {"a": torch.arange(100.0), "b": torch.zeros(3)},
        {"b": torch.zeros(4)},
        {"a": torch.arange(50.0), "b": torch.zeros(3)},
        {"a": torch.arange(100.0) * 2, "b": torch.ones(3)},
    ]
    held = {"a": torch.zeros(100), "b": torch.zeros(3)}
    with Subscriber(versions.store, "policy") as following:
        versions.publish(states[0])
        following.wait(10).apply(held)
        for state in states[1:]:
            versions.publish(state)
        following.wait(10).apply(held)
    assert all(torch.equal(held[name], states[-1][name]) for name in held)


def test_other_tensors_than_before_are_read_whole(versions: Versions) -> None:
    """Blocks that did not change between the versions are not in the update. New tensors lack them."""
    frozen = torch.arange(600_000.0)
    state = {"frozen": frozen, "a": torch.zeros(10)}
    with Subscriber(versions.store, "policy") as following:
        versions.publish(state)
        following.wait(10).apply({name: torch.zeros_like(value) for name, value in state.items()})
        versions.publish(state)
        held = {name: torch.zeros_like(value) for name, value in state.items()}
        following.wait(10).apply(held)
    assert torch.equal(held["frozen"], frozen)


def test_a_change_that_fails_leaves_no_version(versions: Versions, monkeypatch: pytest.MonkeyPatch) -> None:
    states = [{"a": torch.arange(1000.0) * (n + 1), "b": torch.ones(1000) * n} for n in range(3)]
    held = {"a": torch.zeros(1000), "b": torch.zeros(500)}
    as_part(monkeypatch, ("b",), Box((1000,), (250,), (500,)))
    run = changes._Write.run

    def fail(write: changes._Write) -> None:
        if write.target.form.name == "b":
            raise KeyboardInterrupt
        run(write)

    with Subscriber(versions.store, "policy") as following:
        versions.publish(states[0])
        following.wait(10).apply(held)
        versions.publish(states[1])
        prepared = following.wait(10).prepare(held)
        monkeypatch.setattr(changes._Write, "run", fail)
        with pytest.raises(KeyboardInterrupt):
            prepared.commit()
        monkeypatch.setattr(changes._Write, "run", run)
        assert following.version is None
        with pytest.raises(UsageError):
            prepared.commit()
        versions.publish(states[2])
        following.wait(10).apply(held)
    assert torch.equal(held["a"], states[2]["a"])
    assert torch.equal(held["b"], states[2]["b"][250:750])


def test_of_two_prepared_versions_one_is_committed(versions: Versions) -> None:
    states = [{"a": torch.full((10,), float(n))} for n in range(2)]
    held = {"a": torch.zeros(10)}
    with Subscriber(versions.store, "policy") as following:
        versions.publish(states[0])
        one = following.wait(10)
        versions.publish(states[1])
        two = following.wait(10)
        prepared = one.prepare(held)
        with pytest.raises(UsageError, match="meanwhile"):
            two.prepare(held)
        again = one.prepare(held)
        with pytest.raises(UsageError, match="meanwhile"):
            prepared.commit()
        again.commit()
        assert following.version == 1
        assert torch.equal(held["a"], states[0]["a"])
        first, second = following.wait(10), following.wait(10)
        waiting = [first.prepare(held), second.prepare(held)]
        waiting[1].commit()
        with pytest.raises(UsageError, match="meanwhile"):
            waiting[0].commit()
    assert torch.equal(held["a"], states[1]["a"])


def test_an_update_from_another_parent_is_not_used(versions: Versions, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped publisher writes a record whose number was published and deleted: the update after it does not fit."""
    states = [{"a": torch.arange(1000.0)} for _ in range(3)]
    states[1]["a"][:50] += 1
    states[2]["a"][:80] += 2
    held = {"a": torch.zeros(500)}
    as_part(monkeypatch, ("a",), Box((1000,), (0,), (500,)))
    with Subscriber(versions.store, "policy") as following:
        versions.publish(states[0])
        following.wait(10).apply(held)
        second = versions.publish(states[1])
        versions.publish(states[2])
        late = versions.publish({"a": torch.arange(1000.0)})
        (versions.directory / records.key_of("policy", late.number)).unlink()
        assert second.update is not None
        versions.rewrite(msgspec.structs.replace(late, number=2, parent=1, parent_weights=second.parent_weights))
        following.wait(10).apply(held)
    assert torch.equal(held["a"], states[2]["a"][:500])


def test_a_publisher_that_slept_for_many_versions_fails(versions: Versions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "KEPT_VERSIONS", 2)
    state = {"a": torch.ones(10)}
    versions.publish(state)
    write, others = records.write, [True]

    def slow(store: Store, record: Published) -> bool:
        if others and others.pop():
            for _ in range(4):
                versions.publish(step=1)
        return write(store, record)

    monkeypatch.setattr(records, "write", slow)
    with pytest.raises(ConflictError, match="version 2"):
        versions.publish(step=1)
    assert records.require(versions.store, "policy").number == 5


def test_a_table_outlives_another_publisher_with_a_fast_clock(
    versions: Versions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A publisher whose clock is a week ahead removes old objects while another one writes its own."""
    from headrace.dataio.core.clock import SYSTEM_CLOCK

    class Ahead(type(SYSTEM_CLOCK)):  # type: ignore[misc]
        def time(self) -> float:
            return float(super().time() + 7 * 24 * 3600)

    versions.publish({"a": torch.ones(10)})
    second = versions.publish({"a": torch.zeros(10)})
    assert second.update is not None
    kept = versions.directory / f"published/policy/weights-{'0' * 26}"
    kept.write_bytes(b"of a publisher at work")
    base = steps.find(versions.store, "r", 1)
    assert base is not None
    publish(versions.store, "policy", "r", base, Choice(("model/*",)), clock=Ahead())
    assert kept.exists()


def test_no_two_versions_share_an_object(versions: Versions) -> None:
    """A deletion of an old version's table that is applied late must not remove that of a newer one."""
    one, two = versions.publish({"a": torch.ones(10)}), versions.publish(step=1)
    assert one.weights.key != two.weights.key


def test_a_publication_that_fails_leaves_no_tag(versions: Versions) -> None:
    base = steps.find(versions.store, "r", versions.save({"a": torch.ones(10)}))
    assert base is not None
    with pytest.raises(UsageError, match="matches nothing"):
        publish(versions.store, "policy", "r", base, Choice(("nothing/*",)))
    assert versions.tags() == []


def test_a_damaged_version_before_does_not_stop_the_next(versions: Versions) -> None:
    """A good step must be publishable after a damaged one."""
    versions.publish({"a": torch.rand(300_000)})
    for pack in versions.directory.glob("packs/*/*.pack"):
        data = bytearray(pack.read_bytes())
        data[1000:2000] = bytes(1000)
        pack.write_bytes(data)
    state = {"a": torch.rand(300_000)}
    assert versions.publish(state).update is None
    held = {"a": torch.zeros(300_000)}
    with Subscriber(versions.store, "policy") as following:
        following.wait(10).apply(held)
    assert torch.equal(held["a"], state["a"])


def test_a_damaged_record_does_not_stop_the_next_version(versions: Versions) -> None:
    first = versions.publish({"a": torch.ones(10)})
    (versions.directory / records.key_of("policy", first.number)).write_text("{}")
    with Subscriber(versions.store, "policy") as following:
        with pytest.raises(CorruptionError):
            following.wait(10)
        record = versions.publish({"a": torch.zeros(10)})
        assert (record.number, record.update) == (2, None)
        held = {"a": torch.ones(10)}
        following.wait(10).apply(held)
    assert not held["a"].any()


def test_held_weights_that_were_damaged_are_not_compared_with(
    versions: Versions, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = torch.arange(1000.0)
    second = first.clone()
    second[3] = 7
    held, keeps = {"a": torch.zeros(500)}, Held()
    as_part(monkeypatch, ("a",), Box((1000,), (0,), (500,)))
    with Subscriber(versions.store, "policy") as following:
        record = versions.publish({"a": first}, held=keeps)
        following.wait(10).apply(held)
        keeps.of(record)["a"][400] ^= 1
        versions.publish({"a": second}, held=keeps)
        following.wait(10).apply(held)
    assert torch.equal(held["a"], second[:500])


@pytest.mark.parametrize("name", ["x" * 80, "policy.000000001", "policy", "a.b-c_d"])
def test_names(versions: Versions, name: str) -> None:
    base = steps.find(versions.store, "r", versions.save({"a": torch.ones(10)}))
    assert base is not None
    for other in ("policy", "policy.000000001", name):
        for _ in range(2):
            publish(versions.store, other, "r", base, Choice())
    kept = set(versions.tags())
    for other in {"policy", "policy.000000001", name}:
        assert f"{records.require(versions.store, other).tag}.json" in kept


def test_changes_need_no_more_memory_than_the_weights(versions: Versions, monkeypatch: pytest.MonkeyPatch) -> None:
    held, sizes = {"a": torch.zeros(600_000, dtype=torch.bfloat16)}, list[int]()
    state = torch.randint(0, 1 << 14, (600_000,), dtype=torch.int16)
    with Subscriber(versions.store, "policy") as following:
        versions.publish({"a": state.view(torch.bfloat16)})
        following.wait(10).apply(held)
        state[torch.rand(600_000) < 0.6] ^= 3
        assert versions.publish({"a": state.view(torch.bfloat16)}).update is not None
        run = changes._Write.run
        monkeypatch.setattr(
            changes._Write,
            "run",
            lambda w: (sizes.append(w.values.nbytes + getattr(w.where, "nbytes", 0)), run(w)),
        )
        following.wait(10).apply(held)
    assert torch.equal(held["a"].view(torch.int16), state)
    assert sum(sizes) <= held["a"].nbytes


def test_the_last_number(versions: Versions) -> None:
    record = versions.publish({"a": torch.ones(10)})
    versions.rewrite(msgspec.structs.replace(record, number=10**9 - 1))
    with pytest.raises(UsageError, match="another name"):
        versions.publish(step=1)
    assert len(versions.tags()) == 1


@pytest.mark.parametrize("shape", [(3, 50, 70), (1, 9000), (9000,)])
def test_rows_that_are_longer_than_a_piece(
    versions: Versions, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    for module in (source, changes, comparison, targets, weights):
        if hasattr(module, "BLOCK_BYTES"):
            monkeypatch.setattr(module, "BLOCK_BYTES", 1024)
    monkeypatch.setattr(source, "PIECE_BYTES", 4096)
    sizes = list[int]()
    real = source._bytes_of

    def counted(tensor: torch.Tensor, dtype: torch.dtype) -> Bytes:
        data = real(tensor, dtype)
        sizes.append(len(data))
        return data

    monkeypatch.setattr(source, "_bytes_of", counted)
    elements = int(torch.tensor(shape).prod())
    first = torch.arange(float(elements)).reshape(shape)
    second = first.clone().reshape(-1)
    second[300:700] = torch.rand(400)
    second = second.reshape(shape)
    held = {"a": torch.zeros(shape)}
    monkeypatch.setattr(comparison, "_WORTH", 0.0)  # no update
    with Subscriber(versions.store, "policy") as following:
        versions.publish({"a": first})
        following.wait(10).apply(held)
        assert torch.equal(held["a"], first)
        assert versions.publish({"a": second}).update is None
        sizes.clear()
        following.wait(10).apply(held)
        assert torch.equal(held["a"], second)
        assert sum(sizes) <= 5 * 1024
    assert max(sizes) <= 4096


def test_a_subscriber_that_waits_asks_for_one_record(versions: Versions, monkeypatch: pytest.MonkeyPatch) -> None:
    versions.publish({"a": torch.ones(10)})
    lists = list[str]()
    real = type(versions.store).list

    def listed(store: Store, prefix: str = "") -> object:
        lists.append(prefix)
        return real(store, prefix)

    with Subscriber(versions.store, "policy", poll=0.001) as following:
        following.wait(10).apply({"a": torch.zeros(10)})
        monkeypatch.setattr(type(versions.store), "list", listed)
        with pytest.raises(Exception, match="no new version"):
            following.wait(0.2)
        looks = len(lists)
        monkeypatch.undo()
        versions.publish(step=1)
        assert following.wait(10).number == 2
    assert 1 <= looks <= 200 / subscriber._LOOKS_TO_LISTING + 2


def test_closing_ends_a_wait(versions: Versions) -> None:
    from threading import Timer

    following = Subscriber(versions.store, "policy", poll=0.01)
    Timer(0.2, following.close).start()
    with pytest.raises(UsageError, match="closed"):
        following.wait(20)


def test_a_truncated_update_is_replaced_by_the_step(versions: Versions) -> None:
    held = {"a": torch.zeros(1000)}
    second = torch.arange(1000.0) + (torch.arange(1000) % 50 == 0)
    with Subscriber(versions.store, "policy") as following:
        versions.publish({"a": torch.arange(1000.0)})
        following.wait(10).apply(held)
        record = versions.publish({"a": second})
        assert record.update is not None
        path = versions.directory / record.key_of(record.update)
        path.write_bytes(path.read_bytes()[:-3])
        following.wait(10).apply(held)
    assert torch.equal(held["a"], second)


def test_a_record_that_is_its_own_parent_is_refused(versions: Versions) -> None:
    with Subscriber(versions.store, "policy") as following:
        versions.publish({"a": torch.zeros(1000)})
        following.wait(10).apply({"a": torch.zeros(1000)})
        record = versions.publish({"a": torch.arange(1000.0)})
        versions.rewrite(msgspec.structs.replace(record, parent=record.number))
        with pytest.raises(CorruptionError, match="impossible"):
            following.wait(10)


def test_a_publication_reads_few_old_records(versions: Versions, monkeypatch: pytest.MonkeyPatch) -> None:
    versions.publish({"a": torch.ones(10)})
    for _ in range(5):
        versions.publish(step=1)
    reads, real = list[int](), records.read_record

    def counted(store: Store, name: str, number: int) -> Published:
        reads.append(number)
        return real(store, name, number)

    monkeypatch.setattr(records, "read_record", counted)
    versions.publish(step=1)
    assert len(reads) <= 4
    assert len(versions.tags()) == 2


def test_one_thread_at_a_time_writes_the_first_version(versions: Versions, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow thread must not continue to write an older version after another thread has applied a newer one."""
    held, began, go, run = {"a": torch.zeros(1000)}, threading.Event(), threading.Event(), changes._Write.run
    slow: list[threading.Thread] = []

    def write(one: changes._Write) -> None:
        if threading.current_thread() in slow:
            began.set()
            go.wait(5)
        run(one)

    monkeypatch.setattr(changes._Write, "run", write)
    with Subscriber(versions.store, "policy") as following:
        versions.publish({"a": torch.ones(1000)})
        first = following.wait(10)
        slow.append(threading.Thread(target=lambda: first.prepare(held)))
        slow[0].start()
        assert began.wait(10)
        versions.publish({"a": torch.zeros(1000)})
        second = following.wait(10)
        applying = threading.Thread(target=second.apply, args=(held,))
        applying.start()
        applying.join(0.3)
        go.set()
        applying.join(20)
        slow[0].join(20)
        assert following.version == 2
    assert not held["a"].any()


def test_threads_share_a_subscriber(versions: Versions) -> None:
    """Two threads apply one version: one of them changes the tensors, the other gets an error or finds nothing to do."""
    from concurrent.futures import ThreadPoolExecutor

    held = {"a": torch.zeros(1000)}
    with Subscriber(versions.store, "policy") as following, ThreadPoolExecutor(4) as pool:

        def follow() -> int:
            try:
                version = following.newest()
                if version is None:
                    return 0
                version.apply(held)
            except UsageError:
                return 0
            return 1

        for number in range(4):
            state = torch.arange(1000.0) + (torch.arange(1000) % 50 == number)
            versions.publish({"a": state})
            while following.version != number + 1:
                list(pool.map(lambda _: follow(), range(4)))
            assert torch.equal(held["a"], state)


def test_a_table_with_more_blocks_than_its_step_does_not_stop_the_next_version(versions: Versions) -> None:
    """The table of the version before names a tensor of two blocks, which has one in the step."""
    first, second = torch.zeros(1000), torch.ones(1 << 19)
    record = versions.publish({"w": first})
    form = weights.TensorBlocks("w", "float32", (1 << 19,), bytes(64))
    table = weights.store_weights(versions.store, "policy", weights.Weights((form,)), SYSTEM_CLOCK)
    versions.rewrite(msgspec.structs.replace(record, weights=table))
    after = versions.publish({"w": second})
    with Subscriber(versions.directory, "policy", sidecar=None) as subscriber:
        subscriber.wait(10).apply(held := {"w": torch.zeros(1 << 19)})
    assert (after.number, torch.equal(held["w"], second)) == (2, True)


def test_no_thread_compares_after_the_upload_of_the_update_has_failed(
    versions: Versions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error, which a future may keep for long, holds no threads and no memory of weights."""
    held, state = Held(), {"w": torch.zeros(1 << 20)}
    versions.publish(state, held=held)
    first = versions.save({"w": torch.ones(1 << 20)})

    def fail(_: str, parts: Iterable[bytes]) -> int:
        next(iter(parts))
        raise TransientError("the store is gone")

    monkeypatch.setattr(versions.store, "put_multipart", fail)
    with pytest.raises(TransientError) as kept:
        versions.publish(step=first, held=held)
    assert kept.value.__traceback__ is not None
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("headrace-publish_")]


def test_an_update_that_is_of_no_use_and_cannot_be_deleted_stops_no_version(
    versions: Versions, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions.publish({"w": torch.zeros(4000)})
    tried, delete = list[str](), versions.store.delete_many

    def fail(keys: Iterable[str]) -> None:
        for key in (listed := list(keys)):
            if "/update-" in key:
                tried.append(key)
                raise TransientError("the store is gone")
        delete(listed)

    monkeypatch.setattr(versions.store, "delete_many", fail)
    record = versions.publish({"w": torch.randn(4000)})  # no element is the same, so the update is as large as the step
    assert (record.number, record.update, len(tried)) == (2, None, 1)
