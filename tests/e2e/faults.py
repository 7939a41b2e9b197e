"""What goes wrong below the service: a full or read-only disk, a clock that jumps, a loss of power."""

from __future__ import annotations

import errno
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Agent

SOURCE = Path(__file__).with_name("faults.c")


@pytest.fixture(scope="session")
def preloaded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """faults.c, built."""
    library = tmp_path_factory.mktemp("faults") / "faults.so"
    command = [os.environ.get("CC", "cc"), "-O1", "-shared", "-fPIC", SOURCE, "-o", library, "-ldl"]
    subprocess.run([str(word) for word in command], check=True)
    return library


class Faults:
    """Those of an agent whose services begin from now on, in its folder `state`."""

    def __init__(self, agent: Agent, library: Path) -> None:
        self.state = agent.folder / "state"
        self.disk = agent.folder / "disk"
        self._control = agent.folder / "faults.control"
        self._now = {"disk": 0, "stalled": 0, "off": 0}
        self._write()
        agent.env |= {
            "LD_PRELOAD": str(library),
            "FAULTS_CONTROL": str(self._control),
            "FAULTS_ROOT": str(self.state),
            "ASAN_OPTIONS": agent.env["ASAN_OPTIONS"] + ":verify_asan_link_order=0",
        }
        self._env = agent.env

    def _write(self) -> None:
        with self._control.open("r+b" if self._control.exists() else "wb") as file:
            file.write(struct.pack("iiq", *self._now.values()))

    def _set(self, name: str, value: int) -> None:
        self._now[name] = value
        self._write()

    def full(self) -> None:
        self._set("disk", errno.ENOSPC)

    def read_only(self) -> None:
        self._set("disk", errno.EROFS)

    def stall(self) -> None:
        """The disk takes writes, and never says that it has them."""
        self._set("stalled", 1)

    def mend(self) -> None:
        self._set("disk", 0)
        self._set("stalled", 0)

    def clock(self, seconds: int) -> None:
        """The wall clock is off by so many seconds."""
        self._set("off", seconds)

    def record(self) -> None:
        """Note from now on what is synced."""
        self.disk.mkdir()
        self._env["FAULTS_DISK"] = str(self.disk)

    def lose_power(self) -> None:
        """The state folder of a killed service as the disk has it: what was never synced is gone."""
        found = os.stat(self.state)
        left = self.state.with_name("left")
        shutil.rmtree(left, ignore_errors=True)
        self._restore(self._key(self.state), left)
        os.chmod(left, found.st_mode & 0o777)
        shutil.rmtree(self.state)
        shutil.rmtree(self.disk)
        self.disk.mkdir()
        left.rename(self.state)
        self._keep(self.state)

    @staticmethod
    def _key(path: Path) -> str:
        done = subprocess.run(["stat", "-c", "%i %W %w", path], capture_output=True, text=True, check=True)
        inode, seconds, born = done.stdout.split(maxsplit=2)
        return f"{inode}-{seconds}-{int(born.split('.')[1].split()[0])}"

    def _restore(self, key: str, to: Path) -> None:
        to.mkdir()
        listed = self.disk / f"{key}.folder"
        for line in listed.read_text().splitlines() if listed.exists() else []:
            kind, own, name = line.split(" ", 2)
            if kind == "d":
                self._restore(own, to / name)
            elif kind == "f":
                bytes_ = self.disk / own
                (to / name).write_bytes(bytes_.read_bytes() if bytes_.exists() else b"")
                (to / name).chmod(0o600)

    def _keep(self, folder: Path) -> None:
        """What is there now is on the disk."""
        lines = []
        for path in folder.iterdir():
            key = self._key(path)
            lines.append(f"{'d' if path.is_dir() else 'f'} {key} {path.name}\n")
            if path.is_dir():
                self._keep(path)
            else:
                shutil.copy(path, self.disk / key)
        (self.disk / f"{self._key(folder)}.folder").write_text("".join(lines))


@pytest.fixture
def faults(agent: Agent, preloaded: Path) -> Iterator[Faults]:
    one = Faults(agent, preloaded)
    yield one
    one.mend()
