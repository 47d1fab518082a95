"""Without a GPU the way through host memory is the one that runs; the other is marked `gpu`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace.checkpoint import gds
from headrace.dataio.core.errors import TransientError, UsageError
from tests.support.gds_host import Counts


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_the_probe_says_so_in_one_line() -> None:
    verdict = gds.probe()
    assert not verdict.available
    assert str(verdict) == "GPUDirect Storage: not available, torch sees no GPU; copies go through host memory"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.float8_e4m3fn])
@pytest.mark.parametrize("offset", [0, 4096, 7])
def test_tensors_go_through_host_memory_bit_for_bit(tmp_path: Path, dtype: torch.dtype, offset: int) -> None:
    given = (torch.randn(33, 5) * 3).to(dtype)
    back = torch.zeros(33, 5).to(dtype)
    with gds.GpuFile(tmp_path / "file", writing=True) as file:
        file.write(given, offset)
        file.sync()
    with gds.GpuFile(tmp_path / "file") as file:
        file.read(back, offset)
    assert torch.equal(given.view(torch.uint8), back.view(torch.uint8))
    assert (tmp_path / "file").stat().st_size == offset + given.nbytes
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600


def test_a_file_that_is_too_short_is_an_error_that_says_where_it_ends(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 10)
    with gds.GpuFile(tmp_path / "file") as file, pytest.raises(TransientError, match="ends after 10 of 64 bytes"):
        file.read(torch.zeros(16), 0)


def test_a_transfer_that_was_cut_short_is_an_error(tmp_path: Path) -> None:
    """torch's binding of cuFile takes any number of bytes for success."""
    counts, given = Counts(), torch.ones(4 * gds.ALIGNMENT, dtype=torch.uint8)
    with gds.GpuFile(tmp_path / "file", writing=True, direct=counts.direct()) as file:
        counts.short = 1
        with pytest.raises(TransientError, match="ends after 12288 of 16384 bytes"):
            file.write(given, 0)
        with pytest.raises(TransientError, match="ends after 12288 of 16384 bytes"):
            file.read(given, 0)
        file.write(given, 0)
        file.read(torch.zeros_like(given), 0)


def test_a_strided_tensor_is_refused(tmp_path: Path) -> None:
    with gds.GpuFile(tmp_path / "file", writing=True) as file, pytest.raises(UsageError, match="contiguous"):
        file.write(torch.zeros(4, 4).t(), 0)


def test_a_single_number_is_a_tensor_too(tmp_path: Path) -> None:
    back = torch.tensor(0.0)
    with gds.GpuFile(tmp_path / "file", writing=True) as file:
        file.write(torch.tensor(2.5), 0)
        file.read(back, 0)
    assert back.item() == 2.5


@pytest.mark.gpu
def test_what_the_probe_allows_works_and_what_it_refuses_has_a_reason(tmp_path: Path) -> None:
    verdict = gds.probe(tmp_path)
    assert verdict.reason
    given = torch.randn(1 << 20, device="cuda")
    back = torch.zeros_like(given)
    with gds.GpuFile(tmp_path / "file", writing=True, direct=verdict.available) as file:
        file.write(given, 0)
        file.sync()
        file.read(back, 0)
    assert torch.equal(given, back)
