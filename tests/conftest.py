"""What test files share. Whole models for tests are in tiny.py."""

import socket
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
import tiny
from stub_hub import DRAFTER, TARGET, StubHub, point_to

from mlx_dflash import calibrate, download
from mlx_dflash.costs import Costs, Curve


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No network, here and in subprocesses, and an empty cache: what the user has downloaded is out of sight."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError("no network in tests")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("MLX_DFLASH_CACHE", str(tmp_path_factory.getbasetemp() / "mlx_dflash"))


@pytest.fixture(autouse=True)
def flat_costs(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No measurement, nothing kept: "auto" begins as on a machine whose rounds cost the same at any width."""
    flat = {source: {2: 1e-3, 16: 1e-3} for source in ("drafter", "lookup")}
    monkeypatch.setattr(calibrate, "measure", lambda *_: Costs({0: Curve(1e-3, flat)}))
    monkeypatch.setattr(calibrate, "folder", lambda: tmp_path_factory.mktemp("costs"))


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[StubHub]:
    """A stub hub with a tiny pair, an empty cache, and no other network."""
    server = StubHub()
    server.add(TARGET, tiny.target_folder())
    server.add(DRAFTER, tiny.draft_folder())
    point_to(monkeypatch, server.url, tmp_path / "hub")
    monkeypatch.setattr(download, "LARGE", 20_000)
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 10_000)  # written at a time, of 10 MB
    real = socket.socket.connect

    def local_only(self: socket.socket, address: tuple[str, int]) -> None:
        assert address[0] in ("127.0.0.1", "::1"), address
        return real(self, address)

    monkeypatch.setattr(socket.socket, "connect", local_only)
    yield server
    server.close()
