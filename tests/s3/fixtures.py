"""The servers as fixtures: one of each kind for a whole session, of which every test takes its own prefix."""

import os

import pytest

from tests.s3.servers import Moto, Rclone, Server, Weed, credentials, missing


def _running(kind: type[Server], factory: pytest.TempPathFactory):
    if (reason := missing(kind.program)) is not None:
        pytest.skip(reason)
    with kind(factory.mktemp(kind.program)) as server:
        yield server


@pytest.fixture(scope="session")
def weed(tmp_path_factory):
    yield from _running(Weed, tmp_path_factory)


@pytest.fixture(scope="session")
def rclone(tmp_path_factory):
    yield from _running(Rclone, tmp_path_factory)


@pytest.fixture(scope="session")
def moto(tmp_path_factory):
    yield from _running(Moto, tmp_path_factory)


@pytest.fixture
def aws(monkeypatch, tmp_path):
    """This process has the servers' keys, and no other AWS settings; give it a server for its certificate."""
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    for name, value in credentials(tmp_path / "aws").items():
        monkeypatch.setenv(name, value)

    def use(server: Server) -> Server:
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        return server

    return use
