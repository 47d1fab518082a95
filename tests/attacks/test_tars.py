"""Every tar of the corpus is refused by the reader of headers and by `index`, within bounded memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.dataio.shards import tar
from tests.attacks import peak
from tests.attacks.tars import ATTACKS, GOOD

pytestmark = pytest.mark.slow

BASE_MIB = 160
"""What a process takes that imports everything."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, str]:
    folder = tmp_path_factory.mktemp("tars")
    made = {}
    for number, (name, (data, _, _)) in enumerate(ATTACKS.items()):
        path = folder / f"{number}.tar"
        path.write_bytes(GOOD + data + tar.END)
        made[path] = name
    return made


@pytest.mark.parametrize(("call", "mib"), [("scan_tar", 20), ("index_tar", 150)])
def test_every_tar_attack_is_a_named_error_in_little_memory(corpus: dict[Path, str], call: str, mib: int) -> None:
    outcome = peak.run(f"tests.attacks.calls:{call}", list(corpus))
    assert len(outcome.raised) == len(ATTACKS)
    for path, raised in outcome.raised.items():
        _, expected, _ = ATTACKS[corpus[Path(path)]]
        assert raised is not None, corpus[Path(path)]
        assert raised[0] == expected.__name__, (corpus[Path(path)], raised)
        assert Path(path).name in raised[2]
        assert "offset" in raised[2]
    assert outcome.mib < BASE_MIB + mib


def test_a_sparse_file_of_a_terabyte_costs_no_memory(tmp_path: Path) -> None:
    length = 1 << 40
    with (tmp_path / "hole.tar").open("wb") as file:
        file.write(tar.header_for("a.bin", length))
        file.truncate(2 * length)
    outcome = peak.run("tests.attacks.calls:scan_tar", [tmp_path / "hole.tar"])
    assert list(outcome.raised.values()) == [None]  # a header of 512 zero bytes ends it: nothing of the hole is read
    assert outcome.mib < BASE_MIB + 20
