"""What an engine needs of an NVMe drive: a folder of its own, threads that read and write, files for its vectors."""

from __future__ import annotations

import os

from hf_zero.config import Aio
from hf_zero.offload.failures import StorageError
from hf_zero.offload.nvme.requests import FileAccess, Requests
from hf_zero.offload.nvme.run_folder import RunFolder
from hf_zero.offload.nvme.swap_file import SwapFile
from hf_zero.offload.nvme.swap_store import BufferPool, SwapStore

ACCESS = FileAccess()


class Drive:
    """A folder of this process on the drive at `root`, and everything kept there."""

    def __init__(self, root: str | os.PathLike[str], policy: Aio) -> None:
        """Raises StorageError when the folder cannot be used."""
        self.folder = RunFolder(root)
        self.requests = Requests(policy, ACCESS)
        self._stores: list[SwapStore] = []

    @property
    def failure(self) -> StorageError | None:
        """The first thing that could not be read or written."""
        return self.requests.failure

    def file(self, name: str) -> SwapFile:
        return SwapFile(self.folder, name, self.requests)

    def store(self, file: SwapFile, pool: BufferPool, *, writes_first: bool = True) -> SwapStore:
        found = SwapStore(file, pool, writes_first=writes_first)
        self._stores.append(found)
        return found

    @property
    def buffer_bytes(self) -> int:
        """Host memory of all buffers, of each kind at its fullest."""
        return sum(store.pool.most_bytes for store in self._stores)

    def release_buffers(self) -> None:
        """One kind of work is over and another begins: its buffers make room."""
        for store in self._stores:
            store.pool.release_buffers()

    def close(self) -> None:
        """Finish what is under way and remove the folder."""
        self.requests.close()
        self.folder.close()
