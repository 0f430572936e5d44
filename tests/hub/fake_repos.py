"""What a fake Hub keeps: repositories, their branches and commits, and files as git and its large storage name them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Blob:
    content: bytes
    lfs: bool = False

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def pointer(self) -> bytes:
        size = len(self.content)
        return f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {size}\n".encode()

    @property
    def oid(self) -> str:
        """As git names it: of a large file its pointer."""
        raw = self.pointer if self.lfs else self.content
        return hashlib.sha1(b"blob %d\0" % len(raw) + raw).hexdigest()


@dataclass
class Repo:
    private: bool = False
    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, Blob]] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(self, branch: str, files: dict[str, Blob], message: str) -> str:
        oid = hashlib.sha1(f"{len(self.commits)} {message}".encode()).hexdigest()
        self.commits[oid], self.branches[branch] = files, oid
        self.messages.append(message)
        return oid

    def resolve(self, revision: str) -> str | None:
        oid = self.branches.get(revision, revision)
        return oid if oid in self.commits else None

    @property
    def head(self) -> str:
        return self.branches["main"]

    @property
    def files(self) -> dict[str, Blob]:
        return self.commits[self.head]


class RefusalError(Exception):
    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        self.status, self.message, self.code = status, message, code
